"""One event stream between the server and an SDK, and what a gate does to sockets.

SDK  <--- Relay, one per open event stream ---  EventStream of the server
          comments pass; each event is parked until the script names it
"""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from conformance.stream import Event, EventStream

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for 0 s: to close is to reset."""


def peek(connected: socket.socket) -> bytes | None:
    """What comes next, which stays to be read: b"" is the end, None is nothing yet."""
    try:
        return connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def is_connected(connected: socket.socket) -> bool:
    return peek(connected) != b""


class Relay:
    """One event stream between the server and an SDK.

    The handler thread of its request waits for the SDK to close it; the stream's own thread hands
    on what passes; the playing thread hands on, or drops, what was parked.
    """

    def __init__(self, connected: socket.socket, stream: EventStream) -> None:
        self._socket, self._stream = connected, stream
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._held: list[bytes] | None = []  # until the head was written; then None
        self._is_over = False
        self.written = 0
        """Bytes of the body that were written to the SDK."""
        self.is_silent = False
        """Comments are kept back."""
        self.parks = True
        """Events wait until they are named."""
        self.on_change: Callable[[], None] = lambda: None
        stream.on_piece = self._heard
        stream.on_change = self._changed

    def _heard(self, piece: bytes | Event) -> bool:
        if not isinstance(piece, Event):
            self.comment(piece)
        elif not self.parks:
            self.write(piece.raw)
        return not isinstance(piece, Event) or not self.parks

    def _changed(self) -> None:
        if self._stream.has_ended and self._stream.first() is None:
            self.end()
        self.on_change()

    def begin(self) -> None:
        with self._lock:
            held, self._held = self._held or [], None
        for piece in held:
            self.write(piece)

    def first(self) -> Event | None:
        """The one that is parked in front."""
        return self._stream.first() if self.is_open() else None

    def take_in(self, patience: float) -> None:
        self._stream.take_in(patience)

    def deliver(self) -> None:
        self.write(self._stream.take().raw)
        self._changed()

    def drop(self) -> None:
        self._stream.take()
        self._changed()

    def comment(self, text: bytes) -> None:
        if not self.is_silent:
            self.write(text)

    def write(self, piece: bytes) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(piece)
                return
            with suppress(OSError):  # the SDK has gone; the handler thread notices too
                self._socket.sendall(piece)
                self.written += len(piece)

    def end(self) -> None:
        """As a server that stops does it."""
        with self._lock:
            self._is_over = True
            with suppress(OSError):
                self._wake.send(b"x")

    def lose(self) -> None:
        """As a network that breaks does it."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.end()

    def is_open(self) -> bool:
        return not self._is_over and is_connected(self._socket)

    def wait_for_its_end(self) -> None:
        """The handler thread's part."""
        either = select.poll()
        either.register(self._socket, select.POLLIN)
        either.register(self._woken, select.POLLIN)
        either.poll()

    def close(self) -> None:
        self._stream.close()
        with self._lock:
            self._is_over = True
            self._wake.close()
            self._woken.close()
        self.on_change()
