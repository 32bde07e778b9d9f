"""The container runtime beside a simulated kubelet: sandboxes that take their volumes, and outlive their containers.

A sandbox claims by the handoff directory as the SDK does (`fake_handler.sandbox`), and needs an entry to start.
"""

from contextlib import ExitStack

from crust.core import errors
from tests.support.kubelet.disk import Disk
from tests.support.kubelet.state import Pod
from tests.support.runtimes import fake_handler


class Sandboxes:
    """`kubelet.Runtime`. `live`: by pod; a test stops them."""

    def __init__(self, volumes_root: str) -> None:
        self._root = volumes_root
        self.live: dict[str, ExitStack] = {}
        self.pods: dict[str, Pod] = {}
        self.containers: set[str] = set()
        self.disk: Disk

    async def start(self, pod: Pod) -> bool:
        """Claim every volume, or none. A raw device is no claim's: it is a container's by its path."""
        with ExitStack() as stack:
            for volume in [each for each in pod.volumes if not each.block]:
                target = self.disk.target(pod.uid, volume.name)
                try:
                    stack.enter_context(fake_handler.sandbox(self._root, target, name=pod.uid))
                except errors.CrustError:
                    return False
            self.live[pod.uid] = stack.pop_all()
        self.pods[pod.uid] = pod
        self.containers.add(pod.uid)
        return True

    async def stop_containers(self, pod: Pod) -> None:
        """The containers end; the sandbox keeps its volumes."""
        self.containers.discard(pod.uid)

    def stop(self, pod_uid: str) -> None:
        self.live.pop(pod_uid).close()


class PlainContainers:
    """`kubelet.Runtime` without sandboxes."""

    def __init__(self) -> None:
        self.containers: set[str] = set()

    async def start(self, pod: Pod) -> bool:
        self.containers.add(pod.uid)
        return True

    async def stop_containers(self, pod: Pod) -> None:
        self.containers.discard(pod.uid)
