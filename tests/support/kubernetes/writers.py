"""Two pods that write to their volumes all the time, one in a microVM and one on the host.

What happens to crust meanwhile must not stop them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.kubernetes import microvm
from tests.support.kubernetes.cluster import Cluster, claim, pod
from tests.support.kubernetes.kubectl import until

GUEST, HOST = "guest-writes", "host-writes"
PODS = (GUEST, HOST)
_SCRIPT = "trap 'exit 0' TERM; while :; do echo line >>/data/lines; sleep 0.2 & wait $!; done"


@dataclass(frozen=True, slots=True)
class Writers:
    """`began`: what a pod keeps as long as it and its container are the same, by its name."""

    cluster: Cluster
    began: dict[str, Any]

    @classmethod
    def started(cls, cluster: Cluster) -> "Writers":
        """Both write when this returns."""
        cluster.kubectl.apply(claim(GUEST, "by-runtime-class"), claim(HOST, "crust-host"))
        cluster.start(pod(GUEST, GUEST, _SCRIPT, runtimeClassName=microvm.HANDLER))
        cluster.start(pod(HOST, HOST, _SCRIPT))
        writers = cls(cluster, {name: _identity(cluster, name) for name in PODS})
        writers.assert_go_on()
        return writers

    def end(self) -> None:
        """The pods, if they are there, and their claims are deleted: nothing is left."""
        self.cluster.kubectl.run("delete", "pod", "--ignore-not-found", *PODS)
        assert (self.mounts(), microvm.sandboxes()) == ([], [])
        self.cluster.remove(*PODS)
        assert list(self.cluster.node.images_of_volumes()) == []

    def assert_go_on(self) -> None:
        """Both write more than they have, and are the pods and the containers of their start."""
        for name in PODS:
            written = self._lines(name)
            until(partial(self._has_more_than, written, name))
            assert _identity(self.cluster, name) == self.began[name]
        assert self.mounts() == ["ext4", "tmpfs"]

    def _has_more_than(self, lines: int, name: str) -> bool:
        return self._lines(name) > lines

    def mounts(self) -> list[str]:
        """The filesystems at the targets of volumes."""
        return sorted(self.cluster.node.mounts_of_volumes())

    def _lines(self, name: str) -> int:
        return int(self.cluster.inside(name, "wc -l </data/lines"))


def _identity(cluster: Cluster, name: str) -> Any:
    found = cluster.kubectl.get("pod", name)
    (status,) = found["status"]["containerStatuses"]
    return found["metadata"]["uid"], status["containerID"], status["restartCount"]
