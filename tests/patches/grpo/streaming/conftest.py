"""A Ray of the test process's own, for tests whose workers and servers are stand-ins."""

from collections.abc import Iterator

import pytest
import ray_start


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray_start.ask_again()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()
