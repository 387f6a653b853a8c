import re
from typing import Any

import httpx
import pytest

from volcano_sdk import AsyncVolcanoClient, VolcanoClient
from volcano_sdk.errors import AuthenticationError
from volcano_sdk.settings import Settings, checked_http_client, without_userinfo

URL = "http://127.0.0.1:8790"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_arguments_come_before_the_environment() -> None:
    environ = {
        "VOLCANO_API_URL": "http://elsewhere",
        "VOLCANO_ANON_KEY": "ak-env",
        "VOLCANO_SERVICE_KEY": "sk-env",
    }

    given = Settings.resolve(api_url=URL, anon_key="ak", service_key="sk", environ=environ)
    found = Settings.resolve(environ=environ)

    assert (given.api_url, given.anon_key, given.service_key) == (URL, "ak", "sk")
    assert (found.api_url, found.anon_key, found.service_key) == (
        "http://elsewhere",
        "ak-env",
        "sk-env",
    )
    assert found.timeout == 10.0


@pytest.mark.parametrize("url", [None, ""])
def test_no_url_is_refused_with_what_to_do(url: str | None) -> None:
    with pytest.raises(ValueError, match=r"api_url=.*VOLCANO_API_URL.*volcano-server dev"):
        Settings.resolve(api_url=url, environ={})


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8790",
        "ftp://host",
        "http://",
        "http://h:x",
        "http://h?a=1",
        "http://h#a",
        "http://a b",
        7,
        "http://[::1",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="api_url must be an http:// or https:// URL"):
        Settings.resolve(api_url=url, environ={})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@host/", "http://host/"),
        ("http://me:hunter2@a b", "http://a b"),
        ("http://me:hunter2@host:99999", "http://host:99999"),
        ("http://me:hunter2@[::1", "http://[::1"),
        ("http://me:hunt/er@2@host", "http://host"),
        ("me:hunter2@host", "host"),
        ("http://me:hunter2\n@host", "http://host"),
    ],
)
def test_a_url_with_a_password_is_refused_without_showing_it(url: str, shown: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {shown!r}")) as refusal:
        Settings.resolve(api_url=url, environ={})

    assert "hunt" not in str(refusal.value)


def test_a_trailing_slash_says_nothing() -> None:
    assert Settings.resolve(api_url=f"{URL}/base/", environ={}).api_url == f"{URL}/base"


@pytest.mark.parametrize("key", ["sk-with\nnewline", "sk-é", "sk with space", 7])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="service_key must be a string of visible") as refusal:
        Settings.resolve(api_url=URL, service_key=key, environ={})

    assert "with" not in str(refusal.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e10, 10**400, True, "10"])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0"):
        Settings.resolve(api_url=URL, timeout=timeout, environ={})


@pytest.mark.parametrize("key", [None, ""])
def test_without_a_service_key_there_is_no_credential(key: str | None) -> None:
    settings = Settings.resolve(api_url=URL, service_key=key, environ={})

    with pytest.raises(AuthenticationError, match="VOLCANO_SERVICE_KEY") as refusal:
        _ = settings.credential
    assert refusal.value.status is None


def test_no_repr_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:hunter2@proxy:3128")
    settings = Settings.resolve(
        api_url="http://example.com", anon_key="ak-1", service_key="sk-1", environ={}
    )

    assert settings.credential == "sk-1"
    for secret in ("ak-1", "sk-1", "hunter2"):
        assert secret not in repr(settings)


def test_the_environments_proxy_is_found_and_can_be_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "me:hunter2@proxy:3128")
    monkeypatch.setenv("no_proxy", "inner.example")

    found = Settings.resolve(api_url="http://example.com", environ={})
    assert found.proxy == "http://me:hunter2@proxy:3128"
    assert found.proxy_name == "http://proxy:3128"

    assert Settings.resolve(api_url="http://inner.example", environ={}).proxy is None
    ignored = Settings.resolve(api_url="http://example.com", trust_env=False, environ={})
    assert ignored.proxy is None
    assert ignored.proxy_name is None
    assert Settings.resolve(api_url="https://example.com", environ={}).proxy is None
    monkeypatch.setenv("all_proxy", "http://other:1")
    assert Settings.resolve(api_url="https://example.com", environ={}).proxy == "http://other:1"


@pytest.mark.parametrize(
    "proxy",
    [
        "ftp://me:hunter2@proxy",
        "socks5://me:hunter2@proxy",
        "http://me:hunter2@proxy:port",
        "http://me:hunter2@proxy:99999",
        "http://me:hunter2@[proxy",
        "http://me:hunter2@pro xy",
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)

    with pytest.raises(
        ValueError, match=r"proxy (ftp|socks5|http)://\[?pro.*trust_env=False"
    ) as refusal:
        Settings.resolve(api_url="http://example.com", environ={})
    assert "hunter2" not in str(refusal.value)


def test_a_url_without_a_user_stays_as_it_is() -> None:
    assert without_userinfo("http://host:1/p") == "http://host:1/p"


# --- an injected client


HERE = __name__.partition(".")[0]


class Awaited:
    """Of httpx's kind, but another library's."""

    async def request(self, *_: object, **__: object) -> None: ...


class Called:
    def request(self, *_: object, **__: object) -> None: ...


def test_an_injected_client_may_be_any_of_its_kind() -> None:
    with httpx.Client() as http:
        checked_http_client(http, is_async=False)
    checked_http_client(httpx.AsyncClient(), is_async=True)
    checked_http_client(Called(), is_async=False)
    checked_http_client(Awaited(), is_async=True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (httpx.AsyncClient(), "an instance of httpx.AsyncClient"),
        (Awaited(), f"an instance of {HERE}.Awaited"),
        (httpx.Client, "the class httpx.Client"),
        (object(), "an instance of builtins.object"),
        ("http://127.0.0.1", "an instance of builtins.str"),
    ],
)
def test_the_sync_client_refuses_an_injected_client_of_another_kind(wrong: Any, named: str) -> None:
    with pytest.raises(TypeError) as caught:
        VolcanoClient(api_url=URL, http_client=wrong)

    assert str(caught.value) == (
        f"http_client of VolcanoClient must be an httpx.Client or one of its kind; got {named}"
    )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (httpx.Client(), "an instance of httpx.Client"),
        (Called(), f"an instance of {HERE}.Called"),
        (httpx.AsyncClient, "the class httpx.AsyncClient"),
        (httpx, "an instance of builtins.module"),
    ],
)
def test_the_async_client_refuses_an_injected_client_of_another_kind(
    wrong: Any, named: str
) -> None:
    with pytest.raises(TypeError) as caught:
        AsyncVolcanoClient(api_url=URL, http_client=wrong)

    assert str(caught.value) == (
        "http_client of AsyncVolcanoClient must be an httpx.AsyncClient or one of its kind;"
        f" got {named}"
    )
