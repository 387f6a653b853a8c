"""The lock routes over a real port: order of checks, headers, and what becomes of odd requests."""

import json
import re
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from volcano_server.settings import Settings
from volcano_server.testing import ANON_KEY, SERVICE_KEY, VolcanoServer, running_server

REQUEST_ID = "6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1C"
UNKNOWN_KEY = "sk-nobody-knows-this-one"


class Api:
    """A caller with good headers, each of which a test may replace or (None) leave out."""

    def __init__(self, server: VolcanoServer) -> None:
        self.server = server
        self.token = str(uuid.uuid4())
        self._http = httpx.Client(base_url=server.url, trust_env=False)

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {SERVICE_KEY}",
            "X-Volcano-Lock-Token": self.token,
            "X-Volcano-Request-Id": REQUEST_ID,
            **options.pop("headers", {}),
        }
        wanted = {name: value for name, value in headers.items() if value is not None}
        return self._http.request(method, path, headers=wanted, **options)

    def acquire(self, key: str, ttl: Any = 30, **options: Any) -> httpx.Response:
        return self("POST", f"/locks/{key}/lease", json={"ttl_seconds": ttl}, **options)

    def renew(self, key: str, ttl: Any = 30, **options: Any) -> httpx.Response:
        return self("PATCH", f"/locks/{key}/lease", json={"ttl_seconds": ttl}, **options)

    def release(self, key: str, **options: Any) -> httpx.Response:
        return self("DELETE", f"/locks/{key}/lease", **options)

    def read(self, key: str, **options: Any) -> httpx.Response:
        return self("GET", f"/locks/{key}", **options)

    def force_release(self, key: str, **options: Any) -> httpx.Response:
        return self("DELETE", f"/locks/{key}", **options)

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[VolcanoServer]:
    """One server for all tests that neither move its clock nor count its quota."""
    with running_server(settings=Settings(body_patience=0.3)) as server:
        yield server


@pytest.fixture
def api(shared: VolcanoServer) -> Iterator[Api]:
    api = Api(shared)
    yield api
    api.close()


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4()}"


@pytest.fixture
def counted() -> Iterator[Api]:
    """A caller of a server with a quota of 3 requests a minute, 20 s into a minute."""
    with running_server(quota=3) as server:
        server.clock.advance(20)
        api = Api(server)
        yield api
        api.close()


def is_problem(answer: httpx.Response, status: int, code: str) -> bool:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error", "code"}
    assert body["error"]
    assert (answer.status_code, body["code"]) == (status, code)
    return True


# ---------------------------------------------------------------- the five operations


def test_a_lease_from_its_grant_to_its_release(api: Api, key: str) -> None:
    granted = api.acquire(key, 30)
    renewed = api.renew(key, 60)
    state = api.read(key)
    released = api.release(key)
    afterwards = api.read(key)

    assert granted.status_code == 201
    assert granted.json()["expires_at"] == "2027-01-15T08:00:30.000Z"
    assert granted.headers["x-volcano-expires-in"] == "30.000"
    assert renewed.status_code == 200
    assert renewed.json() == {
        "expires_at": "2027-01-15T08:01:00.000Z",
        "fencing_token": granted.json()["fencing_token"],
    }
    assert renewed.headers["x-volcano-expires-in"] == "60.000"
    assert state.status_code == 200
    assert state.json() == {"held": True, **renewed.json()}
    assert (released.status_code, released.content) == (204, b"")
    assert afterwards.json() == {"held": False}


def test_a_force_release_frees_the_key(api: Api, key: str) -> None:
    api.acquire(key)

    freed = api.force_release(key, headers={"X-Volcano-Lock-Token": None})

    assert (freed.status_code, freed.content) == (204, b"")
    assert api.read(key).json() == {"held": False}


def test_refusals_of_the_lease_rules_are_409(api: Api, key: str) -> None:
    stranger = {"X-Volcano-Lock-Token": str(uuid.uuid4())}
    api.acquire(key)

    assert is_problem(api.acquire(key, headers=stranger), 409, "lock_held")
    assert is_problem(api.renew(key, headers=stranger), 409, "lock_ownership_lost")
    assert is_problem(api.release(key, headers=stranger), 409, "lock_ownership_lost")


