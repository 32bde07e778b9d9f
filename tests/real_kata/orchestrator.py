"""orchestrator.py WHAT NAME HANDLER STATE: the CSI calls of a kubelet and the sidecars for one volume.

    up          create, attach, stage and publish it; a kubelet does the same after a reboot
    stats       the bytes of its filesystem: total, used
    grow        expand it to twice its size, by the controller and then by the node
    on-host     mount it on the host, expand it there and unmount it, as with crust.dev/defer: never
    unpublish, unstage, down (both, and delete it)

The name begins with the driver, `own` or `wrapped`, and a dash; then may follow
    xfs-   another filesystem than ext4: it grows on a host without CAP_SYS_RESOURCE, and has 300 MiB at least
    grows- its class lets the host grow the filesystem (crust.dev/grow-in)
    ro-    published read-only, after the host has written the file `x`
    long-  a target whose path is too long for Kata
"""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud
from examples.kata.demo.kubelet import Kubelet, capability

MIB = 1 << 20
SIZE_BYTES = {"ext4": 64 * MIB, "xfs": 320 * MIB}
BYTES = csi_pb2.VolumeUsage.BYTES


@dataclass(frozen=True)
class Driver:
    """How its volumes are asked for; `controller` is the socket that the sidecars call."""

    socket: str
    controller: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    attaches: bool = False


DRIVERS = {
    "own": Driver("/run/crust-csi.sock"),
    "wrapped": Driver(
        "/run/crust-vendor.sock",
        "/run/crust-vendor-controller.sock",
        {"type": "ssd"},
        {"token": cloud.TOKEN},
        attaches=True,
    ),
}


async def main(command: str, name: str, handler: str, state: str) -> None:
    """Make the calls; the volume is remembered in a file of `state`."""
    driver, *rest = name.split("-")
    of, fs_type = DRIVERS[driver], "xfs" if "xfs" in rest else "ext4"
    remembered = Path(state) / f"{name}.volume"
    root = Path("/var/lib/kubelet")
    kubelet = Kubelet(root, of.socket, "/run/crust/inspect.sock", of.controller)
    kubelet.secrets, kubelet.attaches = of.secrets, of.attaches
    wishes = {"crust.dev/defer": "always", "crust.dev/runtime-handler": handler}
    if "grows" in rest:
        wishes["crust.dev/grow-in"] = "host"
    kubelet.parameters = {**of.parameters, **wishes}
    try:
        if not remembered.exists():
            made = await kubelet.create(f"pvc-{name}", SIZE_BYTES[fs_type], capability(fs_type))
            remembered.write_bytes(made.SerializeToString())
        volume = csi_pb2.Volume.FromString(remembered.read_bytes())
        target = kubelet.target(name * 10 if "long" in rest else name)
        if command == "up" and "ro" in rest:
            await _fill(kubelet, volume, target, fs_type)
            await _publish(kubelet, volume, target, fs_type, readonly=True)
            print(target)  # noqa: T201
        else:
            await _call(command, kubelet, volume, target, fs_type)
    finally:
        await kubelet.close()


async def _call(
    command: str, kubelet: Kubelet, volume: csi_pb2.Volume, target: Path, fs_type: str
) -> None:
    grown_bytes = 2 * SIZE_BYTES[fs_type]
    if command == "up":
        await _publish(kubelet, volume, target, fs_type)
        print(target)  # noqa: T201
    elif command == "stats":
        usage = (await kubelet.stats(volume, target))[BYTES]
        print(usage.total, usage.used)  # noqa: T201
    elif command == "grow":
        await kubelet.expand(volume, target, grown_bytes)
    elif command == "on-host":
        volume.volume_context["crust.dev/defer"] = "never"
        await _publish(kubelet, volume, target, fs_type)
        await kubelet.expand(volume, target, grown_bytes)
        await kubelet.unpublish(volume, target)
        await kubelet.unstage(volume)
    if command in ("unpublish", "down"):
        await kubelet.unpublish(volume, target)
    if command in ("unstage", "down"):
        await kubelet.unstage(volume)
    if command == "down":
        await kubelet.delete(volume)


async def _fill(kubelet: Kubelet, volume: csi_pb2.Volume, target: Path, fs_type: str) -> None:
    deferred = dict(volume.volume_context)
    volume.volume_context["crust.dev/defer"] = "never"
    await _publish(kubelet, volume, target, fs_type)
    (target / "x").write_text("kept")
    await kubelet.unpublish(volume, target)
    await kubelet.unstage(volume)
    volume.volume_context.update(deferred)


async def _publish(
    kubelet: Kubelet, volume: csi_pb2.Volume, target: Path, fs_type: str, *, readonly: bool = False
) -> None:
    wanted = capability(fs_type)
    await kubelet.stage(volume, wanted)
    await kubelet.publish(volume, target, defer=False, capability=wanted, readonly=readonly)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:5]))
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{error.code().name} {error.details()}")
