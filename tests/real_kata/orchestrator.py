"""orchestrator.py up|replay|stats|grow|unpublish|down NAME HANDLER STATE: CSI calls, in a kubelet's order."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB, Co


async def main(what: str, name: str, handler: str, state: str) -> None:
    """Make the calls; the volume's id is remembered in a file of `state`."""
    target = f"/var/lib/kubelet/pods/{name}/volumes/kubernetes.io~csi/pvc/mount"
    staging = f"/var/lib/kubelet/plugins/kubernetes.io/csi/{name}/globalmount"
    remembered = Path(state) / f"{name}.id"
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel("unix:///run/crust-csi.sock", options=options) as channel:
        co = Co(channel)
        if what in ("up", "replay"):
            wishes = {"crust.dev/defer": "always", "crust.dev/runtime-handler": handler}
            # the same name is the same volume, so a replay learns its context
            volume = await co.create(f"pvc-{name}", parameters=wishes)
            remembered.write_text(volume.volume_id)
            context = dict(volume.volume_context)
            for directory in (Path(staging), Path(target).parent):
                directory.mkdir(parents=True, exist_ok=True)
            await co.stage(volume.volume_id, staging, volume_context=context)
            await co.publish(
                volume.volume_id, target, staging=staging, defer=False, volume_context=context
            )
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
            await co.unstage(remembered.read_text(), staging)
            await co.delete(remembered.read_text())


try:
    asyncio.run(main(*sys.argv[1:5]))
except grpc.aio.AioRpcError as error:
    sys.exit(f"{error.code().name} {error.details()}")
