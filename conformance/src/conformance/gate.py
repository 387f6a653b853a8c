"""The gate: where each request of an actor is parked until the script says what becomes of it.

One port per actor.  A handler thread takes a request in, and sleeps until the playing thread has
carried out a verdict: hand the server's (or a made-up) answer over, close the connection, or let
it hang.  HTTP/1.0 towards the SDK: every connection carries one exchange, so a lost answer is
never mistaken for a stale kept connection.  Event streams: relay.py.
"""

import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes, urlsplit

from pytest_httpserver.httpserver import HTTPServerBase
from werkzeug import Request, Response
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from conformance.relay import RESET, Relay, is_connected, peek
from conformance.stream import Event, EventStream
from conformance.target import Answer, Headers

_LEASE_ROUTE = re.compile(r"/locks/([^/?]*)/lease")
_LOCK_ROUTE = re.compile(r"/locks/([^/?]*)")
_STREAM_ROUTE = "/lock-events"
_OPERATIONS = {"POST": "acquire", "PATCH": "renew", "DELETE": "release"}
_LOCK_OPERATIONS = {"GET": "get", "DELETE": "force_release"}


class Parked:
    """One request that came and waits for its verdict."""

    def __init__(self, request: Request) -> None:
        self.came_at = time.monotonic()
        self.method: str = request.method
        self.path: str = request.environ["RAW_URI"]
        self.headers: Headers = list(request.headers.items())
        self.body: bytes = request.get_data()
        self.json: Any = request.get_json(silent=True, force=True) if self.body else None
        self.connection: socket.socket = request.environ["werkzeug.socket"]
        self._answer: Answer | None = None
        self._relay: Relay | None = None
        self._verdict = threading.Event()
        self._carried_out = threading.Event()
        self.hung = False
        self.is_answered_by_itself = False
        """The script does not wait for it; who waits for rest has to."""

    def header(self, name: str) -> str | None:
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), None)

    def operation(self) -> str:
        if match := _LEASE_ROUTE.fullmatch(self.path):
            return _OPERATIONS.get(self.method, f"{self.method} {match[0]}")
        if match := _LOCK_ROUTE.fullmatch(self.path):
            return _LOCK_OPERATIONS.get(self.method, f"{self.method} {match[0]}")
        if (self.method, self.path) == ("PATCH", "/lock-leases"):
            return "renew_many"
        if self.method == "GET" and urlsplit(self.path).path == _STREAM_ROUTE:
            return "waits"
        return f"{self.method} {self.path}"

    def seen(self) -> dict[str, Any]:
        """For matching.  `token` in the canonical form; `headers` as they came, names lowered.

        `leases` of a renew_many by key, `keys` and `prefixes` of a stream in their order: which
        one comes first is the SDK's affair.
        """
        seen: dict[str, Any] = {
            "path": self.path,
            "request_id": self.header("X-Volcano-Request-Id"),
            "token": _canonical(self.header("X-Volcano-Lock-Token")),
            "headers": {name.lower(): value for name, value in self.headers},
            "body": self.json,
        }
        route = _LEASE_ROUTE.fullmatch(self.path) or _LOCK_ROUTE.fullmatch(self.path)
        if route is not None:
            seen["key"] = unquote_to_bytes(route[1]).decode("utf-8", "replace")
        if isinstance(self.json, dict) and "ttl_seconds" in self.json:
            seen["ttl"] = self.json["ttl_seconds"]
        if self.operation() == "renew_many" and not _flaw_of_many(self.json):
            leases = [
                {
                    "key": each["key"],
                    "token": _canonical(each["token"]),
                    "ttl": each["ttl_seconds"],
                }
                for each in self.json["leases"]
            ]
            seen["leases"] = sorted(leases, key=lambda lease: str(lease["key"]))
        if self.operation() == "waits":
            seen["keys"] = sorted(value for name, value in self._query() if name == "key")
            seen["prefixes"] = sorted(value for name, value in self._query() if name == "prefix")
            seen["last_event_id"] = self.header("Last-Event-ID")
        return {name: value for name, value in seen.items() if value is not None}

    def _query(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.path).query, keep_blank_values=True)

    def __str__(self) -> str:
        body = self.body.decode("utf-8", "replace")
        return (
            f"{self.method} {self.path} token={self.header('X-Volcano-Lock-Token')}"
            f" request_id={self.header('X-Volcano-Request-Id')}{self._resumes()} {body}".rstrip()
        )

    def _resumes(self) -> str:
        last = self.header("Last-Event-ID")
        return "" if last is None else f" last_event_id={last}"

    def flaw(self, credential: str | None) -> str | None:
        """What no SDK may send, whatever the script asks for."""
        operation = self.operation()
        token, request_id = self.header("X-Volcano-Lock-Token"), self.header("X-Volcano-Request-Id")
        if request_id is None or _canonical(request_id) is None:
            return "X-Volcano-Request-Id is not a UUID"
        if self.header("Authorization") != (credential and f"Bearer {credential}"):
            return "Authorization is not this client's service key"
        if operation in ("acquire", "renew", "release"):
            if _canonical(token) is None:
                return "X-Volcano-Lock-Token is not a UUID of the form 8-4-4-4-12"
        elif token is not None:
            return f"{operation} carries a lock token"
        if operation == "waits" and (flaw := _flaw_of_filters(self._query())):
            return flaw
        return self._flaw_of_body(operation)

    def _flaw_of_body(self, operation: str) -> str | None:
        if operation not in ("acquire", "renew", "renew_many"):
            empty = self.body in (b"", b"{}", b"null")
            return None if empty else f"{operation} carries a body"
        if "application/json" not in (self.header("Content-Type") or ""):
            return "Content-Type is not application/json"
        if operation == "renew_many":
            return _flaw_of_many(self.json)
        if not isinstance(self.json, dict) or list(self.json) != ["ttl_seconds"]:
            return 'the body is not {"ttl_seconds": n}'
        return None

    # ------------------------------------------------------------ the playing thread's side

    def answer(self, answer: Answer, patience: float) -> None:
        """Hand an answer over; returns when it was written, or the SDK had gone away."""
        self._answer = answer
        self._decide(patience)

    def open(self, answer: Answer, relay: "Relay", patience: float) -> None:
        """Hand an event stream over; returns when its head was written."""
        self._answer, self._relay = answer, relay
        self._decide(patience)

    def open_at_once(self, answer: Answer, relay: "Relay") -> None:
        self._answer, self._relay = answer, relay
        self._verdict.set()

    def lose(self, patience: float) -> None:
        """Reset the connection without a word."""
        self._decide(patience)

    def decide_at_once(self, answer: Answer | None) -> None:
        """As `answer` or `lose`, from the handler's own thread."""
        self._answer = answer
        self._verdict.set()

    def hang(self) -> None:
        """Never answered; the connection stays open until the SDK closes it."""
        self.hung = True

    def _decide(self, patience: float) -> None:
        self._verdict.set()
        self._carried_out.wait(patience)

    def is_open(self) -> bool:
        """The SDK still waits on it."""
        return not self._carried_out.is_set() and is_connected(self.connection)

    # ------------------------------------------------------------ the handler thread's side

    def response(self) -> Response:
        self._verdict.wait()
        if self._answer is None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.connection.shutdown(socket.SHUT_RDWR)
            self._carried_out.set()
            return Response(b"")
        answer = self._answer
        pieces = self._relayed(self._relay) if self._relay else self._written(answer.body)
        response = Response(pieces, answer.status)
        response.headers.clear()
        for name, value in answer.headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                response.headers.add(name, value)
        if answer.status != 204 and self._relay is None:
            response.headers["Content-Length"] = str(len(answer.body))
        response.call_on_close(self._carried_out.set)
        return response

    def _written(self, body: bytes) -> Iterator[bytes]:
        yield body
        self._carried_out.set()

    def _relayed(self, relay: "Relay") -> Iterator[bytes]:
        try:
            yield b""  # the head
            relay.begin()
            self._carried_out.set()
            relay.wait_for_its_end()
        finally:
            relay.close()

    def let_go(self) -> None:
        """The scenario is over: end the handler thread."""
        self._verdict.set()


