"""HTTP in, HTTP out.

    POST PATCH DELETE   /locks/{key}/lease      acquire, renew, release
    GET DELETE          /locks/{key}            read, force release
    PATCH               /lock-leases            renew many
    GET                 /lock-events            events, a stream that stays open
    GET                 /healthz /readyz /metrics /openapi.json
    GET POST            /_test/clock            development servers only
    POST                /_test/reset

The lock routes are matched on the raw path, so that `%2F` inside a key is a wrong key and never
another route, and answered without Request and Response objects: they are the hot path.
"""

import asyncio
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import accumulate
from time import perf_counter
from types import coroutine
from typing import Any

import prometheus_client
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from volcano_server import event_response, wire
from volcano_server.lease import Answer, Free, Granted, Held, Released
from volcano_server.logs import Log
from volcano_server.problems import (
    INTERNAL_ERROR,
    NOT_FOUND,
    Problem,
    invalid_request,
    method_not_allowed,
)
from volcano_server.quota import Spent
from volcano_server.service import (
    STORE_UNAVAILABLE,
    BodyTooLargeError,
    BodyTooSlowError,
    ClientGoneError,
    LockRequest,
    LockService,
    Operation,
    Outcome,
)
from volcano_server.subscription import Subscription

_DRAINED = 256 * 1024
"""Bytes of a too large body that are read and dropped, so that its sender hears the 413."""

_CLOSE = (b"connection", b"close")
_HEADERS = (b"authorization", b"x-volcano-lock-token", b"x-volcano-request-id")

_LEASE_METHODS = {
    "POST": Operation.ACQUIRE,
    "PATCH": Operation.RENEW,
    "DELETE": Operation.RELEASE,
}
_KEY_METHODS = {"GET": Operation.READ, "DELETE": Operation.FORCE_RELEASE}
_MANY_METHODS = {"PATCH": Operation.RENEW_MANY}
_EVENTS_METHODS = {"GET": Operation.EVENTS}
_OTHER_PATHS = {b"/lock-leases": _MANY_METHODS, b"/lock-events": _EVENTS_METHODS}

_Target = tuple[bytes, Mapping[str, Operation]]
"""The raw path segment of a key, or else the query, and the operations there by method."""

# Of the characters that a percent-encoded key may have.  A wrong key may have others.
_WHOLE = re.compile(rb"/locks/([\w.~:%-]+)(/lease)?")
_WholeTarget = tuple[bytes, bytes, Operation]
"""The path, the key in it, and the operation."""


