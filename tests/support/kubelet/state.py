"""Pods and volumes: what the kubelet wants (desired state), what it believes to be there (actual state).

*Uncertain* is the state after a call whose outcome is not known: it is mounted again while the pod is wanted, and
unmounted when it is not. What is in no state is not there, to a kubelet: nothing of it will ever be unpublished.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Volume:
    """A volume of a CSI driver. `republish`: the CSIDriver says requiresRepublish, with tokens."""

    name: str
    handle: str
    context: Mapping[str, str] = field(default_factory=dict)
    fs_type: str = "ext4"
    readonly: bool = False
    republish: bool = False


@dataclass(frozen=True)
class Pod:
    """A pod and its volumes."""

    uid: str
    volumes: tuple[Volume, ...]


class State(enum.Enum):
    """Of a device's global mount, and of a volume's mount for a pod."""

    NOT_MOUNTED = enum.auto()
    UNCERTAIN = enum.auto()
    MOUNTED = enum.auto()


@dataclass
class MountedPod:
    """A volume of a pod in the actual state."""

    pod: Pod
    state: State = State.NOT_MOUNTED
    remount_required: bool = False
    reconstructed: bool = False
    """Found on disk by a restarted kubelet, and not mounted by it yet: no error makes it forget this one."""


@dataclass
class ActualVolume:
    """A volume in the actual state, with the pods that have it."""

    volume: Volume
    device: State = State.NOT_MOUNTED
    pods: dict[str, MountedPod] = field(default_factory=dict)
    in_use_expansion: bool = False
    size_bytes: int = 0

    def state_for(self, pod_uid: str) -> State:
        """The mount's state for a pod; what is not there is not mounted."""
        mounted = self.pods.get(pod_uid)
        return mounted.state if mounted is not None else State.NOT_MOUNTED


@dataclass
class Actual:
    """The actual state of the world."""

    volumes: dict[str, ActualVolume] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    """Volumes that were uncertain and are held to be gone, because a call that asks only what the driver can failed.

    A kubelet does that: only the answer to NodeStageVolume and NodePublishVolume itself makes or keeps "uncertain".
    """

    def attach(self, volume: Volume) -> ActualVolume:
        """The volume's place in the actual state, made if it is not there (attachRequired is false)."""
        return self.volumes.setdefault(volume.name, ActualVolume(volume))

    def device_failed(self, volume: Volume, *, is_final: bool) -> None:
        """MountDevice failed (markDeviceErrorState)."""
        actual = self.attach(volume)
        if is_final and actual.device is State.UNCERTAIN:
            actual.device = State.NOT_MOUNTED
        elif not is_final and actual.device is State.NOT_MOUNTED:
            actual.device = State.UNCERTAIN

    def mount_failed(self, volume: Volume, pod: Pod, *, is_final: bool) -> None:
        """SetUp failed (markVolumeErrorState). What was mounted stays mounted, whatever a republish says."""
        actual = self.attach(volume)
        state = actual.state_for(pod.uid)
        if is_final and state is State.UNCERTAIN:
            if not actual.pods[pod.uid].reconstructed:
                del actual.pods[pod.uid]
        elif not is_final and state is State.NOT_MOUNTED:
            actual.pods[pod.uid] = MountedPod(pod, State.UNCERTAIN)
