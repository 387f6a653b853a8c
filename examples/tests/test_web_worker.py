import signal
from pathlib import Path

import pytest
from running import PATIENCE, counted, line_with, show, started

from volcano_server.testing import VolcanoServer

NAME = "web-worker"


@pytest.mark.timeout(90)
def test_each_invoice_is_sent_once_whoever_has_its_jobs() -> None:
    lines = show(NAME)

    assert 6 == len(lines)
    for invoice in range(1, 5):
        assert 1 == counted(lines, f"invoice {invoice} is sent")


def test_sigterm_ends_after_the_present_jobs(server: VolcanoServer, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for number in range(100):
        (jobs / f"{number:03}.job").write_text(str(number))
    arguments = (2, jobs, tmp_path / "invoices.pstore")
    with started(server, NAME, "workers.rb", *arguments) as workers:
        line_with(workers, "is sent")
        workers.send_signal(signal.SIGTERM)
        _, complaints = workers.communicate(timeout=PATIENCE)

    assert (0, "") == (workers.returncode, complaints)
    assert len(list(jobs.glob("*.job"))) > 50
    assert not list(jobs.glob("*.job.*")), "no job is left half done"
