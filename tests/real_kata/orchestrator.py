"""orchestrator.py up|replay|stats|grow|unpublish|down NAME HANDLER STATE [wrapped]: CSI calls, in a kubelet's order.

`wrapped` is a driver that knows nothing of crust and has no stage; without it, the calls are for crust's own driver.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB, Co


async def main(what: str, name: str, handler: str, state: str, driver: str = "own") -> None:
    """Make the calls; the volume's id is remembered in a file of `state`."""
    target = f"/var/lib/kubelet/pods/{name}/volumes/kubernetes.io~csi/pvc/mount"
    staging = f"/var/lib/kubelet/plugins/kubernetes.io/csi/{name}/globalmount"
    if driver == "wrapped":
        staging = ""
    remembered = Path(state) / f"{name}.id"
    options = [("grpc.default_authority", "localhost")]
    socket = {"own": "/run/crust-csi.sock", "wrapped": "/run/crust-wrapped.sock"}[driver]
    async with grpc.aio.insecure_channel(f"unix://{socket}", options=options) as channel:
        co = Co(channel)
        if what in ("up", "replay"):
            await _publish(co, name, handler, target, staging, remembered)
            print(target)  # noqa: T201
            return
        if what == "stats":
            answer = await co.stats(remembered.read_text(), target)
            print(answer.usage[0].total, answer.usage[0].used)  # noqa: T201
            return
        if what == "grow":
            wanted = csi_pb2.CapacityRange(required_bytes=128 * MIB)
            request = csi_pb2.ControllerExpandVolumeRequest(
                volume_id=remembered.read_text(), capacity_range=wanted
            )
            await co.controller.ControllerExpandVolume(request)
            await co.expand(remembered.read_text(), target, 128 * MIB)
            return
        await co.unpublish(remembered.read_text(), target)
        if what == "down":
            if staging:
                await co.unstage(remembered.read_text(), staging)
            await co.delete(remembered.read_text())


async def _publish(
    co: Co, name: str, handler: str, target: str, staging: str, remembered: Path
) -> None:
    """Create, stage and publish; the same name is the same volume, so a replay learns its context."""
    wishes = {"crust.dev/defer": "always", "crust.dev/runtime-handler": handler}
    volume = await co.create(f"pvc-{name}", parameters=wishes)
    remembered.write_text(volume.volume_id)
    context = dict(volume.volume_context)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if staging:
        Path(staging).mkdir(parents=True, exist_ok=True)
        await co.stage(volume.volume_id, staging, volume_context=context)
    else:  # what the shim beside the driver's controller writes
        context = {**context, **wishes, "crust.dev/created-empty": "true"}
    await co.publish(volume.volume_id, target, staging=staging, defer=False, volume_context=context)


try:
    asyncio.run(main(*sys.argv[1:]))
except grpc.aio.AioRpcError as error:
    sys.exit(f"{error.code().name} {error.details()}")
