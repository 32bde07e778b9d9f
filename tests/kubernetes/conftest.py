"""One cluster for the run: it takes half a minute to start."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import capabilities, trees
from tests.support.kubernetes import cluster as clusters
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.writers import Writers


@pytest.fixture(scope="session")
def installed() -> Iterator[Cluster]:
    """With the values that the page installs. The control groups of its pods have the name of the run, by which those
    of a killed one are found."""
    capabilities.need("mount", "loop", "vm", "kubernetes")
    group = f"crust-tests-{Path(tempfile.gettempdir()).name}"
    with (
        trees.of_mounts("k-") as directory,
        Cluster.started(directory, group) as started,
    ):
        yield started


@pytest.fixture(scope="session")
def cluster(installed: Cluster) -> Iterator[Cluster]:
    """With snapshots, and with a class whose volumes the pod's RuntimeClass decides about."""
    flags = (
        "--enable-distributed-snapshotting=true",
        "--feature-gates=CSIVolumeGroupSnapshot=true",
    )
    with installed.plane.snapshots_served(*flags):
        installed.upgrade(clusters.values())
        yield installed


@pytest.fixture
def writers(cluster: Cluster) -> Iterator[Writers]:
    """Two pods that write all the time; they end with the test, and leave nothing."""
    started = Writers.started(cluster)
    yield started
    started.end()
