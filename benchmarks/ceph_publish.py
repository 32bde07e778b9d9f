"""A deferred publish of an image of Ceph against one of a local volume, through the same three processes.

Two nodes on this machine: one whose driver has sparse files, one whose driver has a pool in a cluster of one monitor,
one manager and one OSD in memory. A round publishes and unpublishes on both, and each round begins with the other.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio

from benchmarks import figures, node
from crust.wire.csi.v1 import csi_pb2
from examples.cluster import ceph_cluster
from examples.kata.demo.kubelet import Kubelet
from tests.support.ceph import rbd_driver

NAME = "ceph-publish"
ROUNDS = 100
WARM_UP = 10
SIZE_BYTES = 256 << 20
LOCAL, CEPH = "a sparse file of this node", "an image of Ceph"


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds of publish and unpublish, by kind of volume."""

    publish: dict[str, figures.Samples]
    unpublish: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goal."""
        return figures.Report(
            name=NAME,
            ways=(LOCAL, CEPH),
            title="Deferred publish of an image of Ceph",
            method=f"{ROUNDS} rounds, through proxy, shim and driver; one OSD in memory on the same machine.",
            rows=tuple(
                figures.Row(f"{call}: {kind}", samples, "" if kind == LOCAL else f"{call}: {LOCAL}")
                for call, by_kind in (("publish", self.publish), ("unpublish", self.unpublish))
                for kind, samples in by_kind.items()
            ),
            goals=(
                figures.at_most(
                    "a deferred publish of an image takes at most twice that of a local volume",
                    self.publish[CEPH].median / self.publish[LOCAL].median,
                    2.0,
                    "times",
                ),
            ),
            if_missed="a publish is one call of a pod's start, which takes seconds",
            meaning="The driver reads two records and the image's size in the cluster; a local one reads files.",
        )


async def measure() -> Result:
    """Measure on two nodes of their own."""
    with (
        TemporaryDirectory(prefix="crust-bench-") as place,
        ceph_cluster.running(Path(place) / "ceph", with_mgr=True) as ceph,
        node.directories() as local_paths,
        node.directories() as ceph_paths,
    ):
        namespace = ceph.make_namespace()
        key = ceph.controller("bench", namespace)
        config = ceph_paths.base / "driver.toml"
        key_file = rbd_driver.key_file(ceph_paths.base, key)
        login = {"namespace": namespace, "user": "bench", "key_file": key_file}
        config.write_text(rbd_driver.settings(ceph, log_level="info", create_pool=True, **login))
        async with (
            node.serving(local_paths) as local,
            node.serving(ceph_paths, config=config) as remote,
        ):
            remote.secrets = {"userID": "bench", "userKey": key}
            ways = {LOCAL: local, CEPH: remote}
            made = {kind: await _staged(co) for kind, co in ways.items()}
            await _rounds(ways, made, WARM_UP)
            measured = await _rounds(ways, made, ROUNDS)
            for kind, co in ways.items():
                await co.unstage(made[kind])
                await co.delete(made[kind])
    return measured


async def _staged(co: Kubelet) -> csi_pb2.Volume:
    """A staged volume; the manager needs a few seconds before it knows the pool's capacity."""
    while True:
        try:
            volume = await co.create("bench", SIZE_BYTES)
            break
        except grpc.aio.AioRpcError as err:
            if "CephStatisticsMissing" not in (err.details() or ""):
                raise
        await asyncio.sleep(0.5)
    await co.stage(volume)
    return volume


async def _rounds(ways: dict[str, Kubelet], made: dict[str, csi_pb2.Volume], count: int) -> Result:
    publish, unpublish = figures.Collector[str](), figures.Collector[str]()
    for number in range(count):
        for kind in sorted(ways, reverse=bool(number % 2)):
            co, target = ways[kind], ways[kind].target("bench")
            await publish.timed(kind, co.publish(made[kind], target, defer=True))
            await unpublish.timed(kind, co.unpublish(made[kind], target))
    return Result(publish.samples(), unpublish.samples())
