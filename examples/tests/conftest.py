"""`server`: a lock server on a port, with a clock that the test moves."""

from collections.abc import Iterator

import pytest

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer, running_server


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def volcano(server: VolcanoServer) -> Iterator[VolcanoClient]:
    with VolcanoClient(api_url=server.url, service_key=server.service_key) as client:
        yield client