class LockRoutes:
    """All lock operations.  `find` a target first; then `answer`."""

    def __init__(self, service: LockService, metrics: "Metrics", log: Log) -> None:
        self._service = service
        self._metrics = metrics
        self._log = log

    def find(self, scope: Scope) -> "_Target | None":
        """What a request is aimed at, if at a lock."""
        if scope["type"] != "http":
            return None
        path = _raw_path(scope)
        if not path.startswith(b"/locks/"):
            methods = _OTHER_PATHS.get(path)
            return None if methods is None else (scope["query_string"], methods)
        rest = whole = path[7:]
        if scope["query_string"]:
            # These routes take no query: a ? is one that somebody forgot to encode, and makes the
            # key a wrong one instead of a shorter one.
            whole = b"%b?%b" % (rest, scope["query_string"])
        if whole.endswith(b"/lease"):
            return whole[:-6], _LEASE_METHODS
        if rest.endswith(b"/lease"):
            return whole, _LEASE_METHODS
        if b"/" in rest:
            return None
        return whole, _KEY_METHODS

    def find_whole(self, method: bytes, url: bytes) -> "_WholeTarget | None":
        """The same by method and request target, for the plainest requests of the hot path."""
        found = _WHOLE.fullmatch(url)
        if found is None:
            return None
        key_segment, lease = found.groups()
        operation = (_LEASE_METHODS if lease else _KEY_METHODS).get(method.decode())
        return None if operation is None else (url, key_segment, operation)

    def answer_whole(
        self,
        target: "_WholeTarget",
        headers: Mapping[bytes, bytes],
        body: bytes,
        tell: Callable[[wire.Reply], None],
    ) -> None:
        """What `answer` does, for a request that is here in full; its headers came once each."""
        started = perf_counter()
        path, key_segment, operation = target
        request = LockRequest(
            operation,
            path,
            key_segment,
            headers.get(b"authorization"),
            headers.get(b"x-volcano-lock-token"),
            headers.get(b"x-volcano-request-id"),
            None,
        )

        def tell_reply(outcome: Outcome) -> None:
            try:
                reply = self._reply(request, outcome, started)
            except Exception as fault:  # noqa: BLE001 - others wait behind this one for theirs
                reply = self._reply(request, Outcome(INTERNAL_ERROR, fault=fault), started)
            tell(reply)

        self._service.answer_whole(request, body, tell_reply)

    async def answer(self, target: "_Target", scope: Scope, receive: Receive, send: Send) -> None:
        key_segment, methods = target
        operation = methods.get(scope["method"])
        if operation is None:
            allowed = ", ".join(methods)
            reply = wire.problem_reply(method_not_allowed(scope["method"], allowed))
            reply[1].append((b"allow", allowed.encode()))
            _add_request_id(reply, _request_id(scope))
            await _send(send, reply)
            return
        started = perf_counter()
        headers = dict(scope["headers"])
        body = _Body(
            headers,
            receive,
            self._service.settings.body_patience,
            wire.MANY_BODY_LIMIT if operation is Operation.RENEW_MANY else wire.BODY_LIMIT,
        )
        request = LockRequest(
            operation,
            _raw_path(scope),
            key_segment,
            headers.get(b"authorization"),
            headers.get(b"x-volcano-lock-token"),
            headers.get(b"x-volcano-request-id"),
            None if len(headers) == len(scope["headers"]) else _repeated(scope),
        )
        if operation is Operation.EVENTS:
            request.last_event_id = headers.get(b"last-event-id", b"").decode("latin-1") or None
        try:
            outcome = await self._service.answer(request, body.read)
        except ClientGoneError:
            return
        if isinstance(outcome.answer, Subscription):
            await self._stream(outcome.answer, request, outcome, started, (scope, receive, send))
            return
        reply = self._reply(request, outcome, started)
        if body.unread:
            reply[1].append(_CLOSE)
        await _send(send, reply)

    def _reply(self, request: LockRequest, outcome: Outcome, started: float) -> wire.Reply:
        """The whole answer; it is counted and logged."""
        assert not isinstance(outcome.answer, Subscription)
        reply = wire.reply(outcome.answer, created=request.operation is Operation.ACQUIRE)
        if outcome.spent is not None:
            reply[1].extend(_quota_headers(outcome.spent))
        self._observe(request, outcome, reply[0], perf_counter() - started)
        _add_request_id(reply, request.request_id)
        return reply

    async def _stream(
        self,
        subscription: Subscription,
        request: LockRequest,
        outcome: Outcome,
        started: float,
        asgi: tuple[Scope, Receive, Send],
    ) -> None:
        self._observe(request, outcome, 200, perf_counter() - started)
        headers = [] if outcome.spent is None else _quota_headers(outcome.spent)
        headers.append((b"x-volcano-request-id", request.request_id or b""))
        try:
            await event_response.stream(subscription, headers, *asgi)
        finally:
            self._service.close_stream(subscription)
            if self._service.settings.log_requests:
                self._log.request(
                    failed=False,
                    request_id=_shown_request_id(request),
                    operation=request.operation.value,
                    project=subscription.project,
                    outcome=subscription.ending,
                    events=subscription.told,
                    duration_ms=round((perf_counter() - started) * 1000, 3),
                )

    def _observe(self, request: LockRequest, outcome: Outcome, status: int, seconds: float) -> None:
        if outcome.fault is not None:  # the client gets JSON, the operator the traceback
            path = _printable_segment(request.path)
            self._log.trouble("internal_error", path=path, exc_info=outcome.fault)
        answer = outcome.answer
        name = _outcome_name(answer)
        self._metrics.count(request.operation, name, seconds)
        leases = None
        if isinstance(answer, wire.Together):
            leases = Counter(map(_outcome_name, answer.answers))
            self._metrics.count_leases(leases)
        if status >= 500 or self._service.settings.log_requests:
            self._log.request(
                failed=status >= 500,
                request_id=_shown_request_id(request),
                operation=request.operation.value,
                project=outcome.caller.project if outcome.caller else None,
                **_aim(request),
                outcome=name,
                status=status,
                duration_ms=round(seconds * 1000, 3),
                **({"leases": dict(leases)} if leases else {}),
                **({"reason": outcome.reason} if outcome.reason else {}),
            )


