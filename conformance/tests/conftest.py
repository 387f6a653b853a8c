"""pytest names this directory `conformance.tests`, and puts an empty module in the place of the
package `conformance`: here the real one takes it back, before any test module asks for it."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.modules.pop("conformance", None)
importlib.import_module("conformance")

from conformance.discovery import Column  # noqa: E402 - see above

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def driver_column() -> Callable[[str], Column]:
    """The driver in this file of the directory, as a column."""

    def of(file: str) -> Column:
        return Column(
            name=Path(file).stem,
            language="test",
            argv=(sys.executable, str(HERE / file)),
            cwd=HERE,
            environment={"PYTHONPATH": str(HERE)},
        )

    return of
