"""The scenario: volumes on three nodes, one of which is cut off and comes back; each step checks its result.

a local volume on each node, provisioned by the node itself; the life of one, by the calls that the sidecars make
an image in Ceph, written in a guest on node a; a is cut off, fenced; the image in a guest on node b
the local volume of node a: not served while a is away, and there when a is back
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from crust.wire.csi.v1 import csi_pb2
from examples.cluster.board import Board
from examples.cluster.machine import Machine
from examples.cluster.network import Network
from examples.cluster.provisioning import ApiServer, Claim, Provisioner
from examples.cluster.services import Services
from examples.kata.demo.kubelet import Kubelet
from examples.kata.demo.report import CheckFailed, Report, require
from examples.kata.runtime import messages

MIB = 1 << 20
GIB = 1 << 30
PIB = 1 << 50
SIZE_BYTES = 64 * MIB
GROWN_BYTES = 96 * MIB
TOPOLOGY = "crust.dev/node"

_WRITE = "dd if=/dev/urandom of=/data/payload bs=1M count=16 2>/dev/null && sync && sha256sum /data/payload"
_READ = "sha256sum /data/payload"
# Writes over and over until a write fails: the fence causes that.
_KEEP_WRITING = """
n=0
while dd if=/dev/zero of=/data/after bs=4k count=1 conv=fsync 2>/dev/null; do n=$((n + 1)); done
echo $n
"""


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume, and where its data is: a node's name, or "ceph"."""

    name: str
    where: str
    kubelet: Kubelet
    volume: csi_pb2.Volume


@dataclass(frozen=True, slots=True)
class Used:
    """A volume that is published on a node for a pod."""

    machine: Machine
    kubelet: Kubelet
    volume: Volume
    pod: str

    @property
    def target(self) -> Path:
        """The pod's target path."""
        return self.kubelet.target(self.pod)

    async def begin(self) -> None:
        """Attach if the driver does, stage, publish with a deferred mount."""
        await self.kubelet.stage(self.volume.volume)
        await self.kubelet.publish(self.volume.volume, self.target, defer=True)

    async def stop(self) -> None:
        """Stop the pod's virtual machine."""
        await self.machine.runtime.stop(self.pod)

    async def unpublish(self) -> None:
        """Unpublish it for the pod."""
        await self.kubelet.unpublish(self.volume.volume, self.target)

    async def unstage(self) -> None:
        """Unstage it, and detach it if the driver attaches."""
        await self.kubelet.unstage(self.volume.volume)

    async def run(self, script: str) -> str:
        """Run a script in the pod's virtual machine, the volume at /data; returns its output."""
        request = messages.Run(
            sandbox=self.pod,
            argv=("/bin/sh", "-c", script),
            mounts=(messages.Mount(source=str(self.target), destination="/data"),),
            keep=True,
        )
        ended = await self.machine.runtime.run(request)
        require(f"the command succeeds: {ended.stderr.decode()}", ended.code == 0)
        return ended.stdout.decode().split()[0]


