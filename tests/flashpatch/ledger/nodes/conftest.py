"""One cluster of three raylets for all tests of the folder."""

from collections.abc import Iterator

import pytest
from ray_nodes import Nodes


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    cluster = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        yield cluster
    finally:
        cluster.stop()
