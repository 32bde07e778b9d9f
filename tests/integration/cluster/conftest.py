"""Members of etcd: one for most tests of a file, three where a test says so; and programs of crust."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd
from tests.support.cluster.etcd_cluster import EtcdCluster
from tests.support.cluster.programs import Started

NODES = ("n1", "n2", "n10")


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One member for the tests of a file."""
    with members.running(tmp_path_factory.mktemp("etcd"), nodes=NODES) as etcd:
        yield etcd


@pytest.fixture
def etcd(shared_etcd: Etcd) -> Etcd:
    """The same, empty."""
    shared_etcd.empty()
    return shared_etcd


@pytest.fixture
async def cluster(etcd: Etcd) -> AsyncIterator[EtcdCluster]:
    """Connections to it, for the test."""
    async with AsyncExitStack() as stack:
        yield EtcdCluster(etcd, stack)


@pytest.fixture
async def programs(etcd: Etcd) -> AsyncIterator[Started]:
    """Programs that end with the test."""
    async with AsyncExitStack() as stack:
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-cluster-"))
        yield Started(Path(base), etcd, stack)
