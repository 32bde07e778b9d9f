"""The scenario: the life of a volume on a node; each step checks its result."""

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crust.handoff import layout
from crust.host.mounts import mount_api, mountinfo
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.kubelet import Kubelet
from examples.kata.demo.node import HANDLER, Node
from examples.kata.demo.report import Report, require
from examples.kata.runtime import messages
from examples.kata.runtime.client import Client

MIB = 1 << 20
SIZE_BYTES = 128 * MIB
GROWN_BYTES = 256 * MIB
SANDBOX = "demo"
PODS = ("pod-1", "pod-2")
BYTES = csi_pb2.VolumeUsage.BYTES
INODES = csi_pb2.VolumeUsage.INODES

_WORKLOAD = """
set -e
dd if=/dev/urandom of=/data/payload bs=1M count=24 2>/dev/null
sync
sha256sum /data/payload | cut -d' ' -f1
"""

# Writes and syncs until /data/stop exists; a single failed write fails the script.
_WRITER = """
set -e
n=0
while [ ! -e /data/stop ]; do
    dd if=/dev/zero of=/data/steady bs=64k count=16 conv=fsync 2>/dev/null
    n=$((n + 1))
    echo $n > /data/rounds
done
cat /data/rounds
"""


@dataclass(slots=True)
class State:
    """Values that later steps need."""

    volume: csi_pb2.Volume
    target: Path
    checksum: str = ""
    boot_id: str = ""
    accelerator: str = ""


class Scenario:
    """Acts as the kubelet through the volume's life."""

    title = "a deferred volume of crust's own driver, from CreateVolume to DeleteVolume"

    def __init__(self, node: Node, report: Report) -> None:
        at = node.paths
        self._node = node
        self._report = report
        self._kubelet = Kubelet(at.kubelet, at.csi_socket, at.inspect_socket)
        self._runtime = Client(str(at.kata_run / "control.sock"))
        self._created: csi_pb2.Volume | None = None

    async def close(self) -> None:
        """Close the channels."""
        await self._kubelet.close()

    async def clean_up(self) -> None:
        """Undo the steps of a scenario that ended early, newest first; does nothing after a complete one.

        A step that fails is skipped: the check for orphans reports the rest.
        """
        if (volume := self._created) is None:
            return
        steps = (
            partial(self._runtime.stop, SANDBOX),
            *(partial(self._kubelet.unpublish, volume, self._kubelet.target(pod)) for pod in PODS),
            partial(self._kubelet.unstage, volume),
            partial(self._kubelet.delete, volume),
        )
        for step in steps:
            with contextlib.suppress(Exception):
                await step()

    async def run(self) -> None:
        """Run all steps."""
        await self._start()
        state = await self._create()
        await self._stage(state)
        await self._publish_deferred(state)
        await self._boot_and_write(state)
        await self._compare_stats(state)
        await self._expand_under_load(state)
        await self._refuse_unpublish(state)
        await self._stop_sandbox()
        await self._unpublish(state)
        await self._publish_on_host(state)
        await self._delete(state)

    async def _start(self) -> None:
        with self._report.step("start driver, shim, proxy and runtime") as step:
            await self._node.start_all()
            await self._node.wait_ready(self._kubelet.wait_ready(HANDLER))
            step.found("four processes; the runtime is registered with the proxy")

    async def _create(self) -> State:
        with self._report.step("create the volume") as step:
            volume = self._created = await self._kubelet.create("demo", SIZE_BYTES)
            require("the volume has its size", volume.capacity_bytes >= SIZE_BYTES)
            step.found(f"{volume.volume_id}, {volume.capacity_bytes // MIB} MiB")
        return State(volume, self._kubelet.target(PODS[0]))

    async def _stage(self, state: State) -> None:
        with self._report.step("stage it") as step:
            await self._kubelet.stage(state.volume)
            mounted = mountinfo.at(str(self._kubelet.staging(state.volume)))
            require("staging mounts nothing on the host", mounted is None)
            step.found("a loop device with an ext4 filesystem, not mounted")

    async def _publish_deferred(self, state: State) -> None:
        with self._report.step("publish it with a deferred mount") as step:
            await self._kubelet.publish(state.volume, state.target, defer=True)
            guard = mountinfo.at(str(state.target))
            require("the guard mount is there", guard is not None and mount_api.is_guard(guard))
            names = [path.name for path in state.target.iterdir()]
            require("the target holds the guard's filler alone", names == [mount_api.GUARD_FILLER])
            require("the host has not mounted the volume's filesystem", not _mounted("ext4", state))
            step.found(
                "the target has its guard mount, the host mounts no filesystem, the record exists"
            )
            step.show(json.dumps(json.loads(self._record()), indent=2))

    def _entries(self) -> list[Path]:
        return [path for path in self._node.paths.volumes.iterdir() if path.name[0] != "."]

    def _record(self) -> str:
        entries = self._entries()
        require("there is one entry", len(entries) == 1)
        return (entries[0] / layout.RECORD).read_text().strip()

    async def _boot_and_write(self, state: State) -> None:
        with self._report.step("boot a microVM, mount the volume in it, write a file") as step:
            state.checksum = (await self._guest(state, _WORKLOAD)).strip()
            require("the guest printed a checksum", re.fullmatch("[0-9a-f]{64}", state.checksum))
            state.boot_id = await self._guest(state, "cat /proc/sys/kernel/random/boot_id")
            require("the host has not mounted the volume's filesystem", not _mounted("ext4", state))
            sandbox = (await self._runtime.list())[0]
            state.accelerator = sandbox["accelerator"]
            step.found(f"{state.accelerator}; sha256 {state.checksum[:16]}…")

    async def _compare_stats(self, state: State) -> None:
        with self._report.step("compare NodeGetVolumeStats with statfs in the guest") as step:
            stats = await self._kubelet.stats(state.volume, state.target)
            seen = (await self._guest(state, "stat -f -c '%b %f %a %S %c %d' /data")).split()
            blocks, free, available, size, inodes, inodes_free = map(int, seen)
            numbers = stats[BYTES].total, stats[BYTES].used, stats[BYTES].available
            guest = blocks * size, (blocks - free) * size, available * size
            require(f"bytes agree: {numbers} and {guest}", numbers == guest)
            counts = stats[INODES].total, stats[INODES].used
            require("inodes agree", counts == (inodes, inodes - inodes_free))
            step.found(
                f"{numbers[1] // MIB} of {numbers[0] // MIB} MiB used, {counts[1]} inodes, equal"
            )

    async def _expand_under_load(self, state: State) -> None:
        writer = asyncio.create_task(self._guest(state, _WRITER), name="writer")
        try:
            await self._guest(state, "while [ ! -e /data/rounds ]; do usleep 20000; done")
            await self._expand(state)
            await self._kill_proxy(state)
        finally:
            await self._guest(state, "touch /data/stop")
        with self._report.step("check that the workload was not interrupted") as step:
            rounds = int(await writer)
            require("the workload wrote", rounds > 0)
            boot_id = await self._guest(state, "cat /proc/sys/kernel/random/boot_id")
            require("the guest has not rebooted", boot_id == state.boot_id)
            step.found(f"{rounds} synced rounds, no failed write, no reboot")

    async def _expand(self, state: State) -> None:
        with self._report.step("expand it online, while the guest writes") as step:
            before = await self._kubelet.stats(state.volume, state.target)
            size_bytes = await self._kubelet.expand(state.volume, state.target, GROWN_BYTES)
            after = await self._kubelet.stats(state.volume, state.target)
            require("the device has grown", size_bytes == GROWN_BYTES)
            grown_by = after[BYTES].total - before[BYTES].total
            require("the filesystem has grown", grown_by > (GROWN_BYTES - SIZE_BYTES) * 0.9)
            was, now = before[BYTES].total // MIB, after[BYTES].total // MIB
            step.found(f"filesystem {was} MiB → {now} MiB")

    async def _kill_proxy(self, state: State) -> None:
        with self._report.step("kill the proxy with SIGKILL, start it again") as step:
            await self._node.kill("proxy")
            started = time.monotonic()
            await self._node.start("proxy")
            stats = await self._kubelet.stats(state.volume, state.target)
            require("statistics work again", stats[BYTES].total > SIZE_BYTES)
            step.found(f"guest statistics available again after {time.monotonic() - started:.2f} s")

    async def _refuse_unpublish(self, state: State) -> None:
        with self._report.step("unpublish while the VM runs: refused") as step:
            code, message = await self._kubelet.refusal_of_unpublish(state.volume, state.target)
            require("unpublish is refused", code == "FAILED_PRECONDITION")
            require("the error names the sandbox", SANDBOX in message)
            step.found(f"{code}: {message}")

    async def _stop_sandbox(self) -> None:
        with self._report.step("stop the VM") as step:
            await self._runtime.stop(SANDBOX)
            require("no sandbox is left", not await self._runtime.list())
            step.found("unmounted in the guest, unplugged, powered off")

    async def _unpublish(self, state: State) -> None:
        with self._report.step("unpublish and unstage it") as step:
            await self._kubelet.unpublish(state.volume, state.target)
            require("the target is removed", not state.target.exists())
            require("the entry is removed", not self._entries())
            await self._kubelet.unstage(state.volume)
            step.found("no entry, no target, no loop device")

    async def _publish_on_host(self, state: State) -> None:
        with self._report.step("publish the same volume as a host mount") as step:
            target = self._kubelet.target(PODS[1])
            await self._kubelet.stage(state.volume)
            await self._kubelet.publish(state.volume, target, defer=False)
            checksum = await _sha256(target / "payload")
            await self._kubelet.unpublish(state.volume, target)
            await self._kubelet.unstage(state.volume)
            require("the checksum is equal", checksum == state.checksum)
            step.found(f"sha256 {checksum[:16]}…, equal")

    async def _delete(self, state: State) -> None:
        with self._report.step("delete it") as step:
            await self._kubelet.delete(state.volume)
            self._created = None
            step.found("the volume is deleted")

    async def _guest(self, state: State, script: str) -> str:
        """Run a script in the sandbox, the volume at /data, as one more container; returns its output."""
        request = messages.Run(
            sandbox=SANDBOX,
            argv=("/bin/sh", "-c", script),
            mounts=(messages.Mount(source=str(state.target), destination="/data"),),
            keep=True,
        )
        ended = await self._runtime.run(request)
        require(f"the command succeeds: {ended.stderr.decode()}", ended.code == 0)
        return ended.stdout.decode().strip()


def _mounted(fs_type: str, state: State) -> bool:
    """Whether any mount of the host is below the demo's directory and of that type."""
    root = str(state.target.parents[5])
    return any(
        mount.fs_type == fs_type and mount.target.startswith(root) for mount in mountinfo.read_all()
    )


async def _sha256(path: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        "sha256sum", str(path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().split()[0]
