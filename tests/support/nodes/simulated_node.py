"""A node whose processes come and go: driver, shim, proxy, runtime handler; and a simulated kubelet that calls it.

Proxy and shim are processes of their own, ended by SIGKILL. The driver keeps its state and loses its server. Each
answer is compared with what exists at that moment, on the disk and in the driver; each turn with "one writer".
"""

import asyncio
import os
from collections import Counter
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import grpc
import grpc.aio

from crust.core import errors
from crust.handoff import store
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import FakeDriver, Gate
from tests.support.kubelet.csi import Answer
from tests.support.kubelet.disk import Disk
from tests.support.kubelet.kubelet import Kubelet
from tests.support.kubelet.state import Pod
from tests.support.nodes import proxy_process
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.fake_targets import GUARD, MOUNTED, MarkedMounts
from tests.support.nodes.places import Places
from tests.support.nodes.proxy_process import Killable
from tests.support.runtimes import fake_handler

SETTLES_WITHIN_S = 20
TIMEOUT_S = 10.0
TIMEOUT_WHILE_HUNG_S = 0.15
"""A kubelet waits two minutes: as many times longer as its clock is slower than a simulated one."""


class Sandboxes:
    """The container runtime beside the kubelet (`kubelet.Runtime`). `live`: by pod; a test stops them.

    A sandbox claims by the handoff directory as the SDK does (`fake_handler.sandbox`), and outlives its containers.
    """

    def __init__(self, volumes_root: str) -> None:
        self._root = volumes_root
        self.live: dict[str, ExitStack] = {}
        self.pods: dict[str, Pod] = {}
        self.disk: Disk

    async def start(self, pod: Pod) -> bool:
        """Claim every volume, or none."""
        with ExitStack() as stack:
            for volume in pod.volumes:
                target = self.disk.target(pod.uid, volume.name)
                try:
                    stack.enter_context(fake_handler.sandbox(self._root, target, name=pod.uid))
                except errors.CrustError:
                    return False
            self.live[pod.uid] = stack.pop_all()
        self.pods[pod.uid] = pod
        return True

    async def stop_containers(self, pod: Pod) -> None:
        """The containers end; the sandbox keeps its volumes."""

    def stop(self, pod_uid: str) -> None:
        self.live.pop(pod_uid).close()


