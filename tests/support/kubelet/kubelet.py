"""The reconciler: every 100 ms of simulated time it brings the actual state nearer to the desired one.

One `turn` begins what may begin and waits for all of it, so a test decides what happens beside it. Unmounts come
first, then mounts and expansions, then devices. A pod's containers start when all its volumes are mounted; a deleted
pod's volumes are unpublished when its containers are gone, whether or not its sandbox still lives.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tests.support.kubelet.csi import Answer, CsiClient, OperationFailed
from tests.support.kubelet.disk import Disk, Found, NotRemoved
from tests.support.kubelet.operations import NoVolumeData, VolumeOperations
from tests.support.kubelet.pending import ANY_POD, Clock, PendingOperations
from tests.support.kubelet.state import Actual, ActualVolume, MountedPod, Pod, State, Volume

LOOP_S = 0.1
STATS_EVERY_S = 60.0
POD_SYNC_S = 10.0
REPUBLISH_EVERY_S = 5.0
"""A real one: with every pod sync, 30 to 90 s apart. Sooner here, so that it meets more."""

_FAILURES = (OperationFailed, NoVolumeData, NotRemoved)


class Runtime(Protocol):
    """The container runtime beside the kubelet."""

    async def start(self, pod: Pod) -> bool:
        """Start sandbox and containers; False if it has to be tried again at the next sync."""

    async def stop_containers(self, pod: Pod) -> None:
        """Stop the containers. The sandbox is stopped later, by nobody the volume manager waits for."""


@dataclass
class PodStatus:
    """A pod that the API has, or had."""

    pod: Pod
    deleted: bool = False
    running: bool = False
    next_sync_s: float = 0.0
    next_republish_s: float = 0.0


class Kubelet:
    """One node's kubelet. `journal`: every answer to a stage, publish, unpublish, unstage, expansion, statistics."""

    def __init__(
        self,
        *,
        root: str,
        driver: str,
        socket: str,
        is_mount_point: Callable[[str], bool],
        runtime: Runtime,
        on_answer: Callable[[Answer], None] = lambda _: None,
        timeout_s: float = 120,
    ) -> None:
        self.clock = Clock()
        self.journal: list[Answer] = []
        self.pods: dict[str, PodStatus] = {}
        self.wanted_bytes: dict[str, int] = {}
        self.disk = Disk(root, driver, is_mount_point)
        self._runtime = runtime
        self._on_answer = on_answer
        self.csi = CsiClient(socket, self._heard, lambda: self.clock.now_s, timeout_s=timeout_s)
        self._next_stats_s = STATS_EVERY_S
        self._forget_everything()

    def add(self, pod: Pod) -> None:
        """A pod is bound to this node."""
        self.pods[pod.uid] = PodStatus(pod)

    async def delete(self, pod_uid: str) -> None:
        """A pod is deleted: its containers are stopped, and its volumes are not desired any more."""
        status = self.pods[pod_uid]
        if status.running:
            await self._runtime.stop_containers(status.pod)
        status.deleted, status.running = True, False

    def resize(self, volume_name: str, size_bytes: int) -> None:
        """The PersistentVolume was grown by the controller."""
        self.wanted_bytes[volume_name] = size_bytes

    def is_desired(self, pod_uid: str) -> bool:
        """Whether the pod's volumes are in the desired state."""
        return pod_uid in self.pods and not self.pods[pod_uid].deleted

    @property
    def settled(self) -> bool:
        """Whether every pod that should run runs, and nothing is there that nobody wants."""
        return all(pod.running or pod.deleted for pod in self.pods.values()) and all(
            volume.pods
            and all(self._is_well(one) for one in volume.pods.values())
            and volume.size_bytes >= self.wanted_bytes.get(volume.volume.name, 0)
            for volume in self.actual.volumes.values()
        )

    @property
    def empty(self) -> bool:
        """Whether no pod is left, and no volume in the actual state."""
        return not (self.pods or self.actual.volumes)

    async def turn(self) -> None:
        """One round of the reconciler and what comes beside it; then its time passes."""
        self._mark_remounts()
        begun = [*self._unmounts(), *self._mounts(), *self._device_unmounts()]
        await asyncio.gather(*begun)
        await self._poll_stats()
        await self._start_pods()
        self._remove_pods()
        self.clock.advance(LOOP_S)

    async def until(self, condition: Callable[[], bool], *, within_s: float) -> None:
        """Turn until the condition holds; simulated time is what bounds it."""
        end_s = self.clock.now_s + within_s
        while not condition():
            assert self.clock.now_s < end_s, (
                f"not so within {within_s} s: {self.pods}, {self.actual}, {self.journal[-20:]}"
            )
            await self.turn()

    async def restart(self) -> None:
        """The kubelet dies and comes back: what it knows is what it finds on disk and what the API wants.

        Volumes of pods that are wanted are uncertain, as since Kubernetes 1.26. (1.20 left them out of the actual
        state until they were mounted again, and forgot them if their pod was deleted before.)
        """
        self._forget_everything()
        for status in list(self.pods.values()):
            if status.deleted:
                del self.pods[status.pod.uid]
        for on_disk in list(self.disk.find_all()):
            await self._reconstruct(on_disk)

    async def _reconstruct(self, on_disk: Found) -> None:
        wanted = self.is_desired(on_disk.pod_uid)
        pod = self.pods[on_disk.pod_uid].pod if wanted else Pod(on_disk.pod_uid, ())
        volume = Volume(on_disk.volume_name, on_disk.handle)
        if self.disk.is_mount_point(on_disk.target):
            state = State.UNCERTAIN if wanted else State.MOUNTED
            actual = self.actual.attach(volume)
            actual.device = state
            actual.pods[pod.uid] = MountedPod(pod, state, reconstructed=True)
        elif not wanted:  # "volume is not mounted": unpublished once, and never unstaged
            with contextlib.suppress(*_FAILURES):
                await self._operations.unmount(pod, volume.name)

    def _forget_everything(self) -> None:
        self.actual = Actual()
        self._pending = PendingOperations(self.clock)
        self._operations = VolumeOperations(self.actual, self.disk, self.csi)

    def _heard(self, answer: Answer) -> None:
        self.journal.append(answer)
        self._on_answer(answer)

    def _desired(self) -> Iterator[tuple[Pod, Volume]]:
        for status in self.pods.values():
            if not status.deleted:
                for volume in status.pod.volumes:
                    yield status.pod, volume

    def _is_well(self, mounted: MountedPod) -> bool:
        return mounted.state is State.MOUNTED and self.is_desired(mounted.pod.uid)

    def _mark_remounts(self) -> None:
        now_s = self.clock.now_s
        for status in self.pods.values():
            if not status.running or now_s < status.next_republish_s:
                continue
            status.next_republish_s = now_s + REPUBLISH_EVERY_S
            for volume in status.pod.volumes:
                actual = self.actual.volumes.get(volume.name)
                if volume.republish and actual is not None and status.pod.uid in actual.pods:
                    actual.pods[status.pod.uid].remount_required = True

    def _unmounts(self) -> Iterator[Coroutine[Any, Any, None]]:
        for name, actual in list(self.actual.volumes.items()):
            for mounted in list(actual.pods.values()):
                if not self._desires(mounted.pod.uid, name):
                    yield from self._begin(
                        name, mounted.pod.uid, "volume_unmount",
                        partial(self._operations.unmount, mounted.pod, name),
                    )  # fmt: skip

    def _mounts(self) -> Iterator[Coroutine[Any, Any, None]]:
        for pod, volume in self._desired():
            actual = self.actual.attach(volume)
            mounted = actual.pods.get(pod.uid)
            wanted = self.wanted_bytes.get(volume.name, 0)
            if mounted is None or mounted.state is not State.MOUNTED or mounted.remount_required:
                yield from self._begin(
                    volume.name, ANY_POD, "volume_mount",
                    partial(self._operations.mount, pod, volume, wanted),
                )  # fmt: skip
            elif wanted > actual.size_bytes and not actual.in_use_expansion:
                yield from self._begin(
                    volume.name, ANY_POD, "volume_fs_resize",
                    partial(self._operations.expand, pod, volume, wanted),
                )  # fmt: skip

    def _device_unmounts(self) -> Iterator[Coroutine[Any, Any, None]]:
        desired = {volume.name for _, volume in self._desired()}
        for name, actual in list(self.actual.volumes.items()):
            if actual.pods or name in desired or self._pending.is_running(name):
                continue
            if actual.device is State.NOT_MOUNTED:
                del self.actual.volumes[name]
                continue
            yield from self._begin(
                name, ANY_POD, "unmount_device",
                partial(self._operations.unmount_device, actual.volume),
            )  # fmt: skip

    def _begin(
        self, volume: str, pod: str, name: str, work: Callable[[], Awaitable[None]]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        operation = self._pending.begin(volume, pod, name)
        if operation is None:
            return

        async def run() -> None:
            failed = True
            try:
                with contextlib.suppress(*_FAILURES):
                    await work()
                    failed = False
            finally:
                self._pending.end(operation, failed=failed)

        yield run()

    def _desires(self, pod_uid: str, volume_name: str) -> bool:
        return self.is_desired(pod_uid) and any(
            volume.name == volume_name for volume in self.pods[pod_uid].pod.volumes
        )

    async def _poll_stats(self) -> None:
        if self.clock.now_s < self._next_stats_s:
            return
        self._next_stats_s = self.clock.now_s + STATS_EVERY_S
        for actual in list(self.actual.volumes.values()):
            for mounted in list(actual.pods.values()):
                if self._is_well(mounted):  # an error is a line in the log, and no more
                    path = self.disk.target(mounted.pod.uid, actual.volume.name)
                    with contextlib.suppress(OperationFailed):
                        await self.csi.stats(actual.volume, path)

    async def _start_pods(self) -> None:
        for status in list(self.pods.values()):
            if status.deleted or status.running or self.clock.now_s < status.next_sync_s:
                continue
            if not all(self._is_mounted(status.pod, volume) for volume in status.pod.volumes):
                continue
            status.running = await self._runtime.start(status.pod)
            status.next_sync_s = self.clock.now_s + POD_SYNC_S

    def _is_mounted(self, pod: Pod, volume: Volume) -> bool:
        actual: ActualVolume | None = self.actual.volumes.get(volume.name)
        return actual is not None and actual.state_for(pod.uid) is State.MOUNTED

    def _remove_pods(self) -> None:
        """A deleted pod leaves the API when no volume of it is in the actual state or mounted on disk."""
        for uid, status in list(self.pods.items()):
            held = any(uid in actual.pods for actual in self.actual.volumes.values())
            if status.deleted and not held and not self.disk.has_mounts(uid):
                self.disk.remove_pod(uid)
                del self.pods[uid]