def test_a_lock_token_is_compared_as_a_uuid(api: Api, key: str) -> None:
    first = api.acquire(key, headers={"X-Volcano-Lock-Token": api.token.upper()})

    again = api.acquire(key, headers={"X-Volcano-Lock-Token": api.token.lower()})

    assert again.status_code == 201
    assert again.json()["fencing_token"] == first.json()["fencing_token"]


def test_an_encoded_colon_is_the_same_key(api: Api, key: str) -> None:
    granted = api.acquire(f"{key}%3A1")

    assert api.read(f"{key}:1").json()["fencing_token"] == granted.json()["fencing_token"]


def test_a_content_type_on_a_request_without_a_body_is_accepted(api: Api, key: str) -> None:
    headers = {"Content-Type": "application/json"}
    api.acquire(key)

    assert api.read(key, headers=headers).status_code == 200
    assert api.release(key, headers=headers).status_code == 204
    assert api.force_release(key, headers=headers).status_code == 204


def test_a_key_that_looks_like_part_of_the_route_is_a_key(api: Api) -> None:
    assert api.acquire("lease").status_code == 201
    assert api.read("lease").json()["held"] is True
    assert api.force_release("lease").status_code == 204


# ---------------------------------------------------------------- order of checks


def test_an_unknown_route_is_404_before_the_credential(api: Api) -> None:
    for path in ("/", "/lock", "/locks", "/locks/a/b", "/locks/a/leases", "/LOCKS/a", "/healthz/"):
        answer = api("GET", path, headers={"Authorization": None})
        assert is_problem(answer, 404, "not_found"), path


@pytest.mark.parametrize(
    ("path", "allowed", "refused"),
    [
        ("/locks/a/lease", "POST, PATCH, DELETE", ("GET", "HEAD", "OPTIONS", "PUT")),
        ("/locks/a", "GET, DELETE", ("POST", "PATCH", "HEAD", "OPTIONS", "PUT")),
        ("/healthz", "GET, HEAD", ("POST", "DELETE", "OPTIONS")),
        ("/readyz", "GET, HEAD", ("POST",)),
        ("/metrics", "GET, HEAD", ("POST",)),
        ("/openapi.json", "GET, HEAD", ("POST",)),
    ],
)
def test_a_wrong_method_is_405_with_allow(
    api: Api, path: str, allowed: str, refused: tuple[str, ...]
) -> None:
    for method in refused:
        answer = api(method, path, headers={"Authorization": None})
        assert answer.headers["allow"] == allowed
        assert answer.status_code == 405
        if method == "HEAD":
            assert answer.content == b""
        else:
            assert is_problem(answer, 405, "method_not_allowed")
            assert answer.json()["error"].startswith(f"{method} does not work")


def test_the_credential_comes_before_the_request(api: Api) -> None:
    """None of these sees what is wrong with key, token and body."""
    wrong = {"X-Volcano-Lock-Token": "nonsense", "X-Volcano-Request-Id": None}
    for credential, status, code in (
        (None, 401, "authentication_required"),
        ("Basic abc", 401, "authentication_required"),
        (f"Bearer {UNKNOWN_KEY}", 401, "invalid_credentials"),
        (f"Bearer {ANON_KEY}", 403, "permission_denied"),
    ):
        headers = {**wrong, "Authorization": credential}
        for method, path in (("POST", "/locks/-/lease"), ("GET", "/locks/-")):
            assert is_problem(api(method, path, headers=headers, content=b""), status, code)


def test_a_401_names_the_scheme(api: Api, key: str) -> None:
    assert api.read(key, headers={"Authorization": None}).headers["www-authenticate"] == "Bearer"


def test_a_refused_credential_costs_no_quota(counted: Api, key: str) -> None:
    for _ in range(5):
        for credential in (None, f"Bearer {UNKNOWN_KEY}", f"Bearer {ANON_KEY}"):
            answer = counted.read(key, headers={"Authorization": credential})
            assert answer.status_code in (401, 403)
            assert "x-ratelimit-limit" not in answer.headers
        assert counted("PUT", "/locks/a").status_code == 405
        assert counted("GET", "/nothing").status_code == 404

    assert counted.read(key).headers["x-ratelimit-remaining"] == "2"


