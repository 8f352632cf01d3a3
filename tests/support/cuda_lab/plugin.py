"""A plugin of pytest: the runs that tests marked `runs` need, begun ahead of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_lab.lane import Lane


@pytest.fixture(scope="session")
def lane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    from cuda_lab.lane import Lane

    lane = Lane(tmp_path_factory.mktemp("cuda"))
    for item in request.session.items:
        for mark in item.iter_markers("runs"):
            lane.begin(mark.args)
    yield lane
    lane.close()
