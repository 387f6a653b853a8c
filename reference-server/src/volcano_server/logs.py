"""What the server says to its operator: one JSON object a line, on stderr.

Always: `server_started`, `server_stopped`, `credentials_changed`, every 5xx.  With --log-requests
one line a request.  Never a service key, an anon key or a lock token.

stdlib logging costs 43 µs a call even for a line like these; this is a dict and a write.
"""

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO

import structlog


class Log:
    """Events for the operator.  `quiet` leaves out what a person at a terminal sees anyway."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._logger: Any = structlog.wrap_logger(
            structlog.WriteLogger(stream or sys.stderr),
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def note(self, event: str, **facts: Any) -> None:
        """Something ordinary."""
        if not self._quiet:
            self._write("info", event, facts)

    def request(self, *, failed: bool, **facts: Any) -> None:
        self._write("error" if failed else "info", "request", facts)

    def trouble(self, event: str, **facts: Any) -> None:
        """Something an operator should look at.  `exc_info=True` adds the traceback."""
        self._write("error", event, facts)

    def _write(self, level: str, event: str, facts: dict[str, Any]) -> None:
        # A full disk, or a pipe whose reader has gone: a line is lost.  Raised, it would cost the
        # answer to a request that is decided already.
        with suppress(OSError):
            getattr(self._logger, level)(event, **facts)


def silence_uvicorn() -> None:
    """Its lines are not JSON, and what they say of faults the app has said already."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