def test_every_other_request_costs_one(counted: Api, key: str) -> None:
    """A refused request, a refusal of the lease rules and a read alike."""
    answers = [
        counted.acquire(key, 1),
        counted.renew(key),
        counted.read(key),
        counted.read(key),
    ]

    assert [each.status_code for each in answers] == [400, 409, 200, 429]
    assert [each.headers["x-ratelimit-remaining"] for each in answers] == ["2", "1", "0", "0"]
    assert {each.headers["x-ratelimit-limit"] for each in answers} == {"3"}
    assert {each.headers["x-ratelimit-reset"] for each in answers} == {"1800000060"}


def test_the_quota_comes_before_the_request(counted: Api) -> None:
    for _ in range(3):
        counted.read("a")

    too_long = counted("POST", "/locks/-/lease", content=b"x" * 5000)

    assert is_problem(too_long, 429, "lock_rate_limited")
    assert too_long.headers["retry-after"] == "40"


def test_a_new_minute_has_a_new_quota(counted: Api, key: str) -> None:
    for _ in range(4):
        counted.read(key)
    counted.server.clock.advance(39.5)
    still = counted.read(key)
    counted.server.clock.advance(0.5)

    fresh = counted.read(key)

    assert (still.status_code, still.headers["retry-after"]) == (429, "1")
    assert (fresh.status_code, fresh.headers["x-ratelimit-remaining"]) == (200, "2")


def test_without_a_quota_no_answer_speaks_of_one(api: Api, key: str) -> None:
    for answer in (api.acquire(key), api.read(key), api.acquire(key, 1)):
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


# ---------------------------------------------------------------- the request


def test_a_wrong_key_is_refused_before_it_reaches_a_lock(api: Api) -> None:
    for segment in (
        "%2e%2e",
        "a%2Fb",
        "a%252Fb",
        "%00",
        "a%0A",
        "%FF",
        "%C3%A9",
        "a+b",
        "a%20b",
        "%",
        "%zz",
        "a" * 129,
        "",
    ):
        for method, path in (
            ("POST", f"/locks/{segment}/lease"),
            ("DELETE", f"/locks/{segment}"),
        ):
            answer = api(method, path, json={"ttl_seconds": 30})
            assert is_problem(answer, 400, "invalid_request"), (method, path)
            assert answer.json()["error"].startswith("key: got ")


def test_an_encoded_slash_never_makes_another_route(api: Api, key: str) -> None:
    """`/locks/K%2Flease` is the key `K/lease`, which is none: it is not the lease of K."""
    api.acquire(key)

    answer = api.force_release(f"{key}%2Flease")

    assert is_problem(answer, 400, "invalid_request")
    assert api.read(key).json()["held"] is True


def test_a_query_is_refused(api: Api, key: str) -> None:
    """`a?b` with the ? not encoded would name the key `a`."""
    api.acquire(key)

    for method, path in (
        ("POST", f"/locks/{key}?b/lease"),
        ("DELETE", f"/locks/{key}?b/lease"),
        ("DELETE", f"/locks/{key}/lease?b"),
        ("DELETE", f"/locks/{key}?b"),
        ("GET", f"/locks/{key}?b=/c"),
    ):
        assert is_problem(api(method, path), 400, "invalid_request")
    assert api.read(key).json()["held"] is True


