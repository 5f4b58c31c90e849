from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, refusal


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, for all tests; skips them, saying why, where there cannot be one."""
    if (reason := refusal()) is not None:
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster
