"""The story: a volume's life on a node, each step asserting what it claims."""

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

# Writes and syncs without an end until it is told to stop; a single failed write fails it.
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
class Facts:
    """What one step learns and a later one needs."""

    volume: csi_pb2.Volume
    target: Path
    checksum: str = ""
    boot_id: str = ""
    accelerator: str = ""


class Scenario:
    """Plays the kubelet through the volume's life."""

    def __init__(self, node: Node, report: Report) -> None:
        at = node.paths
        self._node = node
        self._report = report
        self._kubelet = Kubelet(at.kubelet, at.csi_socket, at.inspect_socket)
        self._runtime = Client(str(at.kata_run / "control.sock"))
        self._made: csi_pb2.Volume | None = None

    async def close(self) -> None:
        """Close the channels."""
        await self._kubelet.close()

    async def give_up(self) -> None:
        """Take back what a story that ended early has made, newest first; nothing after one that was told whole.

        A step that fails is passed over: what it leaves is found, and reported, by the look at what is left.
        """
        if (volume := self._made) is None:
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

    async def tell(self) -> None:
        """The whole story."""
        await self._start()
        facts = await self._create()
        await self._stage(facts)
        await self._publish_deferred(facts)
        await self._boot_and_write(facts)
        await self._compare_stats(facts)
        await self._expand_under_load(facts)
        await self._refuse_unpublish(facts)
        await self._stop_sandbox()
        await self._unpublish(facts)
        await self._publish_on_host(facts)
        await self._delete(facts)

    async def _start(self) -> None:
        with self._report.step("start driver, shim, proxy and runtime") as step:
            await self._node.start_all()
            await self._kubelet.wait_ready(HANDLER)
            step.found("four processes; the runtime is registered with the proxy")

    async def _create(self) -> Facts:
        with self._report.step("create the volume") as step:
            volume = self._made = await self._kubelet.create("demo", SIZE_BYTES)
            require("the volume has its size", volume.capacity_bytes >= SIZE_BYTES)
            step.found(f"{volume.volume_id}, {volume.capacity_bytes // MIB} MiB")
        return Facts(volume, self._kubelet.target(PODS[0]))

    async def _stage(self, facts: Facts) -> None:
        with self._report.step("stage it") as step:
            await self._kubelet.stage(facts.volume)
            here = mountinfo.at(str(self._kubelet.staging(facts.volume)))
            require("staging mounts nothing on the host", here is None)
            step.found("a loop device with an ext4 filesystem, mounted nowhere")

    async def _publish_deferred(self, facts: Facts) -> None:
        with self._report.step("publish it, deferred") as step:
            await self._kubelet.publish(facts.volume, facts.target, defer=True)
            seal = mountinfo.at(str(facts.target))
            require("the target is sealed", seal is not None and mount_api.is_guard(seal))
            require("the target is empty", not list(facts.target.iterdir()))
            require("the volume's filesystem is mounted nowhere", not _mounted("ext4", facts))
            step.found("the target is sealed, nothing is mounted, and the record is there")
            step.show(json.dumps(json.loads(self._record()), indent=2))

    def _record(self) -> str:
        entries = [path for path in self._node.paths.volumes.iterdir() if path.name[0] != "."]
        require("there is one entry", len(entries) == 1)
        return (entries[0] / layout.RECORD).read_text().strip()

    async def _boot_and_write(self, facts: Facts) -> None:
        with self._report.step("boot a microVM, mount the volume in it, write and sum up") as step:
            facts.checksum = (await self._guest(facts, _WORKLOAD)).strip()
            require("a checksum came", re.fullmatch("[0-9a-f]{64}", facts.checksum))
            facts.boot_id = await self._guest(facts, "cat /proc/sys/kernel/random/boot_id")
            require("the volume's filesystem is mounted nowhere", not _mounted("ext4", facts))
            sandbox = (await self._runtime.list())[0]
            facts.accelerator = sandbox["accelerator"]
            step.found(f"{facts.accelerator}; sha256 {facts.checksum[:16]}…")

    async def _compare_stats(self, facts: Facts) -> None:
        with self._report.step("compare CSI's statistics with what the guest sees") as step:
            told = await self._kubelet.stats(facts.volume, facts.target)
            seen = (await self._guest(facts, "stat -f -c '%b %f %a %S %c %d' /data")).split()
            blocks, free, available, size, inodes, inodes_free = map(int, seen)
            numbers = told[BYTES].total, told[BYTES].used, told[BYTES].available
            guest = blocks * size, (blocks - free) * size, available * size
            require(f"bytes agree: {numbers} and {guest}", numbers == guest)
            counts = told[INODES].total, told[INODES].used
            require("inodes agree", counts == (inodes, inodes - inodes_free))
            step.found(
                f"{numbers[1] // MIB} of {numbers[0] // MIB} MiB used, {counts[1]} inodes, alike"
            )

    async def _expand_under_load(self, facts: Facts) -> None:
        writer = asyncio.create_task(self._guest(facts, _WRITER), name="writer")
        try:
            await self._guest(facts, "while [ ! -e /data/rounds ]; do usleep 20000; done")
            await self._expand(facts)
            await self._kill_proxy(facts)
        finally:
            await self._guest(facts, "touch /data/stop")
        with self._report.step("the workload went on throughout") as step:
            rounds = int(await writer)
            require("it wrote", rounds > 0)
            boot_id = await self._guest(facts, "cat /proc/sys/kernel/random/boot_id")
            require("the guest never noticed", boot_id == facts.boot_id)
            step.found(f"{rounds} synced rounds, no failed write, the same boot")

    async def _expand(self, facts: Facts) -> None:
        with self._report.step("expand it online, while the guest writes") as step:
            before = await self._kubelet.stats(facts.volume, facts.target)
            size_bytes = await self._kubelet.expand(facts.volume, facts.target, GROWN_BYTES)
            after = await self._kubelet.stats(facts.volume, facts.target)
            require("the device has grown", size_bytes == GROWN_BYTES)
            grown_by = after[BYTES].total - before[BYTES].total
            require("the filesystem has grown", grown_by > (GROWN_BYTES - SIZE_BYTES) * 0.9)
            was, now = before[BYTES].total // MIB, after[BYTES].total // MIB
            step.found(f"filesystem {was} MiB → {now} MiB")

    async def _kill_proxy(self, facts: Facts) -> None:
        with self._report.step("kill the proxy with -9, start it again") as step:
            await self._node.kill("proxy")
            started = time.monotonic()
            await self._node.start("proxy")
            stats = await self._kubelet.stats(facts.volume, facts.target)
            require("statistics work again", stats[BYTES].total > SIZE_BYTES)
            step.found(f"statistics from the guest again after {time.monotonic() - started:.2f} s")

    async def _refuse_unpublish(self, facts: Facts) -> None:
        with self._report.step("unpublish while the VM runs: refused") as step:
            code, message = await self._kubelet.refusal_of_unpublish(facts.volume, facts.target)
            require("it is refused", code == "FAILED_PRECONDITION")
            require("it names the sandbox", SANDBOX in message)
            step.found(f"{code}: {message}")

    async def _stop_sandbox(self) -> None:
        with self._report.step("stop the VM") as step:
            await self._runtime.stop(SANDBOX)
            require("no sandbox is left", not await self._runtime.list())
            step.found("unmounted in the guest, unplugged, powered off")

    async def _unpublish(self, facts: Facts) -> None:
        with self._report.step("unpublish and unstage it") as step:
            await self._kubelet.unpublish(facts.volume, facts.target)
            require("the target is gone", not facts.target.exists())
            require("the entry is gone", not list(self._node.paths.volumes.iterdir()))
            await self._kubelet.unstage(facts.volume)
            step.found("no entry, no target, no loop device")

    async def _publish_on_host(self, facts: Facts) -> None:
        with self._report.step("publish the same volume on the host, not deferred") as step:
            target = self._kubelet.target(PODS[1])
            await self._kubelet.stage(facts.volume)
            await self._kubelet.publish(facts.volume, target, defer=False)
            checksum = await _sha256(target / "payload")
            await self._kubelet.unpublish(facts.volume, target)
            await self._kubelet.unstage(facts.volume)
            require("the checksum is equal", checksum == facts.checksum)
            step.found(f"sha256 {checksum[:16]}…, equal")

    async def _delete(self, facts: Facts) -> None:
        with self._report.step("delete it") as step:
            await self._kubelet.delete(facts.volume)
            self._made = None
            step.found("gone")

    async def _guest(self, facts: Facts, script: str) -> str:
        """Run a script in the sandbox, the volume at /data, as one more container; returns its output."""
        request = messages.Run(
            sandbox=SANDBOX,
            argv=("/bin/sh", "-c", script),
            mounts=(messages.Mount(source=str(facts.target), destination="/data"),),
            keep=True,
        )
        ended = await self._runtime.run(request)
        require(f"the command succeeds: {ended.stderr.decode()}", ended.code == 0)
        return ended.stdout.decode().strip()


def _mounted(fs_type: str, facts: Facts) -> bool:
    """Whether any mount of the host is below the demo's directory and of that type."""
    root = str(facts.target.parents[5])
    return any(
        each.fs_type == fs_type and each.target.startswith(root) for each in mountinfo.read_all()
    )


async def _sha256(path: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        "sha256sum", str(path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().split()[0]
