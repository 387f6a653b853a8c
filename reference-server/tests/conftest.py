"""What needs a database of its own asks for `cluster`; it is started once, when first asked for."""

from collections.abc import Iterator

import pytest
from postgres import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL for all tests that do not kill it."""
    with Cluster.started() as cluster:
        yield cluster
