"""What an operator may set about a running server.

The command line takes each of these as an option, and from the environment:

    --store          VOLCANO_STORE          sqlite:///relative.db, sqlite:////absolute.db,
                                            postgresql://user@host:5432/database
    --host           VOLCANO_HOST           127.0.0.1
    --port           VOLCANO_PORT           8790
    --log-requests   VOLCANO_LOG_REQUESTS   off
"""

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8790


class SettingError(ValueError):
    """A setting that cannot be used.  The text names it, what came and what is right.

    `exit_status`: of sysexits.h.
    """

    def __init__(self, sentence: str, exit_status: int = 64) -> None:  # EX_USAGE
        super().__init__(sentence)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True)
class Settings:
    """How the app behaves.  Durations are in seconds."""

    log_requests: bool = False
    test_controls: bool = False
    """Serve /_test: for development servers alone."""
    access_refresh: float = 0.5
    """How often changed credentials are looked for."""
    counts_exchange: float = 0.5
    """How often replicas tell each other how much of its quota each project has used."""
    body_patience: float = 5.0
    """How long a request's body may take."""


_SQLITE = "sqlite:///"


def parse_store_url(url: str) -> Path:
    """The path in `sqlite:///path`: from the working directory, unless it begins with a slash."""
    path = url.removeprefix(_SQLITE)
    if path == url or Path(path).name in ("", "..") or "?" in path or "#" in path:
        shown = re.sub(r"://.*@", "://…@", url)  # there may be a password in it
        raise SettingError(
            f"--store: got {shown!r}; send sqlite:///relative/path.db, sqlite:////absolute/path.db"
            " or postgresql://user@host:5432/database"
        )
    return Path(path)


def is_database_url(url: str) -> bool:
    """A PostgreSQL database, as libpq writes it."""
    return url.startswith(("postgresql://", "postgres://"))