class SimulatedNode(FakeNode):
    """One node. Start and stop its parts in any order."""

    def __init__(self, places: Places) -> None:
        driver = FakeDriver(mounts=MarkedMounts(), sizes_file=places.sizes)
        super().__init__(places, driver=driver, grace_s=0.05)
        self.faults: list[str] = []
        """What must not be: it was found by a comparison."""
        self.published = 0
        """How many publishes were answered OK."""
        self.sandboxes = Sandboxes(places.volumes)
        self._handler = fake_handler.FakeHandler()
        self.kubelet = Kubelet(
            root=places.kubelet,
            driver=DRIVER,
            socket=places.csi,
            is_mount_point=_is_mount_point,
            runtime=self.sandboxes,
            on_answer=self._check_answer,
            timeout_s=TIMEOUT_S,
        )
        self.sandboxes.disk = self.kubelet.disk
        os.mkdir(places.run, 0o700)

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        if name == "proxy":
            return self.proxy()
        if name == "shim":
            return proxy_process.running_shim(self.places)
        if name == "handler":
            return self.handler(self._handler, waits=False)
        return super().part(name)

    def proxy(self, **fault: int) -> AbstractAsyncContextManager[Killable]:
        """A proxy that may have a fault of `proxy_process.running`."""
        return proxy_process.running(self.places, grace_s=self.grace_s, **fault)

    def is_up(self, name: str) -> bool:
        """Whether a part runs. A proxy may have died by itself."""
        return super().is_up(name) and (name != "proxy" or self.value("proxy").is_alive)

    def downgrade_driver(self, *, to_old: bool) -> None:
        """Make it a driver that does not know deferral and mounts on the host, or a new one again."""
        self.driver.defers, self.driver.mounts_instead = not to_old, to_old

    def lose_answer(self, method: str) -> None:
        """The driver's next answer to the method is lost, after its work."""
        lost = fake_driver.Failure(grpc.StatusCode.UNAVAILABLE, "lost")
        self.driver.failures_after[method] = lost

    def hang(self, part: str) -> None:
        """Let the driver, the shim or the handler accept calls and not answer them, until `unhang`."""
        self.kubelet.csi.timeout_s = TIMEOUT_WHILE_HUNG_S
        if part == "driver":
            self.driver.hangs = asyncio.Event()
        elif part == "handler":
            self._handler.gate = Gate()
        elif shim := self.value("shim"):
            shim.suspend()

    def unhang(self) -> None:
        """Everybody answers again, those calls too that wait."""
        self.kubelet.csi.timeout_s = TIMEOUT_S
        if self.driver.hangs is not None:
            self.driver.hangs.set()
            self.driver.hangs = None
        if self._handler.gate is not None:
            self._handler.gate.opened.set()
            self._handler.gate = None
        if shim := self.value("shim"):
            shim.resume()

    async def stop_all(self) -> None:
        """End every part, and every sandbox."""
        self.unhang()
        for pod in list(self.sandboxes.live):
            self.sandboxes.stop(pod)
        await self.stop()

    async def answers(self) -> None:
        """Return when a call passes the chain and the handler is registered, or the proxy has died; in real time."""
        async with asyncio.timeout(SETTLES_WITHIN_S), channel.connect(self.places.csi) as to_proxy:
            stub = csi_pb2_grpc.NodeStub(to_proxy)
            # other processes start: there is no event to wait for
            while self.is_up("proxy") and not await self._answers(stub):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _answers(self, stub: "csi_pb2_grpc.NodeAsyncStub") -> bool:
        try:
            await stub.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=2, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            return False
        session = self.value("handler")
        return session is not None and session.registered.is_set()

    def check_writers(self) -> None:
        """One writer per volume: sandboxes that hold a claim, and entries."""
        for kind, held in (("sandboxes", self._claims()), ("entries", self._entries())):
            for handle, number in held.items():
                if number > 1:
                    self.faults.append(f"{number} {kind} of {handle}")

    def check_clean(self) -> None:
        """Nothing of any volume is left on the node."""
        self.faults.extend(f"entry {name}" for name in self.places.entries())
        self.faults.extend(f"published {target}" for target in self.driver.published)
        targets = [volume.target for volume in self.kubelet.disk.find_all()]
        self.faults.extend(f"target {target}" for target in targets if os.path.lexists(target))
        for directory, _, files in os.walk(self.places.kubelet):
            self.faults.extend(f"{name} in {directory}" for name in {GUARD, MOUNTED} & set(files))

    def _check_answer(self, answer: Answer) -> None:
        code = answer.code
        self.published += answer.method == "NodePublishVolume" and code is grpc.StatusCode.OK
        if answer.method == "NodePublishVolume" and answer.is_final:
            left = self._residue(answer.path)
            if left:
                self.faults.append(f"final {code.name} with {left}: {answer.details}")
        if answer.method == "NodeExpandVolume" and code is grpc.StatusCode.FAILED_PRECONDITION:
            self.faults.append(f"expansion is given up: {answer.details}")
        is_unstaged = answer.method == "NodeUnstageVolume" and code is grpc.StatusCode.OK
        if is_unstaged and self._claims()[answer.handle]:
            self.faults.append(f"{answer.handle} is unstaged in use")

    def _residue(self, target: str) -> list[str]:
        """What exists of a publish at a target."""
        pieces = {
            "an entry": self.entry(target) is not None,
            "a guard": os.path.exists(f"{target}/{GUARD}"),
            "a host mount": os.path.exists(f"{target}/{MOUNTED}"),
            "the driver's publish": target in self.driver.published,
        }
        return [name for name, exists in pieces.items() if exists]

    def _entries(self) -> Counter[str]:
        scanned = store.Store(self.places.volumes).scan()
        return Counter(entry.require().key.volume_id for entry in scanned)

    def _claims(self) -> Counter[str]:
        pods = (self.sandboxes.pods[uid] for uid in self.sandboxes.live)
        return Counter(volume.handle for pod in pods for volume in pod.volumes)


def _is_mount_point(path: str) -> bool:
    return os.path.exists(f"{path}/{GUARD}") or os.path.exists(f"{path}/{MOUNTED}")
