"""Settings that come as text."""

from pathlib import Path

import pytest

from volcano_server.settings import SettingError, parse_store_url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///locks.db", Path("locks.db")),
        ("sqlite:///data/locks.db", Path("data/locks.db")),
        ("sqlite:////var/lib/locks.db", Path("/var/lib/locks.db")),
    ],
)
def test_a_store_url_has_three_slashes_and_a_path(url: str, path: Path) -> None:
    assert parse_store_url(url) == path


@pytest.mark.parametrize(
    "url",
    [
        "",
        "locks.db",
        "sqlite:",
        "sqlite://locks.db",
        "sqlite:///",
        "SQLITE:///a",
        "sqlite:///a?b=c",
    ],
)
def test_another_url_is_refused_with_what_is_right(url: str) -> None:
    with pytest.raises(SettingError, match=r"--store: got .* sqlite:///relative") as refusal:
        parse_store_url(url)

    assert refusal.value.exit_status == 64


@pytest.mark.parametrize("password", ["secret", "se:cret", "se@cret", "secret@"])
def test_a_password_in_a_wrong_url_is_not_repeated(password: str) -> None:
    with pytest.raises(SettingError) as refusal:
        parse_store_url(f"mysql://user:{password}@host/database")

    assert "cret" not in str(refusal.value)
    assert "…@host/database" in str(refusal.value)