@pytest.mark.parametrize("target", [b"/locks/a?", b"/locks/a#", b"/locks/a#b", b"/locks/#"])
def test_what_the_parser_would_drop_from_the_key_is_refused(
    shared: VolcanoServer, target: bytes
) -> None:
    status, _, answer = parts(talk(shared, raw(b"DELETE", target)))

    assert (status, answer["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("value", [None, "", "nonsense", "6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1"])
def test_a_wrong_lock_token_is_refused(api: Api, key: str, value: str | None) -> None:
    headers = {"X-Volcano-Lock-Token": value}
    for call in (api.acquire, api.renew, api.release):
        answer = call(key, headers=headers)
        assert is_problem(answer, 400, "invalid_request")
        assert answer.json()["error"].startswith("X-Volcano-Lock-Token: ")


@pytest.mark.parametrize("value", [None, "", "nonsense", REQUEST_ID + "0"])
def test_a_wrong_request_id_is_refused_and_not_returned(
    api: Api, key: str, value: str | None
) -> None:
    headers = {"X-Volcano-Request-Id": value}
    for call in (api.acquire, api.renew, api.release, api.read, api.force_release):
        answer = call(key, headers=headers)
        assert is_problem(answer, 400, "invalid_request")
        assert answer.json()["error"].startswith("X-Volcano-Request-Id: ")
        assert "x-volcano-request-id" not in answer.headers


def test_the_request_id_comes_back_as_it_was_sent_on_every_answer(api: Api, key: str) -> None:
    answers = [
        api.acquire(key),
        api.renew(key),
        api.read(key),
        api.release(key),
        api.force_release(key),
        api.acquire(key, 1),
        api.acquire("-"),
        api.read(key, headers={"Authorization": None}),
        api("PUT", f"/locks/{key}"),
        api("GET", "/nothing"),
        api("POST", "/healthz"),
    ]

    assert {each.headers.get("x-volcano-request-id") for each in answers} == {REQUEST_ID}


@pytest.mark.parametrize("name", ["Authorization", "X-Volcano-Lock-Token", "X-Volcano-Request-Id"])
def test_a_header_that_comes_twice_is_refused(shared: VolcanoServer, name: str) -> None:
    headers = [
        ("Authorization", f"Bearer {SERVICE_KEY}"),
        ("X-Volcano-Lock-Token", str(uuid.uuid4())),
        ("X-Volcano-Request-Id", REQUEST_ID),
    ]
    twice = [*headers, next(each for each in headers if each[0] == name)]

    answer = httpx.post(
        f"{shared.url}/locks/twice/lease", headers=twice, json={"ttl_seconds": 30}, trust_env=False
    )

    assert is_problem(answer, 400, "invalid_request")
    assert answer.json()["error"].startswith(f"{name.lower()}: the header came twice")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"ttl_seconds":4}',
        b'{"ttl_seconds":30.0}',
        b'{"ttl_seconds":1e400}',
        b'{"a":1}',
        b"\xff",
    ],
)
def test_a_wrong_body_is_refused_and_leaves_the_lease_alone(
    api: Api, key: str, body: bytes
) -> None:
    before = api.acquire(key).json()

    for method in ("POST", "PATCH"):
        answer = api(method, f"/locks/{key}/lease", content=body)
        assert is_problem(answer, 400, "invalid_request")
    assert api.read(key).json() == {"held": True, **before}


def test_secrets_are_in_no_answer(api: Api, key: str) -> None:
    secret = "0b7c1f2e-5a0f-4c55-9d1d-3c1f6f0f2a1"  # a digit short
    answers = [
        api.acquire(key, headers={"X-Volcano-Lock-Token": secret}),
        api.read(key, headers={"Authorization": f"Bearer {UNKNOWN_KEY}"}),
        api.read(key, headers={"Authorization": f"Bearer {ANON_KEY}"}),
        api.acquire(key),
        api.read(key),
    ]

    for answer in answers:
        said = answer.text + repr(answer.headers)
        for hidden in (secret, api.token, UNKNOWN_KEY, SERVICE_KEY, ANON_KEY):
            assert hidden not in said


def test_a_body_of_4_kib_is_read_and_one_more_byte_is_not(api: Api, key: str) -> None:
    body = b'{"ttl_seconds":30' + b" " * 4078 + b"}"

    assert len(body) == 4096
    assert api("POST", f"/locks/{key}/lease", content=body).status_code == 201
    for method, path in (
        ("POST", f"/locks/{key}/lease"),
        ("PATCH", f"/locks/{key}/lease"),
        ("DELETE", f"/locks/{key}/lease"),
        ("DELETE", f"/locks/{key}"),
        ("GET", f"/locks/{key}"),
    ):
        answer = api(method, path, content=body + b" ")
        assert is_problem(answer, 413, "payload_too_large")
    assert api.read(key).json()["held"] is True


