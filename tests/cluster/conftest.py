"""One cluster for all tests of this folder, where this machine can have one."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import PACKAGES, Cluster, cluster_here, why_not


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    if (why := why_not()) is not None:
        pytest.skip(f"a cluster of namespaces cannot be started here: {why} (Debian: {PACKAGES})")
    with cluster_here() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all nodes and nothing on them; whatever a test leaves is ended after it."""
    yield shared_cluster
    shared_cluster.make_ready()
