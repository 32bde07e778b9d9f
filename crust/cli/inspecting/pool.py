"""`crust pool`: the space and the volumes of each pool of this node's drivers, and the deletion of a forgotten one.

The driver says what is in its pool (crust.v1, Pool), the proxy which volume has which sandbox. A driver of somebody
else has no such service, and is left out. DeleteVolume at the driver deletes a volume, and refuses one in use. This
command cannot know whether Kubernetes still has a PersistentVolume for the volume, so it asks the operator.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click
from rich.text import Text

from crust.cli import asking, output
from crust.cli.asking import Stub
from crust.cli.inspecting import show, views
from crust.core import errors
from crust.rpc.port import stub
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import pool_pb2, pool_pb2_grpc

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolVolume:
    """A volume of a pool. `pods` are names, UIDs where the CO does not say names.

    `state` is `unused` if nobody has the volume, as far as this node knows.
    """

    pv: str
    pods: tuple[str, ...]
    state: str
    size_bytes: int
    nodes: tuple[str, ...]
    volume_id: str
    driver: str
    message: str


VOLUMES = (
    output.Column("pv", lambda row: row.pv or row.volume_id),
    output.Column("pod", "pods"),
    output.Column("state", styles=views.STATES),
    output.Column("size", lambda row: views.size(row.size_bytes)),
    output.Column("nodes"),
    output.Column("driver", wide=True),
    output.Column("volume", "volume_id", wide=True),
    output.Column("message"),
)


def pools(driver: str = "") -> show.Question:
    """Every pool, or that of `driver`; healthy if none is low and no volume has a problem. Raises `NoPool`."""

    async def ask(proxy: Stub, _: str) -> show.Shown:
        known, volumes = await _pools(proxy, driver)
        if not known:
            raise errors.NotFound.named(
                "NoPool",
                "there is no pool to show",
                why=f"no driver {driver or 'of this node'} that answers has a pool of crust",
                hint="`crust drivers` shows them",
            )
        return shown(known, volumes)

    return ask


async def delete(run_dir: str, name: str, *, is_confirmed: bool) -> None:
    """Delete a volume, by its id or its PersistentVolume, after asking.

    Raises `VolumeNotInPool`, `VolumeAmbiguous`, `VolumeNotUnused`, and what its driver refuses.
    """
    async with asking.inspecting(run_dir) as proxy:
        known, volumes = await _pools(proxy)
    sockets = {each.name: each.socket for each in known}
    found = [volume for volume in volumes if name in (volume.volume_id, volume.pv)]
    if not found:
        raise errors.NotFound.named(
            "VolumeNotInPool",
            f"{name} is not in a pool of this node",
            why="no driver that answers lists a volume of that id or name",
            hint="`crust pool -o wide` lists them",
        )
    if len(found) > 1:
        raise errors.InvalidRequest.named(
            "VolumeAmbiguous",
            f"{name} is not deleted",
            why=f"{len(found)} volumes have this name: {', '.join(each.volume_id for each in found)}",
            hint="give the id of the volume",
        )
    (volume,) = found
    if volume.state != "unused":
        raise errors.NotReady.named(
            "VolumeNotUnused",
            f"{name} is not deleted",
            why=f"it is {volume.state}, for {_users(volume)}",
            hint="delete the pod; where a kubelet forgot it, `crust gc`",
        )
    if not is_confirmed:
        size = views.size(volume.size_bytes)
        click.confirm(
            f"Volume {volume.volume_id} of {volume.driver} ({size}) is deleted with its data."
            f" If Kubernetes has a PersistentVolume {volume.pv}, delete that instead. Delete the volume?",
            abort=True,
        )
    async with asking.connected(f"the driver {volume.driver}", sockets[volume.driver]) as port:
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
        controller = stub(csi_pb2_grpc.ControllerStub, port)
        await controller.DeleteVolume(request, timeout=TIMEOUT_S, metadata=asking.WITH_ERROR_INFO)
    click.echo(f"deleted {volume.volume_id}")


def _users(volume: PoolVolume) -> str:
    pods = [f"pod {pod}" for pod in volume.pods]
    nodes = [f"node {node}" for node in volume.nodes]
    return ", ".join((*pods, *nodes)) or "a reason that its message says"


async def _pools(proxy: Stub, driver: str = "") -> tuple[list[views.Driver], list[PoolVolume]]:
    """The drivers that have a pool, or the one that is named, and the volumes of their pools."""
    served = await show.drivers_of(proxy)
    known = [each for each in served if each.pool and driver in ("", each.name)]
    deferred = await show.volumes_of(proxy)
    listed = await asyncio.gather(*(_volumes(each, deferred) for each in known))
    return known, [volume for volumes in listed for volume in volumes]


async def _volumes(driver: views.Driver, deferred: Iterable[views.Volume]) -> list[PoolVolume]:
    here = {each.volume_id: each for each in deferred if each.driver == driver.name}
    async with asking.connected(f"the driver {driver.name}", driver.socket) as port:
        pool = stub(pool_pb2_grpc.PoolStub, port)
        request = pool_pb2.ListPoolVolumesRequest()
        listed = pool.ListPoolVolumes(request, timeout=TIMEOUT_S, metadata=asking.WITH_ERROR_INFO)
        return [_row(driver.name, each, here.get(each.volume_id)) async for each in listed]


def _row(driver: str, listed: pool_pb2.PoolVolume, entry: views.Volume | None) -> PoolVolume:
    known = {entry.target_path: entry.pod} if entry is not None else {}
    pods = [known.get(target) or views.pod_of(target) for target in listed.targets]
    return PoolVolume(
        pv=listed.name,
        pods=tuple(dict.fromkeys(filter(None, pods))),
        state=_state(listed, entry),
        size_bytes=listed.capacity_bytes,
        nodes=tuple(listed.nodes),
        volume_id=listed.volume_id,
        driver=driver,
        message=listed.problem or (entry.message if entry else ""),
    )


def _state(listed: pool_pb2.PoolVolume, entry: views.Volume | None) -> str:
    if entry is not None:
        return entry.state
    if listed.targets:
        return "on-host"
    if listed.nodes:
        return "attached"
    return "unused"


def shown(known: Sequence[views.Driver], volumes: list[PoolVolume]) -> show.Shown:
    """The pools and their volumes, in every format."""

    def table(wide: bool) -> Text:  # noqa: FBT001 - one flag, and its caller is `Shown`
        space = output.table(views.POOLS, known, wide=wide)
        return Text("\n\n").join((space, output.table(VOLUMES, volumes, wide=wide)))

    is_healthy = not any(each.pool and each.pool.is_low for each in known)
    return show.Shown(
        {
            "pools": [{"driver": each.name, "space": each.pool} for each in known],
            "volumes": volumes,
        },
        tuple(volume.volume_id for volume in volumes),
        table,
        healthy=is_healthy and not any(volume.message for volume in volumes),
    )
