"""What the operator reads, and what happens when nobody can."""

import errno
import io
import json

import pytest

from volcano_server.logs import Log


class TroubledStream(io.StringIO):
    """Fails with `error` while there is one, as a full disk or a pipe without a reader."""

    error: OSError | None = None

    def flush(self) -> None:
        if self.error is not None:
            raise self.error
        super().flush()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_line_that_cannot_be_written_troubles_nobody(number: int) -> None:
    """A request that was decided gets its answer, whatever becomes of its line."""
    stream = TroubledStream()
    log = Log(stream)
    stream.error = OSError(number, "no line today")

    log.note("started")
    log.trouble("broken")
    log.request(failed=False, status=201)
    stream.error = None
    log.note("stopped")

    assert json.loads(stream.getvalue().splitlines()[-1])["event"] == "stopped"


def test_a_quiet_log_leaves_out_only_what_is_ordinary() -> None:
    stream = io.StringIO()
    log = Log(stream, quiet=True)

    log.note("started")
    log.request(failed=False, status=201)
    log.trouble("broken")

    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["request", "broken"]
