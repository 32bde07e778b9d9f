"""The node: its directories, a container runtime and the kubelet.

Its paths are those of every node (/var/lib/kubelet), in mounts of the test run's own. The kubelet sets some of the
machine's sysctls: it finds them as it wants them, in files that are mounted over them, and is told to change none.
All control groups of pods are below one that has the run's name.
"""

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from crust.host.mounts import mountinfo
from tests.support.kubernetes import images, microvm
from tests.support.kubernetes.control_plane import ADDRESS, NODE, SERVICE, ControlPlane
from tests.support.kubernetes.daemons import PROGRAMS, Daemon

_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_CRI = "unix:///run/containerd/containerd.sock"
_POOL = "/var/lib/crust/block"
_DIRECTORIES = ("/var/lib/kubelet", "/var/lib/crust", "/var/lib/containerd", "/var/log")
_RUN = ("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
_CONTAINERD = """version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{sandbox}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{directory}/registries"
[plugins."io.containerd.cri.v1.runtime"]
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{programs}"]
conf_dir = "{directory}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}.options]
BinaryName = "{oci_runtime}"
"""
_NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{"subnet": "10.97.0.0/16"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}


@dataclass(slots=True)
class Node:
    """Its files are below `directory`, which must exist; `registry` is the URL of the one that has all images.

    Without one Kubernetes' own fake has the place of containerd: of a container it knows what it was told.
    """

    directory: Path
    group: str
    registry: str = ""
    kubelet: Daemon = field(init=False)
    _daemons: list[Daemon] = field(init=False)
    """In the order of their start."""

    @contextmanager
    def running(self, control_plane: ControlPlane) -> Iterator[None]:
        """The container runtime, the kubelet and a runtime of microVMs serve while the block runs."""
        with ExitStack() as stack:
            self._make_groups()
            stack.callback(self._remove_groups)
            self.kubelet = self._kubelet(control_plane)
            containers = self._containerd() if self.registry else self._fake_of_containerd()
            self._daemons = [containers, microvm.daemon(self.directory), self.kubelet]
            for daemon in self._daemons:
                stack.enter_context(daemon.running())
            yield

    def reboot(self) -> None:
        """End all of the node but its disks, and start it again; the control plane goes on.

        What was written is synced by the unmounts, so this is no cut of the power.
        """
        for daemon in reversed(self._daemons):
            daemon.end()
        _end_strangers()
        self._remove_groups()
        self._make_groups()
        for directory in ("/run", "/var/lib/kubelet"):
            subprocess.run(["umount", "--recursive", directory], check=True)
        for image in self.images_of_volumes():
            listed = subprocess.run(
                ["losetup", "--noheadings", "--output=NAME", f"--associated={image}"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            for device in listed.stdout.split():
                subprocess.run(["losetup", "--detach", device], check=True)
        _mount(*_RUN)
        _mount("--bind", self._own("/var/lib/kubelet"), "/var/lib/kubelet")
        for daemon in self._daemons:
            daemon.start()

    def _own(self, path: str) -> Path:
        """What is mounted at a path of the node."""
        return self.directory / path.replace("/", "_")

    def _containerd(self) -> Daemon:
        self._write("cni/pods.conflist", json.dumps(_NETWORK))
        self._write(
            "registries/_default/hosts.toml",
            f'[host."{self.registry}"]\ncapabilities = ["pull", "resolve"]\n',
        )
        paths = {
            "sandbox": images.SANDBOX,
            "programs": PROGRAMS,
            "directory": self.directory,
            "handler": microvm.HANDLER,
            "oci_runtime": microvm.oci_runtime(self.directory),
        }
        configured = self._write("containerd.toml", _CONTAINERD.format(**paths))
        return Daemon((str(PROGRAMS / "containerd"), f"--config={configured}"), self.directory)

    def _fake_of_containerd(self) -> Daemon:
        return Daemon((str(PROGRAMS / "cri"), _CRI), self.directory)

    def _kubelet(self, control_plane: ControlPlane) -> Daemon:
        flags = (
            f"--kubeconfig={control_plane.kubeconfig('kubelet')}",
            f"--config={self._write('kubelet.json', json.dumps(self._settings()))}",
            f"--node-ip={ADDRESS}",
            f"--hostname-override={NODE}",
            f"--cert-dir={self.directory}/kubelet-certificates",
        )
        return Daemon((str(PROGRAMS / "kubelet"), *flags), self.directory)

    def images_of_volumes(self) -> Iterator[Path]:
        """The files of volumes in the pool."""
        yield from Path(_POOL).rglob("*.img")

    def mounts_of_volumes(self) -> list[str]:
        """The filesystems at the targets of CSI volumes: a guard is a tmpfs."""
        return [mount.fs_type for mount in _mounts_of_volumes()]

    def targets_of_volumes(self) -> list[str]:
        """The targets of CSI volumes."""
        return [mount.target for mount in _mounts_of_volumes()]

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    @contextmanager
    def directories(self) -> Iterator[None]:
        """The node's mounts, while the block runs."""
        with ExitStack() as stack:
            self._make_directories()
            pool = self.directory / "pool"
            with pool.open("wb") as file:
                file.truncate(8 << 30)
            subprocess.run(["mkfs.xfs", "-q", pool], check=True)
            Path(_POOL).mkdir()
            _mount("-o", "loop", pool, _POOL)
            stack.callback(subprocess.run, ["umount", "--recursive", _POOL], check=True)
            yield

    def _make_directories(self) -> None:
        _mount("--make-rshared", "/")
        _mount(*_RUN)
        for path in _DIRECTORIES:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._own(path).mkdir()
            _mount("--bind", self._own(path), path)
        for name, value in _SYSCTLS.items():
            given = Path("/run/sysctl") / name
            given.parent.mkdir(parents=True, exist_ok=True)
            given.write_text(value, encoding="ascii")
            _mount("--bind", given, Path("/proc/sys") / name)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")

    def _make_groups(self) -> None:
        for hierarchy in _hierarchies():
            group = hierarchy / self.group
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / name).exists():  # those of version 1 begin empty
                    (group / name).write_text((hierarchy / name).read_text())

    def _remove_groups(self) -> None:
        """The kubelet leaves its own, with control groups of version 1 also in the hierarchy of version 2."""
        top = Path("/sys/fs/cgroup")
        for group in (*top.glob(self.group), *top.glob(f"*/{self.group}")):
            for directory, _, _ in os.walk(group, topdown=False):
                os.rmdir(directory)

    def _settings(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "enforceNodeAllocatable": [],
            "protectKernelDefaults": True,
            "makeIPTablesUtilChains": False,
            "failSwapOn": False,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": _CRI,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi"},
            "clusterDNS": [SERVICE],
            "volumeStatsAggPeriod": "10s",
        }


def _end_strangers() -> None:
    """Kill all processes in here but this one, those that it descends from, and its descendants."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}

    def line(pid: int | None) -> Iterator[int]:
        while pid:
            yield pid
            pid = parents.get(pid)

    own = set(line(os.getpid()))
    for pid in [pid for pid in parents if pid not in own and os.getpid() not in line(pid)]:
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            with os.fdopen(ended):
                signal.pidfd_send_signal(ended, signal.SIGKILL)
                select.select([ended], [], [])


def _parent(process: Path) -> int | None:
    """Its parent's pid; None if it has ended."""
    try:
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _mounts_of_volumes() -> list[mountinfo.Mount]:
    pods = mountinfo.below("/var/lib/kubelet/pods")
    return [mount for mount in pods if "kubernetes.io~csi" in mount.target]


def _hierarchies() -> list[Path]:
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top]
    return [
        path
        for path in top.iterdir()
        if path.is_dir() and not path.is_symlink() and path.name != "unified"
    ]


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)
