import httpx
import pytest

import volcano_sdk
from volcano_sdk import LockLostError, ServerError, VolcanoClient
from volcano_sdk.errors import chain

URL = "http://volcano.test"
GRANT = {"expires_at": "2026-11-29T12:00:00Z", "fencing_token": 7}


def client(**answers: int) -> VolcanoClient:
    """Over an injected client whose answers have these statuses, by method."""

    def handle(request: httpx.Request) -> httpx.Response:
        status = answers.get(request.method, {"POST": 201, "DELETE": 204}.get(request.method, 200))
        return httpx.Response(status, json=GRANT)

    http_client = httpx.Client(transport=httpx.MockTransport(handle))
    return VolcanoClient(api_url=URL, service_key="sk-1", http_client=http_client)


def test_what_is_exported_is_sorted_and_there() -> None:
    assert volcano_sdk.__all__ == sorted(volcano_sdk.__all__)
    assert all(hasattr(volcano_sdk, name) for name in volcano_sdk.__all__)


def test_a_client_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOLCANO_API_URL", raising=False)
    with pytest.raises(ValueError, match="VOLCANO_API_URL"):
        VolcanoClient(service_key="sk-1")


def test_a_clients_repr_shows_no_key() -> None:
    with VolcanoClient(api_url=URL, service_key="sk-1", anon_key="ak-1") as made:
        assert repr(made) == f"<VolcanoClient {URL}>"


def test_an_injected_client_carries_everything_and_stays_open() -> None:
    made = client()
    with made, made.locks.with_lock("a", ttl=30) as guard:
        assert guard.lease.fencing_token == 7

    made = client()
    http_client = made._runtime.transport._client  # type: ignore[attr-defined]
    made.close()
    assert not http_client.is_closed


def test_leaving_the_clients_block_reports_a_release_that_failed() -> None:
    made = client(DELETE=500)
    with pytest.raises(ServerError), made:
        lock = made.locks.with_lock("a", ttl=30)
        guard = lock.__enter__()
    assert guard.lost

    with pytest.raises(LockLostError):
        lock.__exit__(None, None, None)


def test_leaving_the_clients_block_never_masks_its_error() -> None:
    made = client(DELETE=500)
    with pytest.raises(KeyError) as caught, made:
        _ = made.locks.with_lock("a", ttl=30).__enter__()
        guard = made.locks.with_lock("b", ttl=30).__enter__()
        raise KeyError("the block's")

    assert [type(one) for one in chain(caught.value)] == [KeyError, ServerError]
    assert guard.lost
