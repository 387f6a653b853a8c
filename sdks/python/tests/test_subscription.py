import pytest

from volcano_sdk.errors import (
    AuthenticationError,
    NotFoundError,
    RateLimitedError,
    ServerError,
    TransportError,
    VolcanoError,
)
from volcano_sdk.events import Filters, LockEvent
from volcano_sdk.operations import Answer, Failure, Request
from volcano_sdk.subscription import Subscription, is_passing, pause, refusal


def half(subscription: Subscription) -> float:
    """The pause after it has ended once more, without jitter."""
    return subscription.ended(None, lambda: 0.0)


def request_of(subscription: Subscription) -> Request:
    return subscription.attempt(timeout=5.0, request_id="r", service_key="sk-1").request


def subscribed() -> Subscription:
    return Subscription(Filters(("a:b", "c"), ("d",)))


def test_it_asks_for_its_filters() -> None:
    attempt = subscribed().attempt(timeout=5.0, request_id="r", service_key="sk-1")

    assert attempt.timeout == 5.0
    assert attempt.request.method == "GET"
    assert attempt.request.path == "/lock-events?key=a%3Ab&key=c&prefix=d"
    assert attempt.request.headers["Accept"] == "text/event-stream"
    assert attempt.request.headers["Authorization"] == "Bearer sk-1"
    assert attempt.request.headers["X-Volcano-Request-Id"] == "r"
    assert "Last-Event-ID" not in attempt.request.headers
    assert attempt.request.body == b""


def test_it_goes_on_behind_the_last_event() -> None:
    subscription = subscribed()
    assert subscription.opened() == []
    assert subscription.received(b"id: 5d-42\nevent: reset\ndata: {}\n\nid: 5d-43\n") == [
        LockEvent("reset")
    ]
    half(subscription)

    assert request_of(subscription).headers["Last-Event-ID"] == "5d-42"
    assert subscription.opened() == []
    assert request_of(subscription).headers["Last-Event-ID"] == "5d-42"


@pytest.mark.parametrize("sent", ["ä", "\x01", " a", "a\x7f"])
def test_an_id_that_fits_into_no_header_is_not_sent(sent: str) -> None:
    subscription = subscribed()
    subscription.opened()
    subscription.received(f"id: {sent}\ndata: x\n\n".encode())

    assert "Last-Event-ID" not in request_of(subscription).headers


def test_a_gap_before_the_first_id_is_told() -> None:
    """Nothing can say what was missed: read again."""
    subscription = subscribed()
    subscription.opened()
    half(subscription)

    assert subscription.opened() == [LockEvent("reset")]


def test_events_that_nobody_knows_are_passed_over() -> None:
    subscription = subscribed()
    subscription.opened()

    assert subscription.received(b"event: new\ndata: x\n\n") == []


def test_what_was_not_whole_is_forgotten_with_its_stream() -> None:
    subscription = subscribed()
    subscription.opened()
    subscription.received(b"id: 1\ndata: x\n\nevent: reset\n")
    half(subscription)
    subscription.opened()

    assert subscription.received(b"data: x\n\n") == []


def test_pauses_grow_until_something_is_heard() -> None:
    subscription = subscribed()
    pauses = [half(subscription) for _ in range(2)]
    subscription.opened()
    pauses.append(half(subscription))
    subscription.opened()
    subscription.received(b": h")
    pauses.append(half(subscription))
    subscription.opened()
    subscription.received(b": hello\n")
    pauses.append(half(subscription))

    assert pauses == [0.1, 0.2, 0.4, 0.8, 0.1]


def test_a_pause_has_bounds_and_jitter_and_heeds_the_server() -> None:
    assert [pause(failures, 0.0) for failures in (1, 2, 6, 7, 1000)] == [0.1, 0.2, 3.2, 5.0, 5.0]
    assert pause(1, -1.0) == 0.05
    assert pause(1, 1.0) == pytest.approx(0.15)
    assert pause(1, 0.0, 30.0) == 30.0
    assert pause(9, 0.0, 1.0) == 5.0
    limited = RateLimitedError("", retry_after=9.0)
    assert subscribed().ended(limited, lambda: 0.0) == 9.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, ServerError),
        (401, AuthenticationError),
        (404, NotFoundError),
        (405, NotFoundError),
        (429, RateLimitedError),
        (503, ServerError),
    ],
)
def test_an_answer_that_is_no_stream_is_an_error(status: int, kind: type[VolcanoError]) -> None:
    request = request_of(subscribed())
    answer = Answer(0.0, status, {}, b'{"error":"A sentence.","code":"x"}')

    error = refusal(request, answer)

    assert type(error) is kind
    assert error.request_id == "r"
    assert error.status == status
    assert error.code == (None if status == 200 else "x")


def test_no_answer_is_an_error_of_the_network() -> None:
    lost = TransportError("lost")

    assert refusal(request_of(subscribed()), Failure(0.0, lost, reached=True)) is lost


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TransportError(""), True),
        (ServerError("", status=500), True),
        (RateLimitedError(""), True),
        (NotFoundError(""), False),
        (AuthenticationError(""), False),
        (VolcanoError("", status=307), False),
    ],
)
def test_which_errors_pass(error: VolcanoError, passes: bool) -> None:
    assert is_passing(error) is passes
