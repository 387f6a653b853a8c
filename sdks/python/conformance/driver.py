# ruff: noqa: INP001  a program, not a package
"""The Python SDK behind stdin and stdout: conformance/protocol.md.

    stdin ──commands──> flavour's `Driver.command(...)` ──> SDK
    stdout <──replies and events── `emit`

Each flavour has a file of its own; what both say on the wire is here.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import threading
from datetime import datetime
from typing import Any

from volcano_sdk import LockEvent, LockLease, LockState, VolcanoError, __version__
from volcano_sdk.errors import chain

PROTOCOL = 1

_line = threading.Lock()


class BodyError(Exception):
    """What `finish` with `raise` lets the body of a `with_lock` raise."""


class UnsupportedError(Exception):
    """This flavour cannot: the scenario is skipped with that reason."""


def emit(**fields: Any) -> None:
    """One line on stdout, at once; thread-safe."""
    with _line:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def reply(number: int, ok: dict[str, Any]) -> None:
    emit(id=number, ok=ok)


def hello(column: str, capabilities: list[str]) -> dict[str, Any]:
    """What `hello` is answered."""
    return {
        "sdk": column,
        "version": __version__,
        "runtime": f"{platform.python_implementation()} {platform.python_version()}",
        "capabilities": capabilities,
    }


def returned(call: str, value: object) -> None:
    """The call's end."""
    emit(event="returned", call=call, value=described(value))


def raised(event: str, call: str, error: BaseException, cancelled: type[BaseException]) -> None:
    """`raised`, or `lost`: the error, and every one that travels with it."""
    errors = [_error(one, cancelled) for one in chain(error)]
    emit(event=event, call=call, **errors[0], errors=errors)


def watched(call: str, event: LockEvent) -> None:
    emit(
        event="watched",
        call=call,
        type=event.type,
        key=event.key,
        fencing_token=event.fencing_token,
        at=None if event.at is None else instant(event.at),
        watchers=event.watchers,
    )


def described(value: object) -> Any:
    """A value of the SDK as the protocol writes it."""
    match value:
        case LockLease():
            return {
                "key": value.key,
                "token": value.token,
                "fencing_token": value.fencing_token,
                "expires_at": instant(value.expires_at),
            }
        case LockState(held=True, expires_at=datetime() as expires_at):
            return {
                "held": True,
                "fencing_token": value.fencing_token,
                "expires_at": instant(expires_at),
            }
        case LockState():
            return {"held": False}
        case _:
            return value


def instant(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lease_from(fields: dict[str, Any]) -> LockLease:
    """A lease that the scenario builds by hand."""
    return LockLease(
        fields["key"],
        fields["token"],
        datetime.fromisoformat(fields["expires_at"]),
        fields["fencing_token"],
    )


def options(command: dict[str, Any]) -> dict[str, Any]:
    """The arguments that were given, as they came."""
    names = ("ttl", "token", "request_id", "wait")
    return {name: command[name] for name in names if name in command}


def filters(command: dict[str, Any]) -> dict[str, Any]:
    """Those of a `watch` that were given, as they came."""
    return {name: command[name] for name in ("key", "prefix") if name in command}


def _error(error: BaseException, cancelled: type[BaseException]) -> dict[str, Any]:
    message = str(error)
    match error:
        case VolcanoError():
            fields = {"error": type(error).__name__, "message": message}
            for name in ("code", "status", "retry_after", "request_id"):
                if getattr(error, name) is not None:
                    fields[name] = getattr(error, name)
            return fields
        case ValueError() | TypeError():
            return {"error": "InvalidArgument", "message": message}
        case RuntimeError() if "client" in message and "closed" in message:
            return {"error": "Closed", "message": message}
        case BodyError():
            return {"error": "BodyError", "message": message}
        case cancelled():
            return {"error": "Cancelled", "message": message}
        case _:
            return {"error": "Unexpected", "message": f"{type(error).__name__}: {message}"}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--flavour", choices=["sync", "async"], required=True)
    flavour = arguments.parse_args().flavour
    for name in [name for name in os.environ if name.startswith("VOLCANO_")]:
        del os.environ[name]
    flavour_driver = importlib.import_module(f"{flavour}_driver")
    flavour_driver.main()
    sys.stdout.flush()
    os._exit(0)  # whatever the SDK is doing


if __name__ == "__main__":
    sys.modules["driver"] = sys.modules["__main__"]  # the flavours import it by its name
    main()
