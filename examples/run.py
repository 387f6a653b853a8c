"""Runs one example beside a lock server of its own: `./dev example NAME` sets up and calls this.

The example's show.sh runs in its folder, with VOLCANO_API_URL, VOLCANO_SERVICE_KEY and DATA (an
empty folder) in its environment.  Nothing that it started outlives it.  The exit status is its own.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONGEST_SHOW_SECONDS = 60.0
NAMES = sorted(script.parent.name for script in HERE.glob("*/show.sh"))


@contextmanager
def server() -> Iterator[Mapping[str, str]]:
    """`volcano-server dev` on a free port, as the environment that a client reads."""
    command = [sys.executable, "-m", "volcano_server", "dev", "--ephemeral", "--port", "0"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        if not first_line:
            raise SystemExit("the server did not start; what it said is above")
        facts = json.loads(first_line)
        yield {"VOLCANO_API_URL": facts["url"], "VOLCANO_SERVICE_KEY": facts["service_key"]}
    finally:
        process.terminate()
        process.wait(timeout=10)


def environment() -> dict[str, str]:
    """Where programs of all three languages find what they import.

    Several print at once: a line must be one write, and an unbuffered Python makes two of it.
    """
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ruby = str(HERE.parent / "sdks" / "ruby" / "lib")
    return {**inherited, "PATH": path, "RUBYLIB": ruby}


def main(name: str) -> int:
    with server() as variables, tempfile.TemporaryDirectory(prefix="volcano-example-") as data:
        process = subprocess.Popen(
            ["sh", "-eu", "show.sh"],
            cwd=HERE / name,
            env={**environment(), **variables, "DATA": data},
            start_new_session=True,
        )
        try:
            return process.wait(timeout=LONGEST_SHOW_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name} was not over after {LONGEST_SHOW_SECONDS:g} s", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nothing is left of it


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: ./dev example NAME, where NAME is one of: {', '.join(NAMES)}")
    sys.exit(main(sys.argv[1]))