class Scenario:
    """Acts as the kubelets and the sidecars of three nodes."""

    title = "three nodes, each with a local pool, and Ceph"

    def __init__(
        self,
        network: Network,
        services: Services,
        machines: tuple[Machine, ...],
        report: Report,
        board: Board,
    ) -> None:
        self._board = board
        self._in_use: list[Used] = []
        self._volumes: dict[str, Volume] = {}
        self._network = network
        self._services = services
        self._machines = machines
        self._report = report
        self._api = ApiServer()
        self._provisioners = [
            Provisioner(machine.name, machine.local, self._api) for machine in machines
        ]

    async def run(self) -> None:
        """Run all steps."""
        await self._start()
        local = await self._create_local()
        await self._live(local[1])
        checksum, on_a = await self._write_image()
        on_local = await self._write_local(local[0])
        await self._fence_and_move(on_a, checksum)
        await self._return(*on_local)
        await self._delete()

    async def clean_up(self) -> None:
        """Undo the steps of a scenario that ended early; a step that fails is skipped: orphans are reported."""
        for used in reversed(self._in_use):
            await self._network.join(used.machine.host)
            for step in (used.stop, used.unpublish, used.unstage):
                with contextlib.suppress(Exception):
                    await step()
        for volume in self._volumes.values():
            with contextlib.suppress(Exception):
                await volume.kubelet.delete(volume.volume)

    async def _start(self) -> None:
        with self._report.step(
            "start the controller of Ceph volumes, and three nodes with two drivers"
        ) as step:
            await self._services.start()
            for machine in self._machines:
                self._board.node(machine.name, "starting")
                await machine.start()
            for machine in self._machines:
                await machine.wait_ready()
                self._board.node(machine.name, "ready")
            step.found("each node's drivers answer through its proxy; its runtime is registered")

    async def _create_local(self) -> list[Volume]:
        with self._report.step("each node publishes the capacity of its pool") as step:
            capacities = [
                await provisioner.publish_capacity() for provisioner in self._provisioners
            ]
            topologies = [dict(capacity.topology) for capacity in capacities]
            expected = [{TOPOLOGY: machine.name} for machine in self._machines]
            require("each node names its own segment", topologies == expected)
            require(
                "each node has capacity", all(capacity.capacity_bytes for capacity in capacities)
            )
            step.found(
                f"{capacities[0].capacity_bytes // GIB} GiB on each, as CSIStorageCapacity objects"
            )
        with self._report.step("a claim that no node can hold stays pending") as step:
            require("no node is selected", not self._api.schedule(Claim("huge", PIB)))
            step.found("the scheduler compares it with the published capacities")
        with self._report.step(
            "a claim for each node: the node that is selected provisions"
        ) as step:
            made = [await self._provision(machine) for machine in self._machines]
            pools = {volume.volume.volume_id.partition("-")[0] for volume in made}
            require("each node has a pool of its own", len(pools) == len(made))
            step.found("three drivers, three pools; the pool's id begins each volume's id")
        return made

    async def _provision(self, machine: Machine) -> Volume:
        """A claim whose pod runs on the machine; every node's provisioner sees it."""
        claim = Claim(f"on-{machine.name}", SIZE_BYTES)
        require(f"{machine.name} is selected", self._api.schedule(claim, machine.name))
        for provisioner in self._provisioners:
            await provisioner.sync(claim)
        assert claim.volume is not None
        places = [dict(topology.segments) for topology in claim.volume.accessible_topology]
        require("the volume is where its pod runs", places == [{TOPOLOGY: machine.name}])
        return self._known(claim.name, machine.name, machine.local, claim.volume)

    async def _live(self, volume: Volume) -> None:
        with self._report.step("a local volume's life on b: write, snapshot, expand") as step:
            machine = self._machines[1]
            used = await self._begin(machine, machine.local, volume, "life")
            await used.run(_WRITE)
            snapshot = await machine.local.snapshot(volume.volume, "life")
            size = await machine.local.expand(volume.volume, used.target, GROWN_BYTES)
            require("the volume has grown", size == GROWN_BYTES)
            await machine.local.delete_snapshot(snapshot)
            await self._end(used)
            step.found(f"by node b alone; {size // MIB} MiB, grown in the guest")

    async def _write_image(self) -> tuple[str, Used]:
        with self._report.step("an image in Ceph, formatted and written in a guest on a") as step:
            machine = self._machines[0]
            volume = self._known(
                "shared", "ceph", machine.rbd, await machine.rbd.create("shared", SIZE_BYTES)
            )
            used = await self._begin(machine, machine.rbd, volume, "writer")
            checksum = await used.run(_WRITE)
            step.found(f"opened by QEMU itself, no device on the host; sha256 {checksum[:16]}…")
        return checksum, used

    async def _write_local(self, volume: Volume) -> tuple[Used, str]:
        with self._report.step("a local volume, written in a guest on a") as step:
            machine = self._machines[0]
            used = await self._begin(machine, machine.local, volume, "local")
            checksum = await used.run(_WRITE)
            step.found(f"sha256 {checksum[:16]}…")
        return used, checksum

    async def _fence_and_move(self, on_a: Used, checksum: str) -> None:
        a, b, _ = self._machines
        with self._report.step("stage the image on b while a guest on a has it: refused") as step:
            refused = await _refusal(b.rbd.stage(on_a.volume.volume))
            why = str(refused.details())
            require(f"the refusal names the holder: {why}", "on node a has it" in why)
            step.found(why.partition(";")[0])
        with self._report.step("cut node a off, and declare it gone: its guest is fenced") as step:
            writing = asyncio.create_task(on_a.run(_KEEP_WRITING), name="writer on a")
            await self._network.cut(a.host)
            self._board.node("a", "cut off")
            await self._services.fence("a")
            step.found("its client is in Ceph's blocklist; the claim on the image is free")
        with self._report.step("the image in a guest on b") as step:
            on_b = await self._begin(b, b.rbd, on_a.volume, "reader")
            seen = await on_b.run(_READ)
            require("the checksum is equal", seen == checksum)
            step.found(f"sha256 {seen[:16]}…, equal")
        with self._report.step("node a comes back: its guest's writes fail") as step:
            await self._network.join(a.host)
            self._board.node("a", "ready")
            rounds = int(await writing)
            require("the checksum is equal still", await on_b.run(_READ) == checksum)
            step.found(f"{rounds} rounds were written before the cut, and the next one failed")
            await self._end(on_b)
            await self._end(on_a)

    async def _return(self, used: Used, checksum: str) -> None:
        a = self._machines[0]
        with self._report.step("kill the driver of node a: its local volume waits for it") as step:
            await a.programs.kill("local-driver")
            self._board.node("a", "driver killed")
            refused = await _refusal(a.local.snapshot(used.volume.volume, "away"))
            code = refused.code().name
            require(f"the caller retries: {code}", code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"))
            step.found(f"{code}: {refused.details()}")
        with self._report.step("the driver of node a is back, with all that it had") as step:
            await a.programs.start("local-driver")
            await a.wait_ready()
            self._board.node("a", "ready")
            require("the checksum is equal", await used.run(_READ) == checksum)
            # The sidecar repeats its requests, and finds them under way or done.
            await a.local.delete_snapshot(await a.local.snapshot(used.volume.volume, "away"))
            await self._end(used)
            step.found(f"sha256 {checksum[:16]}…, equal; the guest never noticed")

    async def _delete(self) -> None:
        with self._report.step("delete all volumes") as step:
            for name, volume in list(self._volumes.items()):
                await volume.kubelet.delete(volume.volume)
                del self._volumes[name]
                self._board.deleted(name)
            step.found("no volume is left in any pool")

    def _known(self, name: str, where: str, kubelet: Kubelet, made: csi_pb2.Volume) -> Volume:
        """A volume that was created, and is deleted at the end."""
        self._volumes[name] = volume = Volume(name, where, kubelet, made)
        self._board.volume(name, where, "created")
        return volume

    async def _begin(self, machine: Machine, kubelet: Kubelet, volume: Volume, pod: str) -> Used:
        used = Used(machine, kubelet, volume, pod)
        self._in_use.append(used)
        await used.begin()
        self._board.volume(volume.name, volume.where, f"published on {machine.name}")
        return used

    async def _end(self, used: Used) -> None:
        for step in (used.stop, used.unpublish, used.unstage):
            await step()
        self._in_use.remove(used)
        self._board.volume(used.volume.name, used.volume.where, "created")


async def _refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """The error of a call that is expected to fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise CheckFailed("the call is refused")
