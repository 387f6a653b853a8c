import sys
from pathlib import Path

HERE = Path(__file__).parent
for shared in (HERE.parent / "conformance", HERE):  # the driver's clock, and what test files share
    sys.path.insert(0, str(shared))

from sync_stage import stage  # noqa: E402  found only now
from threads_stage import threads  # noqa: E402

__all__ = ["stage", "threads"]