def test_a_chunked_body_is_measured_too(api: Api, key: str) -> None:
    def chunks(size: int) -> Iterator[bytes]:
        yield b'{"ttl_seconds":30'
        for _ in range(8):
            yield b" " * (size // 8)
        yield b"}"

    assert api("POST", f"/locks/{key}/lease", content=chunks(8)).status_code == 201
    assert is_problem(
        api("POST", f"/locks/{key}/lease", content=chunks(4096)), 413, "payload_too_large"
    )


def test_after_a_large_body_the_connection_goes_on(api: Api, key: str) -> None:
    answer = api("POST", f"/locks/{key}/lease", content=b"x" * 200_000)

    assert is_problem(answer, 413, "payload_too_large")
    assert "connection" not in answer.headers
    assert api.read(key).status_code == 200


def test_a_body_on_a_request_that_takes_none_is_not_looked_at(api: Api, key: str) -> None:
    api.acquire(key)

    assert api("GET", f"/locks/{key}", content=b"nonsense").status_code == 200
    assert api("DELETE", f"/locks/{key}/lease", content=b"nonsense").status_code == 204


# ---------------------------------------------------------------- many renewals in one request


def renewal(api: Api, key: str, ttl: Any = 60, **members: Any) -> dict[str, Any]:
    return {"key": key, "token": api.token, "ttl_seconds": ttl, **members}


def renew_many(api: Api, *leases: Any, **options: Any) -> httpx.Response:
    headers = {"X-Volcano-Lock-Token": None, **options.pop("headers", {})}
    return api("PATCH", "/lock-leases", json={"leases": leases}, headers=headers, **options)


def test_many_leases_are_renewed_in_one_request(api: Api, key: str) -> None:
    granted = [api.acquire(f"{key}-{number}").json() for number in range(3)]

    answer = renew_many(api, *(renewal(api, f"{key}-{number}", 40 + number) for number in range(3)))

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-volcano-request-id"] == REQUEST_ID
    assert answer.json() == {
        "leases": [
            {
                "key": f"{key}-{number}",
                "expires_at": f"2027-01-15T08:00:{40 + number}.000Z",
                "expires_in": 40 + number,
                "fencing_token": each["fencing_token"],
            }
            for number, each in enumerate(granted)
        ]
    }
    for number, each in enumerate(answer.json()["leases"]):
        assert api.read(f"{key}-{number}").json()["expires_at"] == each["expires_at"]


def test_a_lease_among_many_is_refused_alone(api: Api, key: str) -> None:
    """Absent, another's, or fine; a token in capitals is the same token."""
    api.acquire(key)
    api.acquire(f"{key}-2", headers={"X-Volcano-Lock-Token": str(uuid.uuid4())})

    answer = renew_many(
        api,
        renewal(api, f"{key}-1"),
        renewal(api, f"{key}-2"),
        renewal(api, key, token=api.token.upper()),
    )

    absent, another, fine = answer.json()["leases"]
    assert (absent["key"], absent["code"]) == (f"{key}-1", "lock_ownership_lost")
    assert (another["key"], another["code"]) == (f"{key}-2", "lock_ownership_lost")
    assert set(absent) == {"key", "error", "code"}
    assert (fine["key"], fine["expires_in"]) == (key, 60)
    assert api.read(f"{key}-1").json() == {"held": False}


def test_a_key_that_repeats_among_many_is_decided_in_order(api: Api, key: str) -> None:
    """A renewal may shorten, and the last one counts."""
    api.acquire(key)

    answer = renew_many(api, renewal(api, key, 60), renewal(api, key, 5), renewal(api, key, 20))

    assert [each["expires_in"] for each in answer.json()["leases"]] == [60, 5, 20]
    assert api.read(key).json()["expires_at"] == "2027-01-15T08:00:20.000Z"


def test_a_renewal_among_many_in_the_margin_is_refused() -> None:
    with running_server() as server:
        api = Api(server)
        api.acquire("short", 10)
        api.acquire("long", 11)
        server.clock.advance(9)

        short, long = renew_many(api, renewal(api, "short"), renewal(api, "long")).json()["leases"]

        assert short["code"] == "lock_ownership_lost"
        assert long["expires_in"] == 60
        api.close()


def test_one_wrong_lease_among_many_spoils_the_request(api: Api, key: str) -> None:
    before = api.acquire(key).json()

    answer = renew_many(api, renewal(api, key), renewal(api, "a/b"))

    assert is_problem(answer, 400, "invalid_request")
    assert answer.json()["error"].startswith('leases[1].key: got "a/b"')
    assert api.token not in answer.text
    assert api.read(key).json() == {"held": True, **before}


def test_500_leases_are_renewed_and_501_are_not(api: Api, key: str) -> None:
    api.acquire(key)
    leases = [renewal(api, key, 5 + number) for number in range(501)]

    assert is_problem(renew_many(api, *leases), 400, "invalid_request")
    assert api.read(key).json()["expires_at"] == "2027-01-15T08:00:30.000Z"
    answers = renew_many(api, *leases[:500]).json()["leases"]
    assert [each["expires_in"] for each in answers] == list(range(5, 505))


def test_a_request_for_many_has_a_larger_body(api: Api, key: str) -> None:
    api.acquire(key)
    body = json.dumps({"leases": [renewal(api, key)]}).encode()
    body = body[:-1] + b" " * (128 * 1024 - len(body)) + b"}"

    assert api("PATCH", "/lock-leases", content=body).status_code == 200
    too_large = api("PATCH", "/lock-leases", content=body + b" ")

    assert is_problem(too_large, 413, "payload_too_large")
    assert "131072 bytes" in too_large.json()["error"]


def test_a_request_for_many_goes_through_the_same_checks(api: Api, key: str) -> None:
    lease = renewal(api, key)

    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = api(method, "/lock-leases")
        assert is_problem(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "PATCH"
    for path in ("/lock-leases/", "/lock-leases/a", "/lock-lease", "/lock%2Dleases"):
        assert is_problem(api("PATCH", path), 404, "not_found")
    for credential, status in ((None, 401), (f"Bearer {UNKNOWN_KEY}", 401), (ANON_KEY, 401)):
        refused = renew_many(api, "wrong", headers={"Authorization": credential})
        assert refused.status_code == status
    anon = renew_many(api, lease, headers={"Authorization": f"Bearer {ANON_KEY}"})
    assert is_problem(anon, 403, "permission_denied")
    no_id = renew_many(api, lease, headers={"X-Volcano-Request-Id": None})
    assert is_problem(no_id, 400, "invalid_request")


def test_each_lease_among_many_costs_one_operation(counted: Api, key: str) -> None:
    """In their order: those beyond the quota are refused singly, and stay as they were."""
    counted.acquire(key)

    answer = renew_many(
        counted, renewal(counted, key, 50), renewal(counted, "absent"), renewal(counted, key, 60)
    )

    first, absent, beyond = answer.json()["leases"]
    assert first["expires_in"] == 50
    assert absent["code"] == "lock_ownership_lost"
    assert (beyond["code"], beyond["retry_after"]) == ("lock_rate_limited", 40)
    assert answer.headers["x-ratelimit-limit"] == "3"
    assert answer.headers["x-ratelimit-remaining"] == "0"
    assert answer.headers["x-ratelimit-reset"] == "1800000060"
    assert "retry-after" not in answer.headers
    counted.server.clock.advance(40)
    # 50 s from the renewal that was let through, 10 s of which are left: not 60, and not 30.
    assert renew_many(counted, renewal(counted, key, 5)).json()["leases"][0]["expires_in"] == 5
    assert counted.read(key).headers["x-ratelimit-remaining"] == "1"


def test_where_no_lease_fits_the_quota_the_whole_request_is_429(counted: Api, key: str) -> None:
    for _ in range(3):
        counted.read(key)

    answer = renew_many(counted, "not even valid")

    assert is_problem(answer, 429, "lock_rate_limited")
    assert answer.headers["retry-after"] == "40"


def test_a_refused_request_for_many_costs_one(counted: Api, key: str) -> None:
    answer = renew_many(counted, renewal(counted, key), renewal(counted, key), 5)

    assert answer.status_code == 400
    assert answer.headers["x-ratelimit-remaining"] == "2"


# ---------------------------------------------------------------- below what an HTTP client sends


def talk(server: VolcanoServer, request: bytes, *, wait: float = 5.0) -> bytes:
    """Send bytes, and read until the server closes or `wait` seconds have passed."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 0), timeout=wait) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while chunk := connection.recv(65_536):
                answer += chunk
        except TimeoutError:
            pass
        return answer


def raw(method: bytes, target: bytes, *lines: bytes, body: bytes = b"") -> bytes:
    head = [
        method + b" " + target + b" HTTP/1.1",
        b"Host: volcano.test",
        b"Authorization: Bearer " + SERVICE_KEY.encode(),
        b"X-Volcano-Lock-Token: " + str(uuid.uuid4()).encode(),
        b"X-Volcano-Request-Id: " + REQUEST_ID.encode(),
        b"Connection: close",
        *lines,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def kept(request: bytes) -> bytes:
    """The same, except that the client would keep the connection."""
    return request.replace(b"Connection: close\r\n", b"")


def parts(answer: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    "key",
    [
        b".",
        b"..",
        b"%2e%2e",
        b"?",
        b"a?",
        b"a?b",
        b"?a",
        b"#",
        b"a#b",
        b"+",
        b" ",
        b"a b",
        b"%",
        b"%zz",
        b"\xff",
        b"a\xffb",
        b"\x00",
        b"\xc3\xa9",
        b"a" * 129,
        b"a%0Ab/../c",
        b"a/b",
        b"a//b",
        b"a%2Fb",
        b"a\tb",
        b"a\\b",
        b"",
    ],
)
def test_a_raw_key_outside_the_grammar_is_a_json_400(shared: VolcanoServer, key: bytes) -> None:
    body = b'{"ttl_seconds":30}'
    request = raw(b"POST", b"/locks/" + key + b"/lease", b"Content-Length: 18", body=body)

    status, headers, answer = parts(talk(shared, request))

    assert (status, answer["code"]) == (400, "invalid_request")
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"FROB /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_no_http_is_a_json_400_and_the_end(
    shared: VolcanoServer, request_bytes: bytes
) -> None:
    status, headers, answer = parts(talk(shared, request_bytes))

    assert (status, answer["code"]) == (400, "invalid_request")
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"


def test_half_a_body_is_503_after_its_patience_and_the_end(shared: VolcanoServer) -> None:
    """The request is dropped undecided; a client may try again (400 would end its lease)."""
    head = kept(raw(b"POST", b"/locks/half/lease", b"Content-Length: 18"))

    status, headers, answer = parts(talk(shared, head + b'{"ttl_'))

    assert (status, answer["code"]) == (503, "lock_service_unavailable")
    assert headers["retry-after"] == "1"
    assert headers["connection"] == "close"
    api = Api(shared)
    assert api.read("half").json() == {"held": False}
    api.close()


def test_a_body_without_end_is_cut_off(shared: VolcanoServer) -> None:
    head = kept(raw(b"POST", b"/locks/endless/lease", b"Transfer-Encoding: chunked"))
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"

    answer = talk(shared, head + chunk * 5)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in answer


def test_a_hang_up_in_mid_request_decides_nothing(shared: VolcanoServer, api: Api) -> None:
    address = httpx.URL(shared.url)
    head = raw(b"POST", b"/locks/gone/lease", b"Content-Length: 18")
    with socket.create_connection((address.host, address.port or 0)) as connection:
        connection.sendall(head + b'{"ttl_seconds"')

    assert api.read("gone").json() == {"held": False}


def test_one_packet_may_carry_several_requests(shared: VolcanoServer) -> None:
    once = kept(raw(b"GET", b"/locks/pipelined"))

    answer = talk(shared, once * 3 + raw(b"GET", b"/locks/pipelined"))

    assert answer.count(b"HTTP/1.1 200 ") == 4
    assert answer.count(b'{"held":false}') == 4


def test_a_client_that_waits_to_be_told_to_go_on_is_told(shared: VolcanoServer) -> None:
    request = raw(
        b"POST",
        b"/locks/expects/lease",
        b"Content-Length: 18",
        b"Expect: 100-continue",
        body=b'{"ttl_seconds":30}',
    )

    answer = talk(shared, request)

    assert b"HTTP/1.1 201 " in answer


def statuses(answer: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize(
    ("target", "key", "status"),
    [
        (b"POST /locks/a/lease", UNKNOWN_KEY, 401),
        (b"PUT /locks/a/lease", SERVICE_KEY, 405),
        (b"POST /nothing", SERVICE_KEY, 404),
        (b"GET /healthz", SERVICE_KEY, 200),
    ],
)
def test_a_large_body_after_its_answer_is_not_taken_for_a_head(
    shared: VolcanoServer, target: bytes, key: str, status: int
) -> None:
    """What is refused before its body is read is answered once, and the connection goes on."""
    method, _, path = target.partition(b" ")
    head = kept(raw(method, path, b"Content-Length: 200000"))
    head = head.replace(SERVICE_KEY.encode(), key.encode())
    address = httpx.URL(shared.url)
    with socket.create_connection((address.host, address.port or 0), timeout=5) as connection:
        connection.sendall(head)
        first = connection.recv(65_536)
        for _ in range(20):
            connection.sendall(b"x" * 10_000)
        connection.sendall(raw(b"GET", b"/locks/afterwards"))
        rest = b""
        while chunk := connection.recv(65_536):
            rest += chunk

    assert (statuses(first), statuses(rest)) == ([status], [200])


def test_what_is_no_http_is_not_the_answer_to_a_request_before_it(shared: VolcanoServer) -> None:
    """A 400 would end a lease that was granted."""
    acquires = [
        kept(
            raw(
                b"POST",
                b"/locks/before-junk-%d/lease" % number,
                b"Content-Length: 18",
                body=b'{"ttl_seconds":30}',
            )
        )
        for number in range(3)
    ]
    unfinished = kept(raw(b"POST", b"/locks/junk/lease", b"Transfer-Encoding: chunked"))

    for junk in (b"nonsense\r\n\r\n", unfinished + b"nonsense\r\n"):
        answer = talk(shared, b"".join(acquires) + junk)
        assert statuses(answer)[:3] in ([201] * 3, [409] * 3)
        assert 400 not in statuses(answer)


def test_a_broken_body_is_a_json_400_and_decides_nothing(shared: VolcanoServer, api: Api) -> None:
    head = kept(raw(b"POST", b"/locks/broken/lease", b"Transfer-Encoding: chunked"))

    status, headers, answer = parts(talk(shared, head + b'12\r\n{"ttl_seconds":30}\r\nzz\r\n'))

    assert (status, answer["code"]) == (400, "invalid_request")
    assert headers["connection"] == "close"
    assert api.read("broken").json() == {"held": False}


def test_a_broken_body_after_its_answer_gets_no_second_one(shared: VolcanoServer) -> None:
    head = kept(raw(b"POST", b"/nothing", b"Transfer-Encoding: chunked"))
    address = httpx.URL(shared.url)
    with socket.create_connection((address.host, address.port or 0), timeout=5) as connection:
        connection.sendall(head)
        first = connection.recv(65_536)
        connection.sendall(b"nonsense\r\n")
        rest = connection.recv(65_536)

    assert (statuses(first), rest) == ([404], b"")


def test_what_is_no_http_after_a_late_body_is_a_json_400(shared: VolcanoServer) -> None:
    head = kept(raw(b"POST", b"/nothing", b"Content-Length: 5"))
    address = httpx.URL(shared.url)
    with socket.create_connection((address.host, address.port or 0), timeout=5) as connection:
        connection.sendall(head)
        first = connection.recv(65_536)
        connection.sendall(b"12345")
        connection.sendall(b"nonsense\r\n\r\n")
        rest = connection.recv(65_536)

    assert (statuses(first), statuses(rest)) == ([404], [400])


def test_an_upgrade_is_ignored_but_never_costs_a_body(shared: VolcanoServer) -> None:
    """The parser takes what follows such a head for another protocol: an acquire has lost its TTL.

    Java's HttpClient asks for h2c by default.
    """
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMA")
    acquire = kept(
        raw(
            b"POST",
            b"/locks/upgrade/lease",
            *upgrade,
            b"Content-Length: 18",
            body=b'{"ttl_seconds":30}',
        )
    )
    read = kept(raw(b"GET", b"/locks/upgrade", *upgrade))

    status, headers, answer = parts(talk(shared, acquire))

    assert (status, headers["connection"]) == (400, "close")
    assert "Upgrade" in answer["error"]
    assert statuses(talk(shared, read, wait=0.5)) == [200]