def _aim(request: LockRequest) -> Mapping[str, str | None]:
    """What it was about, for the log: nothing else of a query, as somebody may put a key there."""
    segment = request.key_segment
    if request.operation is Operation.EVENTS:
        filters = (each for each in segment.split(b"&") if each.startswith((b"key=", b"prefix=")))
        return {"filters": _printable_segment(b"&".join(filters))}
    if request.operation is Operation.RENEW_MANY:
        return {"key": None}
    return {"key": _printable_segment(segment.partition(b"?")[0]) or None}


_OUTCOMES: Mapping[type, str] = {
    Granted: "granted",
    Released: "released",
    Held: "held",
    Free: "free",
    wire.Together: "answered",
    Subscription: "opened",
}


def _outcome_name(answer: Answer | wire.Together | Subscription) -> str:
    return answer.code if isinstance(answer, Problem) else _OUTCOMES[type(answer)]


def _quota_headers(spent: Spent) -> wire.RawHeaders:
    return [
        (b"x-ratelimit-limit", b"%d" % spent.limit),
        (b"x-ratelimit-remaining", b"%d" % spent.remaining),
        (b"x-ratelimit-reset", b"%d" % spent.reset_at),
    ]


def _repeated(scope: Scope) -> str | None:
    """The name of a header of ours that came more than once."""
    seen = Counter(name for name, _ in scope["headers"])
    return next((name.decode() for name in _HEADERS if seen[name] > 1), None)


class _Body:
    """A request's body, read when it is wanted.  `unread`: the sender is still at it."""

    __slots__ = ("_headers", "_limit", "_patience", "_receive", "unread")

    def __init__(
        self, headers: Mapping[bytes, bytes], receive: Receive, patience: float, limit: int
    ) -> None:
        self._headers = headers
        self._receive = receive
        self._patience = patience
        self._limit = limit
        self.unread = False

    async def read(self) -> bytes:
        """At most `limit` bytes.  Raises BodyTooLargeError, BodyTooSlowError."""
        if not self._headers.get(b"content-length", b"").strip(b"0") and (
            b"transfer-encoding" not in self._headers
        ):
            return b""
        self.unread = True
        reading = self._read()
        try:
            waits_for = reading.send(None)
        except StopIteration as done:
            # A body mostly comes in one packet with its head: no timer, which costs 4 µs.
            return bytes(done.value)
        try:
            async with asyncio.timeout(self._patience):
                return await _go_on(reading, waits_for)
        except TimeoutError:
            raise BodyTooSlowError from None

    async def _read(self) -> bytes:
        body, size = b"", 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size <= self._limit:
                body += chunk
            if not message.get("more_body", False):
                self.unread = False
                break
            if size > _DRAINED:
                break
        if size > self._limit:
            raise BodyTooLargeError(self._limit)
        return body


@coroutine
def _go_on(begun: Coroutine[Any, None, bytes], waits_for: Any) -> Generator[Any, None, bytes]:
    """Await a coroutine that waits already."""
    try:
        yield waits_for
    except BaseException:
        begun.close()
        raise
    return (yield from begun.__await__())


def _add_request_id(reply: wire.Reply, request_id: bytes | None) -> None:
    if request_id is not None and wire.is_request_id(request_id):
        reply[1].append((b"x-volcano-request-id", request_id))


async def _send(send: Send, reply: wire.Reply) -> None:
    status, headers, body = reply
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ---------------------------------------------------------------- what every other error looks like


def problem_response(problem: Problem, request: Request, **headers: str) -> Response:
    status, raw_headers, body = wire.problem_reply(problem)
    response = Response(body, status_code=status)
    response.raw_headers = list(raw_headers)
    for name, value in headers.items():
        response.headers[name] = value
    request_id = _request_id(request.scope)
    if request_id is not None and wire.is_request_id(request_id):
        response.headers[wire.REQUEST_ID_HEADER] = request_id.decode("ascii")
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What Starlette refuses: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return problem_response(method_not_allowed(request.method, allowed), request, Allow=allowed)
    if error.status_code == 404:
        return problem_response(NOT_FOUND, request)
    return problem_response(invalid_request(error.detail), request)


def _raw_path(scope: Scope) -> bytes:
    raw: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if raw is None else raw


def _request_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-volcano-request-id":
            return bytes(value)
    return None


def _shown_request_id(request: LockRequest) -> str | None:
    value = request.request_id
    return value.decode("ascii") if value is not None and wire.is_request_id(value) else None


def _printable_segment(segment: bytes) -> str:
    return segment[:160].decode("ascii", "backslashreplace")


# ---------------------------------------------------------------- for operators


