"""`crust pool`: the space and the volumes of each pool of this node's drivers, and the deletion of a volume.

The driver lists the volumes of its pool (crust.v1, Pool), the proxy knows the sandbox of each volume. Drivers of
other vendors have no such service, and are left out. DeleteVolume at the driver deletes a volume, unless it is in
use. The command asks the operator first: it cannot know whether Kubernetes still has a PersistentVolume for it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import click
from rich.text import Text

from crust.core import errors
from crust.inspection import daemon_calls, output, show, views
from crust.rpc.port import stub
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import pool_pb2, pool_pb2_grpc

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolVolume:
    """A volume of a pool. `pods` are names or UIDs; `state` is `unused` if this node knows no user."""

    pv: str
    pods: tuple[str, ...]
    state: str
    size_bytes: int
    nodes: tuple[str, ...]
    volume_id: str
    driver: str
    thick: bool
    message: str
    pool: str


VOLUMES = (
    output.Column("pv", lambda row: row.pv or row.volume_id),
    output.Column("pod", "pods"),
    output.Column("state", styles=views.STATES),
    output.Column("size", lambda row: views.size(row.size_bytes)),
    output.Column("kind", views.provisioning),
    output.Column("nodes"),
    output.Column("driver", wide=True),
    output.Column("pool", wide=True),
    output.Column("volume", "volume_id", wide=True),
    output.Column("message"),
)


def pools(driver: str = "") -> show.Question:
    """Every pool, or the pool of `driver`; healthy if no pool is low and no volume has a problem. Raises `NoPool`."""

    async def ask(proxy: daemon_calls.Stub, _: str) -> show.Shown:
        drivers, volumes = await _pools(proxy, driver)
        if not drivers:
            raise errors.NotFound.named(
                "NoPool",
                "there is no pool to show",
                why=f"no driver {driver or 'of this node'} that answers has a pool of crust",
            )
        return shown(drivers, volumes)

    return ask


async def delete(run_dir: str, name: str, *, is_confirmed: bool) -> None:
    """Delete a volume, by its id or its PersistentVolume, after daemon_calls.

    Raises `VolumeNotInPool`, `VolumeAmbiguous`, `VolumeNotUnused`, and the driver's refusal.
    """
    async with daemon_calls.inspecting(run_dir) as proxy:
        drivers, volumes = await _pools(proxy)
    sockets = {driver.name: driver.socket for driver in drivers}
    matching = [volume for volume in volumes if name in (volume.volume_id, volume.pv)]
    if not matching:
        raise errors.NotFound.named(
            "VolumeNotInPool",
            f"{name} is not in a pool of this node",
            why="no driver that answers lists a volume of that id or name",
        )
    if len(matching) > 1:
        raise errors.InvalidRequest.named(
            "VolumeAmbiguous",
            f"{name} is not deleted",
            why=f"{len(matching)} volumes have this name: {', '.join(volume.volume_id for volume in matching)}",
        )
    (volume,) = matching
    if volume.state != "unused":
        users = [f"pod {pod}" for pod in volume.pods] + [f"node {node}" for node in volume.nodes]
        raise errors.NotReady.named(
            "VolumeNotUnused",
            f"{name} is not deleted",
            why=f"it is {volume.state}, for {', '.join(users) or 'the reason in its message'}",
        )
    if not is_confirmed:
        size = views.size(volume.size_bytes)
        click.confirm(
            f"Volume {volume.volume_id} of {volume.driver} ({size}) is deleted with its data."
            f" If Kubernetes has a PersistentVolume {volume.pv}, delete that instead. Delete the volume?",
            abort=True,
        )
    async with daemon_calls.connected(
        f"the driver {volume.driver}", sockets[volume.driver]
    ) as port:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
        controller = stub(csi_pb2_grpc.ControllerStub, port)
        await controller.DeleteVolume(
            request, timeout=TIMEOUT_S, metadata=daemon_calls.WITH_ERROR_INFO
        )
    click.echo(f"deleted {volume.volume_id}")


async def _pools(
    proxy: daemon_calls.Stub, driver: str = ""
) -> tuple[list[views.DriverRow], list[PoolVolume]]:
    """The drivers that have a pool, or the named one, and the volumes of their pools."""
    served = await show.drivers_of(proxy)
    drivers = [row for row in served if row.pool and driver in ("", row.name)]
    deferred = await show.volumes_of(proxy)
    listed = await asyncio.gather(*(_volumes(row, deferred) for row in drivers))
    return drivers, [volume for volumes in listed for volume in volumes]


async def _volumes(
    driver: views.DriverRow, deferred: Iterable[views.VolumeRow]
) -> list[PoolVolume]:
    entries = {volume.volume_id: volume for volume in deferred if volume.driver == driver.name}
    async with daemon_calls.connected(f"the driver {driver.name}", driver.socket) as port:
        pool = stub(pool_pb2_grpc.PoolStub, port)
        request = pool_pb2.ListPoolVolumesRequest()
        listed = pool.ListPoolVolumes(
            request, timeout=TIMEOUT_S, metadata=daemon_calls.WITH_ERROR_INFO
        )
        rows = []
        async for row in listed:
            entry = entries.get(row.volume_id)
            # a driver of an earlier version names no pods
            uses = zip_longest(row.targets, row.pods, fillvalue="")
            pods = [pod or views.pod_of(target) for target, pod in uses]
            state = "attached" if row.nodes else "unused"
            if entry is not None:
                state = entry.state
            elif row.targets:
                state = "on-host"
            volume = PoolVolume(
                pv=row.name,
                pods=tuple(dict.fromkeys(filter(None, pods))),
                state=state,
                size_bytes=row.capacity_bytes,
                nodes=tuple(row.nodes),
                volume_id=row.volume_id,
                driver=driver.name,
                thick=row.thick,
                message=row.problem or (entry.message if entry else ""),
                pool=row.pool,
            )
            rows.append(volume)
        return rows


def shown(drivers: Sequence[views.DriverRow], volumes: list[PoolVolume]) -> show.Shown:
    """The pools and their volumes, in every format."""

    def table(wide: bool) -> Text:  # noqa: FBT001 - one flag, and its caller is `Shown`
        space = output.table(views.POOLS, spaces, wide=wide)
        return Text("\n\n").join((space, output.table(VOLUMES, volumes, wide=wide)))

    spaces = tuple(views.pools_of(drivers))
    is_healthy = all(row.pool.state == "ready" for row in spaces)
    return show.Shown(
        {
            "pools": [{"driver": row.driver, "space": row.pool} for row in spaces],
            "volumes": volumes,
        },
        tuple(volume.volume_id for volume in volumes),
        table,
        healthy=is_healthy and not any(volume.message for volume in volumes),
    )