def _flaw_of_filters(query: list[tuple[str, str]]) -> str | None:
    if others := {name for name, _ in query} - {"key", "prefix"}:
        return f"its query has {', '.join(sorted(others))}"
    if not 1 <= len(query) <= 64:
        return f"it has {len(query)} filters: 1 to 64 are allowed"
    if len(set(query)) != len(query):
        return "a filter comes twice"
    return None


def _flaw_of_many(body: Any) -> str | None:
    leases = body.get("leases") if isinstance(body, dict) and len(body) == 1 else None
    if not isinstance(leases, list) or not 2 <= len(leases) <= 500:
        return "the body is not 2 to 500 leases: one that is due alone is renewed singly"
    for lease in leases:
        if not isinstance(lease, dict) or sorted(lease) != ["key", "token", "ttl_seconds"]:
            return "a lease has other members than key, token and ttl_seconds"
        if not isinstance(lease["token"], str) or _canonical(lease["token"]) is None:
            return "a lease's token is not a UUID of the form 8-4-4-4-12"
    return None


def _canonical(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        parsed = str(uuid.UUID(text))
    except ValueError:
        return None
    return parsed if text.lower() == parsed else None


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.0"  # a stream is written as it is, not in chunks
    server: "_Server"

    def handle(self) -> None:
        with suppress(OSError):
            self.connection.recv(1, socket.MSG_PEEK)
        self.server.begun(self.connection)
        super().handle()


class _Server(ThreadedWSGIServer):
    """Knows which connections were accepted and have not brought a request yet."""

    def __init__(self, app: Any) -> None:
        super().__init__("127.0.0.1", 0, app, handler=_Handler)
        self.changed = threading.Condition()
        self.arriving: dict[socket.socket, bool] = {}  # and whether its first byte was read

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del client_address
        with self.changed:
            self.arriving[request] = False
        return True

    def begun(self, request: Any) -> None:
        with self.changed:
            self.arriving[request] = True

    def is_quiet(self) -> bool:
        """Whoever sent something has arrived.  A connection may also be kept for later."""
        return not any(begun or peek(each) is not None for each, begun in self.arriving.items())

    def arrived(self, request: Any) -> None:
        with self.changed:
            self.arriving.pop(request, None)
            self.changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        self.arrived(request)
        if request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(RESET)) == RESET:
            self.close_request(request)  # without the farewell that a shutdown is
        else:
            super().shutdown_request(request)


