"""The second scenario: a driver that knows nothing of crust, wrapped by two shims.

The driver is a strict one of another vendor's making (`VENDOR`): it refuses parameters that it does not know,
attaches before it stages, needs a secret, and mounts on the host each volume of a request. It is started as it
is. One of its StorageClasses says `crust.dev/defer: always`, the other one says nothing.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crust.core import deferral_keys
from crust.host.mounts import mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet
from examples.kata.demo.node import HANDLER, Node, Vendor
from examples.kata.demo.report import Report, require
from examples.kata.runtime import messages
from examples.kata.runtime.client import Client

VENDOR = Vendor("cloud.csi.example.org", "examples.drivers.cloud")
_SECRETS = {"token": "correct-token"}
_PLAIN = {"type": "ssd"}
_DEFERRED = {**_PLAIN, deferral_keys.DEFER: "always"}

MIB = 1 << 20
SIZE_BYTES = 64 * MIB
GROWN_BYTES = 192 * MIB
BYTES = csi_pb2.VolumeUsage.BYTES


@dataclass(slots=True)
class _Used:
    """A volume and the pod that has it."""

    volume: csi_pb2.Volume
    target: Path


class WrappedScenario:
    """Acts as the kubelet and the sidecars of a vendor's driver."""

    title = "the same with a vendor's driver that knows nothing of crust"

    def __init__(self, node: Node, report: Report) -> None:
        at = node.paths
        self._node = node
        self._report = report
        self._kubelet = Kubelet(at.kubelet, at.csi_socket, at.inspect_socket, at.controller_socket)
        self._kubelet.secrets = _SECRETS
        self._kubelet.attaches = True
        self._runtime = Client(str(at.kata_run / "control.sock"))
        self._in_use: list[_Used] = []

    async def close(self) -> None:
        """Close the channels."""
        await self._kubelet.close()

    async def clean_up(self) -> None:
        """Undo the steps of a scenario that ended early; does nothing after a complete one.

        A step that fails is skipped: the check for orphans reports the rest.
        """
        for used in list(self._in_use):
            steps = (
                *(partial(self._runtime.stop, name) for name in ("first", "second")),
                partial(self._kubelet.unpublish, used.volume, used.target),
                partial(self._kubelet.unstage, used.volume),
                partial(self._kubelet.delete, used.volume),
            )
            for step in steps:
                with contextlib.suppress(Exception):
                    await step()

    async def run(self) -> None:
        """Run all steps."""
        with self._report.step("start the vendor's driver, two shims, proxy and runtime") as step:
            await self._node.start_all()
            await self._node.wait_ready(self._kubelet.wait_ready(HANDLER))
            step.found(
                f"{VENDOR.name}, unmodified; one shim at its node part, one at its controller"
            )
        deferred = await self._create()
        await self._publish(deferred)
        await self._first_guest(deferred)
        await self._expand(deferred)
        await self._second_guest(deferred)
        await self._on_the_host()
        await self._delete(deferred)

    async def _create(self) -> _Used:
        with self._report.step("create a volume by a StorageClass with crust.dev/defer") as step:
            self._kubelet.parameters = _DEFERRED
            volume = await self._kubelet.create("deferred", SIZE_BYTES)
            used = _Used(volume, self._kubelet.target("pod-1"))
            self._in_use.append(used)
            created_empty = volume.volume_context.get(deferral_keys.CREATED_EMPTY)
            require("the volume is known to be empty", created_empty == "true")
            step.found("the driver saw type=ssd and no key of crust; the volume is empty")
        return used

    async def _publish(self, used: _Used) -> None:
        with self._report.step("attach, stage and publish it") as step:
            await self._kubelet.stage(used.volume)
            await self._kubelet.publish(used.volume, used.target, defer=False)
            require("the host has mounted no filesystem", not self._mounts())
            step.found("the driver was asked for a raw block volume; the host mounts no filesystem")

    async def _first_guest(self, used: _Used) -> None:
        with self._report.step("boot a microVM: the guest makes the filesystem") as step:
            script = "grep ' /data ' /proc/mounts | cut -d' ' -f3; echo kept > /data/file; sync"
            made = await self._guest("first", used, script)
            require("it is ext4", made == "ext4")
            require("the host has mounted no filesystem", not self._mounts())
            step.found("ext4, made and mounted in the guest")

    async def _expand(self, used: _Used) -> None:
        with self._report.step("expand it online: first the device, then the filesystem") as step:
            before = await self._kubelet.stats(used.volume, used.target)
            size_bytes = await self._kubelet.expand(used.volume, used.target, GROWN_BYTES)
            after = await self._kubelet.stats(used.volume, used.target)
            require("the device has grown", size_bytes == GROWN_BYTES)
            require("the filesystem has grown", after[BYTES].total > before[BYTES].total)
            was, now = before[BYTES].total // MIB, after[BYTES].total // MIB
            step.found(f"filesystem {was} MiB → {now} MiB, as the guest's kernel counts")

    async def _second_guest(self, used: _Used) -> None:
        with self._report.step("unpublish, detach; attach again for another microVM") as step:
            await self._runtime.stop("first")
            await self._kubelet.unpublish(used.volume, used.target)
            await self._kubelet.unstage(used.volume)
            used.target = self._kubelet.target("pod-2")
            await self._kubelet.stage(used.volume)
            await self._kubelet.publish(used.volume, used.target, defer=False)
            kept = await self._guest("second", used, "cat /data/file")
            require("the file is there", kept == "kept")
            await self._runtime.stop("second")
            step.found("the file of the first guest is there; it was not formatted again")

    async def _on_the_host(self) -> None:
        with self._report.step("a volume of the StorageClass that says nothing") as step:
            self._kubelet.parameters = _PLAIN
            volume = await self._kubelet.create("plain", SIZE_BYTES)
            used = _Used(volume, self._kubelet.target("pod-3"))
            self._in_use.append(used)
            await self._kubelet.stage(volume)
            await self._kubelet.publish(volume, used.target, defer=False)
            require("the host has mounted it", self._mounts())
            await self._remove(used)
            step.found("mounted on the host by the driver, as without crust")

    async def _delete(self, used: _Used) -> None:
        with self._report.step("unpublish and delete the first one") as step:
            await self._remove(used)
            step.found("both volumes are deleted")

    async def _remove(self, used: _Used) -> None:
        await self._kubelet.unpublish(used.volume, used.target)
        await self._kubelet.unstage(used.volume)
        await self._kubelet.delete(used.volume)
        self._in_use.remove(used)

    async def _guest(self, sandbox: str, used: _Used, script: str) -> str:
        mount = messages.Mount(source=str(used.target), destination="/data")
        ended = await self._runtime.run(
            messages.Run(
                sandbox=sandbox, argv=("/bin/sh", "-ec", script), mounts=(mount,), keep=True
            )
        )
        require(f"the command succeeds: {ended.stderr.decode()}", ended.code == 0)
        return ended.stdout.decode().strip()

    def _mounts(self) -> list[str]:
        """The host's mounts of the volumes' filesystems."""
        mounts = mountinfo.below(str(self._node.paths.kubelet))
        return [mount.target for mount in mounts if mount.fs_type == "ext4"]
