"""What a client is configured with, from arguments first and the environment second.

Shared by both flavours.  A repr shows no key.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from volcano_sdk.errors import AuthenticationError

DEFAULT_TIMEOUT = 10.0

LONGEST_TIMEOUT = 1e6  # the platform's own limit for a socket is twice that

_VISIBLE = re.compile(r"[!-~]+")  # what may stand in a header, and in a URL
_USERINFO = re.compile(r"\A([^/]*//)?.*@", re.DOTALL)  # too much rather than too little


@dataclass(frozen=True, slots=True)
class Settings:
    """`api_url` has no trailing slash; `timeout` bounds one try, in seconds.

    `proxy` is the URL of the proxy that the environment names for `api_url`, with its password.
    """

    api_url: str
    anon_key: str | None = field(default=None, repr=False)
    service_key: str | None = field(default=None, repr=False)
    timeout: float = DEFAULT_TIMEOUT
    proxy: str | None = field(default=None, repr=False)

    @staticmethod
    def resolve(
        *,
        api_url: str | None = None,
        anon_key: str | None = None,
        service_key: str | None = None,
        timeout: float | None = None,
        trust_env: bool = True,
        environ: Mapping[str, str] = os.environ,
    ) -> "Settings":
        """Arguments that are None are looked up in the environment; ValueError names what is wrong.

        `trust_env=False` ignores HTTP_PROXY and its kind.
        """
        url = _checked_url(environ.get("VOLCANO_API_URL") if api_url is None else api_url)
        return Settings(
            api_url=url,
            anon_key=_checked_secret("anon_key", anon_key, environ.get("VOLCANO_ANON_KEY")),
            service_key=_checked_secret(
                "service_key", service_key, environ.get("VOLCANO_SERVICE_KEY")
            ),
            timeout=_checked_timeout(DEFAULT_TIMEOUT if timeout is None else timeout),
            proxy=_proxy_for(url) if trust_env else None,
        )

    @property
    def credential(self) -> str:
        """The service key, or AuthenticationError: every lock call needs it."""
        if not self.service_key:
            raise AuthenticationError(
                "locks need a service key: pass service_key=... or set VOLCANO_SERVICE_KEY"
            )
        return self.service_key

    @property
    def proxy_name(self) -> str | None:
        """The proxy as an error may show it: without user and password."""
        return None if self.proxy is None else without_userinfo(self.proxy)


def checked_http_client(client: Any, *, is_async: bool) -> None:
    """TypeError for an injected client of the other flavour, or for what is none."""
    is_class = isinstance(client, type)
    if not is_class and callable(getattr(client, "request", None)):
        is_awaited = iscoroutinefunction(client.request) or hasattr(client, "aclose")
        if is_awaited is is_async:
            return
    kind = client if is_class else type(client)
    flavour = "Async" if is_async else ""
    got = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    raise TypeError(
        f"http_client of {flavour}VolcanoClient must be an httpx.{flavour}Client or one of its"
        f" kind; got {'the class' if is_class else 'an instance of'} {got}"
    )


def without_userinfo(url: str) -> str:
    """The URL, or what was meant to be one, without user name and password."""
    return _USERINFO.sub(r"\1", url)


def _checked_url(url: object) -> str:
    if url is None or url == "":
        raise ValueError(
            "no API URL: pass api_url=... or set VOLCANO_API_URL"
            " (`volcano-server dev` starts a local server and prints its URL)"
        )
    parts = _split(url) if isinstance(url, str) else None
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        got = without_userinfo(url) if isinstance(url, str) else url
        raise ValueError(
            "api_url must be an http:// or https:// URL with a host, and without user, query"
            f" and fragment, such as http://127.0.0.1:8080; got {got!r}"
        )
    return urlunsplit(parts).rstrip("/")


def _split(url: str) -> SplitResult | None:
    if not _VISIBLE.fullmatch(url):
        return None
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where the port is none
    except ValueError:
        return None
    return parts


def _checked_secret(name: str, value: object, otherwise: str | None) -> str | None:
    secret = otherwise if value is None else value
    if secret is None or secret == "":
        return None
    if not isinstance(secret, str) or not _VISIBLE.fullmatch(secret):
        raise ValueError(f"{name} must be a string of visible ASCII characters (it is not shown)")
    return secret


def _checked_timeout(timeout: object) -> float:
    if (
        isinstance(timeout, int | float)
        and not isinstance(timeout, bool)
        and 0 < timeout <= LONGEST_TIMEOUT
    ):
        return float(timeout)
    raise ValueError(
        f"timeout must be a number of seconds above 0, at most a million; got {timeout!r:.80}"
    )


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    its = _split(proxy)
    problem = None
    if its is None or its.scheme not in ("http", "https", "socks5", "socks5h") or not its.hostname:
        problem = "is not an http://, https:// or socks5:// URL with a host"
    elif its.scheme.startswith("socks5") and find_spec("socksio") is None:
        problem = "needs the package socksio (pip install 'httpx[socks]')"
    if problem is not None:
        raise ValueError(
            f"the environment's proxy {without_userinfo(proxy)} {problem};"
            " trust_env=False ignores it"
        )
    return proxy
