"""A driver that breaks the protocol is said to be at fault, quickly, and is never waited for."""

import sys
from pathlib import Path

import pytest

from conformance.driver import Driver, DriverError, UnsupportedError

ECHO = """
import json, sys
for line in sys.stdin:
    command = json.loads(line)
    {act}
"""


def driver(act: str) -> Driver:
    argv = [sys.executable, "-c", ECHO.format(act=act)]
    return Driver(argv, Path.cwd(), {}, patience=1.0)


def reply(ok: str) -> str:
    return f'print(json.dumps({{"id": command["id"], {ok}}}), flush=True)'


def test_the_reply_of_a_command_is_its_ok() -> None:
    player = driver(reply('"ok": {"lost": False}'))

    assert player.command("look", call="1") == {"lost": False}

    player.end()


def test_unsupported_is_a_reason() -> None:
    player = driver(reply('"unsupported": "no threads here"'))

    with pytest.raises(UnsupportedError, match="no threads here"):
        player.command("cancel", call="1")

    player.end()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (reply('"error": "I am broken"'), "I am broken"),
        ('print("hello")', "not a line of the protocol"),
        ('print("[]")', "not a line of the protocol"),
        ('print(json.dumps({"event": "danced", "call": "1"}))', "no such event"),
        ('print(json.dumps({"event": "raised", "call": "1"}))', "'error' is a required"),
        ('sys.exit("last words")', "last words"),
        ("pass", "no reply to sleeping within"),
        (reply('"ok": {"seconds": []}'), "'in_flight' is a required"),
    ],
)
def test_a_breach_of_the_protocol_is_the_drivers_fault(act: str, said: str) -> None:
    player = driver(act + "; sys.stdout.flush()")

    with pytest.raises(DriverError) as caught:
        player.command("sleeping")

    player.crash()
    assert said in str(caught.value)


def test_a_driver_that_stays_after_eof_is_at_fault() -> None:
    argv = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(60)"]
    player = Driver(argv, Path.cwd(), {}, patience=0.3)

    with pytest.raises(DriverError, match="did not end"):
        player.end()


def test_a_driver_that_ends_with_a_status_is_at_fault() -> None:
    argv = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    player = Driver(argv, Path.cwd(), {}, patience=5)

    with pytest.raises(DriverError, match="status 3"):
        player.end()


def test_the_sdk_sees_neither_proxies_nor_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLCANO_API_URL", "http://elsewhere")
    monkeypatch.setenv("http_proxy", "http://elsewhere")
    act = 'import os; names = sorted(os.environ); print(json.dumps({"id": 1, "unsupported": '
    player = driver(act + '" ".join(names)}), flush=True)')

    with pytest.raises(UnsupportedError) as caught:
        player.command("sleeping")

    player.end()
    assert "VOLCANO" not in str(caught.value)
    assert "proxy" not in str(caught.value)
