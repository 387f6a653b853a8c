"""A driver process: commands in, replies and events out (protocol.md)."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from conformance import HOME

_LEFT_OUT = ("VOLCANO_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class DriverError(Exception):
    """The driver died, hung, or broke the protocol: nobody's rule was tested."""


class UnsupportedError(Exception):
    """The driver says that its platform cannot do this; the text is its reason."""


class Driver:
    """`on_line` hears every line, for the conversation."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        patience: float = 5.0,
    ) -> None:
        self.patience = patience
        self.capabilities: frozenset[str] = frozenset()
        self.on_line: Callable[[str, Any], None] = lambda _way, _line: None
        self._next_id = 1
        self._replies: dict[int, dict[str, Any]] = {}
        self._events: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._fault: str | None = None
        self._stderr: deque[str] = deque(maxlen=60)
        inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith(_LEFT_OUT)}
        self._process = subprocess.Popen(  # noqa: S603 - the driver that is asked for
            argv,
            cwd=cwd,
            env={**inherited, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._read_lines, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ talk

    def command(self, cmd: str, **fields: Any) -> dict[str, Any]:
        """The `ok` of the reply.  Raises UnsupportedError or DriverError."""
        number = self._next_id
        self._next_id += 1
        line = {"id": number, "cmd": cmd, **fields}
        if cmd != "sleeping":
            self.on_line("->", line)
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(line) + "\n")
            stdin.flush()
        except (BrokenPipeError, ValueError):
            time.sleep(0.05)  # its last words may still be on their way
            raise DriverError(f"the driver is gone: {self.last_words()}") from None
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._replies or self._fault is not None, self.patience * 2
            )
            reply = self._replies.pop(number, None)
        if reply is None:
            raise DriverError(
                self._fault or f"no reply to {cmd} within {self.patience * 2:g} s (see stderr)"
            )
        if cmd != "sleeping":
            self.on_line("<-", reply)
        if "unsupported" in reply:
            raise UnsupportedError(reply["unsupported"])
        if "error" in reply:
            raise DriverError(f"the driver answers {cmd}: {reply['error']}")
        _check(reply["ok"], {"hello": "hello_ok", "sleeping": "sleeping_ok"}.get(cmd))
        ok: dict[str, Any] = reply["ok"]
        return ok

    def events(self) -> list[dict[str, Any]]:
        """Those that came and were not yet taken."""
        with self._changed:
            if self._fault is not None and not self._events:
                raise DriverError(self._fault)
            return list(self._events)

    def wait_for_event(self, seconds: float) -> None:
        with self._changed:
            if not self._events and self._fault is None:
                self._changed.wait(seconds)

    def take(self, event: dict[str, Any]) -> None:
        with self._changed:
            self._events.remove(event)

    # ------------------------------------------------------------ the process

    def last_words(self) -> str:
        return "\n".join(self._stderr)

    def crash(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._close_pipes()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """EOF; a driver that does not end by itself has broken the protocol."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it went first; its status says how
            try:
                self._process.wait(self.patience)
            except subprocess.TimeoutExpired:
                self.crash()
                raise DriverError(
                    f"the driver did not end within {self.patience:g} s of EOF"
                ) from None
        self._close_pipes()
        if self._process.returncode != 0:
            raise DriverError(f"the driver ended with status {self._process.returncode}")

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself

    def _close_pipes(self) -> None:
        for thread in self._threads:
            thread.join(1)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # what was not read is no longer wanted

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            try:
                line = json.loads(text)
                _check(line, _shape_of(line))
            except (ValueError, DriverError) as error:
                self._fail(f"not a line of the protocol: {text.strip()!r} ({error})")
                return
            if "event" in line:
                self.on_line("<-", line)
            with self._changed:
                if "event" in line:
                    self._events.append(line)
                else:
                    self._replies[line["id"]] = line
                self._changed.notify_all()
        # stderr's last lines may come a moment later than stdout's end
        time.sleep(0.05)
        self._fail(f"the driver ended: {self.last_words()}".strip())

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            self._stderr.append(text.rstrip())

    def _fail(self, why: str) -> None:
        with self._changed:
            self._fault = self._fault or why
            self._changed.notify_all()


def _shape_of(line: Any) -> str:
    if not isinstance(line, dict):
        raise DriverError("not an object")
    if "event" in line:
        if line["event"] not in ("entered", "lost", "watched", "returned", "raised"):
            raise DriverError(f"no such event: {line['event']!r}")
        return str(line["event"])
    for shape in ("ok", "unsupported"):
        if shape in line:
            return shape
    return "fault"


def _check(value: Any, shape: str | None) -> None:
    if shape is None:
        return
    error = next(iter(validator("protocol.schema.json", shape).iter_errors(value)), None)
    if error is not None:
        raise DriverError(f"{shape}: {error.message}")


@cache
def validator(schema_file: str, shape: str | None = None) -> jsonschema.Draft202012Validator:
    """For the whole of a schema, or for one of its definitions."""
    schema = json.loads((HOME / schema_file).read_text())
    if shape is not None:
        schema = {"$defs": schema["$defs"], "$ref": f"#/$defs/{shape}"}
    return jsonschema.Draft202012Validator(schema)