_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics(Collector):
    """Counts of lock requests, in a registry of their own, served at /metrics.

    Plain numbers that only the event loop touches, turned into metrics when somebody asks: the
    library's own counter and histogram take a lock each, 4 µs a request.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # By operation and outcome: {(ACQUIRE, "granted"): 17}
        self._answered: dict[tuple[Operation, str], int] = {}
        # By the first bucket that holds them, the slower rest last: {ACQUIRE: [12, 4, 1, 0, ...]}
        self._buckets = {each: [0] * (len(_BUCKETS) + 1) for each in Operation}
        self._seconds = dict.fromkeys(Operation, 0.0)
        self._leases: Counter[str] = Counter()  # {"granted": 800, "lock_ownership_lost": 1}

    def count(self, operation: Operation, outcome: str, seconds: float) -> None:
        answered = self._answered
        answered[operation, outcome] = answered.get((operation, outcome), 0) + 1
        self._buckets[operation][bisect_left(_BUCKETS, seconds)] += 1
        self._seconds[operation] += seconds

    def count_leases(self, by_outcome: Counter[str]) -> None:
        self._leases.update(by_outcome)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "volcano_lock_requests", "Lock requests answered", labels=("operation", "outcome")
        )
        for (operation, outcome), number in self._answered.items():
            requests.add_metric((operation.value, outcome), number)
        yield requests
        leases = CounterMetricFamily(
            "volcano_lock_renew_many_leases",
            "Leases in requests to renew many, by what became of each",
            labels=("outcome",),
        )
        for outcome, number in self._leases.items():
            leases.add_metric((outcome,), number)
        yield leases
        seconds = HistogramMetricFamily(
            "volcano_lock_request_seconds",
            "Time from a lock request's head to its answer",
            labels=("operation",),
        )
        bounds = [*map(str, _BUCKETS), "+Inf"]
        for operation, found in self._buckets.items():
            buckets = list(zip(bounds, accumulate(found), strict=True))
            seconds.add_metric((operation.value,), buckets, self._seconds[operation])
        yield seconds


@cache
def openapi_json() -> bytes:
    """The description in openapi.yaml, as JSON."""
    text = (resources.files("volcano_server") / "openapi.yaml").read_text()
    return json.dumps(yaml.safe_load(text)).encode()


def operator_routes(service: LockService, metrics: Metrics, log: Log) -> list[BaseRoute]:
    async def healthz(_: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(request: Request) -> Response:
        reason = await service.store_trouble()
        if reason is None:
            return _json({"status": "ready"})
        log.trouble("not_ready", reason=reason)
        return problem_response(STORE_UNAVAILABLE, request)

    async def show_metrics(_: Request) -> Response:
        return Response(
            prometheus_client.generate_latest(metrics.registry),
            media_type=prometheus_client.CONTENT_TYPE_LATEST,
        )

    async def openapi(_: Request) -> Response:
        return Response(openapi_json(), media_type="application/json")

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", show_metrics),
        Route("/openapi.json", openapi),
    ]


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value), status_code=status, media_type="application/json")


# ---------------------------------------------------------------- for tests


class _Advance(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    advance_seconds: float = Field(ge=0, le=366 * 86_400, allow_inf_nan=False)


def test_routes(service: LockService) -> list[BaseRoute]:
    """`/_test`: with a service key, because any web page can reach a loopback port."""

    def clock_now() -> Response:
        return _json({"now": wire.timestamp(service.wall())})

    async def clock(request: Request) -> Response:
        refused = _refused(service, request)
        if refused is not None:
            return problem_response(refused, request)
        if request.method == "GET":
            return clock_now()
        try:
            wanted = _Advance.model_validate_json(await request.body())
        except ValidationError:
            sentence = 'body: send {"advance_seconds": x}, x being a number from 0 to 31622400.'
            return problem_response(invalid_request(sentence), request)
        await service.advance_clock(wanted.advance_seconds)
        return clock_now()

    async def reset(request: Request) -> Response:
        refused = _refused(service, request)
        if refused is not None:
            return problem_response(refused, request)
        await service.reset()
        return Response(status_code=204)

    return [
        Route("/_test/clock", clock, methods=["GET", "POST"]),
        Route("/_test/reset", reset, methods=["POST"]),
    ]


def _refused(service: LockService, request: Request) -> Problem | None:
    authorization = request.headers.get("authorization")
    caller = service.admit(None if authorization is None else authorization.encode("latin-1"))
    return caller if isinstance(caller, Problem) else None
