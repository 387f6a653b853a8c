r"""An event stream of a server, as the runner reads it: bytes in, comments and events out.

A thread reads it until either side ends it.  Each piece is kept as it came, so that the gate can
hand it on byte for byte:

    : open\n\n                                      a comment, told of at once
    event: released\nid: 42\ndata: {…}\n\n         an event, kept until somebody takes it
"""

import http.client
import io
import json
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_COMMENT = re.compile(rb"(?::[^\r\n]*)?(?:\r\n|\r|\n)+")
_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Event:
    raw: bytes
    fields: dict[str, str]  # {"event": "released", "id": "42", "data": "{…}"}

    @property
    def type(self) -> str:
        return self.fields.get("event", "message")

    def seen(self) -> dict[str, Any]:
        """For matching: the data's members, and beside them `type`, `id` and `data`."""
        try:
            data = json.loads(self.fields.get("data", ""))
        except ValueError:
            data = self.fields.get("data")
        members = data if isinstance(data, dict) else {}
        seen = {**members, "type": self.type, "id": self.fields.get("id"), "data": data}
        return {name: value for name, value in seen.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.type} id={self.fields.get('id')} {self.fields.get('data')}"


def pieces(buffer: bytes) -> Iterator[bytes | Event]:
    """The whole comments and events at its start; what is not whole is left out."""
    while True:
        if found := _COMMENT.match(buffer):
            yield found[0]
        elif found := _EVENT.match(buffer):
            yield _event(found[0])
        else:
            return
        buffer = buffer[found.end() :]


def _event(raw: bytes) -> Event:
    fields: dict[str, str] = {}
    for line in re.split(r"\r\n|\r|\n", raw.decode("utf-8", "replace")):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name:
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
    return Event(raw, fields)


class EventStream:
    """Its head has come and was a 200.  `on_change` is called after each piece, and at the end."""

    def __init__(self, response: http.client.HTTPResponse, source: "Source") -> None:
        self._response, self._source = response, source
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._buffer = b""
        self._began = threading.Event()
        self.has_ended = False
        self.begins_with_a_comment = False
        self.on_piece: Callable[[bytes | Event], bool] = lambda _piece: False
        """Asked first; who answers True has dealt with it."""
        self.on_change: Callable[[], None] = lambda: None
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self, patience: float) -> None:
        """Returns when something has come: from then on the server tells of everything."""
        self._thread.start()
        self._began.wait(patience)

    def first(self) -> Event | None:
        with self._lock:
            return self._events[0] if self._events else None

    def wait(self, seconds: float) -> None:
        """Until something comes, at most so long."""
        self._news.wait(seconds)
        self._news.clear()

    def take(self) -> Event:
        with self._lock:
            return self._events.pop(0)

    def take_in(self, patience: float) -> None:
        """Until all that the server has sent by now is known."""
        self._source.drain(patience)

    def close(self) -> None:
        self._source.end()

    def _read(self) -> None:
        try:
            while some := self._response.read1(65_536):
                self._take_apart(some)
        except (OSError, http.client.HTTPException, ValueError):
            pass  # broken, or closed from here: it has ended
        self.has_ended = True
        self._began.set()
        self._response.close()
        self._source.close()
        self.on_change()

    def _take_apart(self, some: bytes) -> None:
        self._buffer += some
        for piece in pieces(self._buffer):
            raw = piece.raw if isinstance(piece, Event) else piece
            self._buffer = self._buffer[len(raw) :]
            if not self._began.is_set():
                self.begins_with_a_comment = raw.startswith(b":")
            if not self.on_piece(piece) and isinstance(piece, Event):
                with self._lock:
                    self._events.append(piece)
            self._began.set()
            self._news.set()
            self.on_change()


class Source(io.RawIOBase):
    """What the reading thread reads from: a socket that knows whether all of it was dealt with."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self._socket = connected
        self._changed = threading.Condition()
        self._at_work = True  # has taken bytes in and not yet asked for more
        self._shut = False

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks a socket for."""
        del mode
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._changed:
            self._at_work = False
            self._changed.notify_all()
        if not self._has_decrypted():
            patience = self._socket.gettimeout()
            if not any(select.select([self._socket], [], [], patience)):
                raise TimeoutError(f"nothing came within {patience:g} s")
        with self._changed:
            self._at_work = True
            return 0 if self._shut else self._socket.recv_into(buffer)

    def drain(self, patience: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._shut or self._is_dry(), patience)

    def _has_decrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _is_dry(self) -> bool:
        if self._at_work or self._has_decrypted():
            return False
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable

    def end(self) -> None:
        """Wakes the reading thread, which closes it."""
        with self._changed:
            if self._shut:
                return
            self._shut = True
            self._changed.notify_all()
        with suppress(OSError):  # the other side has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        super().close()
        self._socket.close()