class Gate(HTTPServerBase):
    def __init__(self) -> None:
        super().__init__("127.0.0.1", 0, threaded=True)
        # werkzeug prints a line per request unless it is told not to
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._changed = threading.Condition()
        self._waiting: list[Parked] = []  # came and not yet named by the script
        self._open: list[Parked] = []  # of those and the named ones: what the SDK may wait on
        self._relays: list[Relay] = []  # in the order in which they were opened
        self.outage: Callable[[Parked], None] | None = None
        """While set: decides every request as it comes, and none is parked."""
        self.outage_answers = False
        """It does more than let them hang."""
        self.server: _Server
        self.start()

    def start(self) -> None:
        self.server = _Server(Request.application(self.application))
        self.port = self.server.port
        self.server_thread = threading.Thread(target=self.thread_target, daemon=True)
        self.server_thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def dispatch(self, request: Request) -> Response:
        parked = Parked(request)
        with self._changed:
            self._open.append(parked)
            outage = self.outage
            if outage is None:
                self._waiting.append(parked)
            else:
                parked.is_answered_by_itself = self.outage_answers
            self._changed.notify_all()
        if outage is not None:
            outage(parked)
        self.server.arrived(request.environ["werkzeug.socket"])
        return parked.response()

    def flush(self, seconds: float) -> None:
        """Until every request that was sent before now has come, also one already given up.

        Connections are accepted in their order, so ours comes last.
        """
        with socket.create_connection((self.host, self.port), seconds) as last:
            last.sendall(b"HEAD /flush HTTP/1.0\r\n\r\n")
            last.recv(1)
        with self.server.changed:
            self.server.changed.wait_for(self.server.is_quiet, seconds)

    def application(self, request: Request) -> Response:
        if request.method == "HEAD" and request.path == "/flush":
            return Response()
        request.get_data()
        return self.dispatch(request)  # the base keeps every exchange for ever in its log

    def waiting(self) -> list[Parked]:
        with self._changed:
            return list(self._waiting)

    def wait(self, seconds: float) -> None:
        """Until a request comes, at most so long."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(seconds)

    def wait_for_change(self, seconds: float) -> None:
        """Until something comes, from the SDK or on a stream, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def take(self, parked: Parked) -> None:
        """The script names it."""
        with self._changed:
            self._waiting.remove(parked)

    def open_count(self) -> int:
        """The exchanges on which the SDK still waits, and will until the script goes on."""
        with self._changed:
            self._open = [parked for parked in self._open if parked.is_open()]
            return sum(not parked.is_answered_by_itself for parked in self._open)

    def open(self, parked: Parked, answer: Answer, stream: EventStream, patience: float) -> None:
        """The server's event stream is the answer to it."""
        relay = self._relay(parked, stream)
        stream.start(patience)
        parked.open(answer, relay, patience)

    def open_at_once(
        self, parked: Parked, answer: Answer, stream: EventStream, patience: float
    ) -> None:
        """The same from the handler's own thread; what comes passes on by itself."""
        relay = self._relay(parked, stream)
        relay.parks = False
        stream.start(patience)
        parked.open_at_once(answer, relay)

    def _relay(self, parked: Parked, stream: EventStream) -> Relay:
        relay = Relay(parked.connection, stream)
        relay.on_change = self._notify
        with self._changed:
            self._relays.append(relay)
        return relay

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def streams(self) -> list[Relay]:
        """Those that are open, in the order in which they were opened."""
        with self._changed:
            self._relays = [relay for relay in self._relays if relay.is_open()]
            return list(self._relays)

    def opening(self) -> list[Parked]:
        """Those that were asked for, and have not been answered or given up."""
        with self._changed:
            return [each for each in self._open if each.operation() == "waits" and each.is_open()]

    def written(self) -> list[int]:
        """How many bytes the SDK was sent on each open stream, in no order."""
        return sorted(relay.written for relay in self.streams())

    def parked_event(self) -> tuple[Relay, Event] | None:
        """The first one of the stream that was opened first."""
        for relay in self.streams():
            if event := relay.first():
                return relay, event
        return None

    def clear(self) -> None:
        """Forget a scenario."""
        for relay in self.streams():
            relay.end()
        with self._changed:
            for parked in self._open + self._waiting:
                parked.let_go()
            self._open, self._waiting, self._relays, self.outage = [], [], [], None
            self.outage_answers = False
        super().clear()

    def thread_target(self) -> None:
        self.server.serve_forever(poll_interval=0.1)
