"""Containers as pods get them, by containerd and runc: namespaces of their own for processes, mounts and network.

The root file system is this machine's own, under an overlay, so there is nothing to build: Python, the checkout and
its .venv are where they are. The specification of each container is written by hand, because the one that `ctr`
writes for a privileged container asks for capabilities that a machine in a container may lack. The host of these
containers is the mount namespace of the tests, with a kubelet's root that is shared as it is under systemd.
"""

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crust.host.mounts import mount_api, mountinfo
from tests.support import trees

CHECKOUT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300
"""For what containerd and a start take, on a machine that does other work too. It is only waited for in a failure."""
_CONFIG = """
version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{base}/c.sock"
[ttrpc]
address = "{base}/t.sock"
"""


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the host, at the same path in the container, or `at` another one. `propagation` is the
    pod's mountPropagation.
    """

    path: Path
    propagation: str = "rprivate"
    at: str = ""
    readonly: bool = False


BIDIRECTIONAL, HOST_TO_CONTAINER = "rshared", "rslave"


@dataclass(frozen=True, slots=True)
class Rights:
    """What a manifest lets a container do, beside its mounts. `variables` of its environment are `NAME=value`."""

    capabilities: Sequence[str]
    user: int = 0
    host_pid: bool = False
    host_network: bool = False
    may_escalate: bool = True
    readonly_root: bool = True
    has_devices: bool = True
    """Whether it may open those of the host."""
    variables: tuple[str, ...] = ()

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The kinds of namespaces of its own."""
        shared = {"pid": self.host_pid, "network": self.host_network}
        kinds = ("mount", "network", "ipc", "uts", "pid")
        return tuple(kind for kind in kinds if not shared.get(kind))


@dataclass(slots=True)
class Containerd:
    """A containerd, and the root file system of its containers."""

    base: Path
    _names: list[str] = field(default_factory=list)

    @property
    def rootfs(self) -> Path:
        """The overlay of this machine's root file system."""
        return self.base / "tmpfs" / "rootfs"

    def load_image(self, tar: Path, base_name: str) -> Path:
        """Import an OCI image and mount it; returns its root file system."""
        self.ctr("images", "import", "--base-name", base_name, str(tar))
        (name,) = self.ctr("images", "list", "--quiet").split()
        root = self.base / "image"
        root.mkdir()
        self.ctr("images", "mount", "--rw", name, str(root))  # mount points are made in it
        return root

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        binds: Sequence[Bind],
        image: Path | None = None,
        rights: Rights | None = None,
    ) -> "Container":
        """Start a container of `crust arguments…`; it may not serve yet when this returns.

        With `image` it is that of the image that is mounted there, else that of this checkout. Without `rights` it
        has those that the units leave the daemons, and sees the host's processes where the manifests do so (hostPID).
        """
        spec = self.base / f"{name}.json"
        # it may lie below /tmp, where a container has its own
        checkout = [] if image else [Bind(CHECKOUT)]
        if rights is None:
            host_pid = arguments[0] in ("proxy", "driver", "node")
            rights = Rights(_bounding_set(_CAPABILITIES), host_pid=host_pid)
        described = self._spec(name, arguments, [*checkout, *binds], rights)
        if image is not None:
            described["root"]["path"] = str(image)
            described["process"] |= {
                "args": ["tini", "--", "crust", *arguments],
                "cwd": "/",
                "env": ["PATH=/opt/crust/bin:/usr/sbin:/usr/bin:/sbin:/bin", *rights.variables],
            }
        spec.write_text(json.dumps(described))
        log = self.base / f"{name}.log"
        log.unlink(missing_ok=True)
        self.ctr("run", "--detach", "--log-uri", f"file://{log}", "--config", str(spec), name)
        self._names.append(name)
        return Container(self, name, log)

    def remove(self, name: str) -> None:
        """Remove a container that has ended, or end it."""
        self.ctr("task", "delete", "--force", name, may_fail=True)
        self.ctr("container", "delete", name, may_fail=True)
        if name in self._names:
            self._names.remove(name)

    def remove_all(self) -> None:
        """Remove whatever a test has left."""
        for name in list(self._names):
            self.remove(name)

    @property
    def namespace(self) -> str:
        """containerd's, and the name of the control groups, with the run's: those of a killed one are found by it."""
        own = self.base.name.encode().hex()  # a name may not end with an underscore
        return f"crust-tests-{Path(tempfile.gettempdir()).name}-{own}"

    def ctr(self, *arguments: str, may_fail: bool = False) -> str:
        """The output of containerd's own client.

        In a namespace of this containerd's own: runc keeps the state of containers of one name in one directory of
        the host, whoever runs them, so those of another containerd beside this one would be treated as these.
        """
        done = subprocess.run(
            ("ctr", f"--address={self.base}/c.sock", f"--namespace={self.namespace}", *arguments),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert may_fail or done.returncode == 0, done.stderr
        return done.stdout

    def _spec(
        self, name: str, arguments: Sequence[str], binds: Sequence[Bind], rights: Rights
    ) -> dict[str, Any]:
        capabilities = list(rights.capabilities)
        return {
            "ociVersion": "1.0.2",
            "hostname": name,
            "root": {"path": str(self.rootfs), "readonly": rights.readonly_root},
            "process": {
                "args": [sys.executable, "-m", "crust", *arguments],
                "cwd": str(CHECKOUT),
                "env": [f"PATH={os.environ['PATH']}", *rights.variables],
                "user": {"uid": rights.user, "gid": rights.user},
                "noNewPrivileges": not rights.may_escalate,
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs"},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
                _bind(Bind(Path("/dev"))),
                *map(_bind, binds),
            ],
            "linux": {
                "namespaces": [{"type": kind} for kind in rights.namespaces],
                "rootfsPropagation": "rshared",
                "resources": {"devices": [{"allow": rights.has_devices, "access": "rwm"}]},
                "cgroupsPath": f"/{self.namespace}/{name}",
            },
        }


@dataclass(frozen=True, slots=True)
class Container:
    """One container."""

    containerd: Containerd
    name: str
    log: Path

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def answer(self, path: str) -> tuple[int, str]:
        """What a probe of the kubelet gets at the metrics port of the manifests: status and text."""
        asked = f"http.client.HTTPConnection('127.0.0.1', 9810, timeout={_TIMEOUT_S})"
        program = (
            f"import http.client; c = {asked}; c.request('GET', '{path}'); r = c.getresponse();"
            " print(r.status, r.read().decode())"
        )
        python = ("/opt/crust/bin/python", "-c", program)
        probe = ("task", "exec", "--exec-id", f"probe-{path.strip('/')}", self.name)
        answered = self.containerd.ctr(*probe, *python, may_fail=True)
        assert answered, f"{path} was not answered; the container's log:\n{self.text()}"
        status, _, text = answered.partition(" ")
        return int(status), text

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it, as `kubectl exec` does; never raises for its exit code."""
        client = (
            "ctr",
            f"--address={self.containerd.base}/c.sock",
            f"--namespace={self.containerd.namespace}",
        )
        run = ("task", "exec", f"--exec-id=command-{secrets.token_hex(8)}", self.name, *command)
        return subprocess.run(
            (*client, *run), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )

    def wait_for(self, words: str) -> None:
        """Wait until its log has `words`."""
        assert _logs(self.log, words), self.text()

    def kill(self, number: str = "KILL") -> None:
        """Send its process a signal, wait until it has ended, and remove the container."""
        self.containerd.ctr("task", "kill", "--signal", number, self.name)
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait until its process has ended, and remove the container."""
        process = self._process()
        if process is not None:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            has_ended = ended.poll(_TIMEOUT_S * 1000)
            os.close(process)
            assert has_ended, self.text()
        self.containerd.remove(self.name)

    def _process(self) -> int | None:
        """A descriptor of its process; None if that has ended."""
        for line in self.containerd.ctr("task", "list").splitlines():
            name, pid, state = line.split()
            if name == self.name and state == "RUNNING":
                with suppress(ProcessLookupError):
                    return os.pidfd_open(int(pid))
        return None


def _bind(bind: Bind) -> dict[str, Any]:
    return {
        "destination": bind.at or str(bind.path),
        "type": "none",
        "source": str(bind.path),
        "options": ["rbind", "ro" if bind.readonly else "rw", bind.propagation],
    }


_ALL = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""In the order of their numbers in linux/capability.h."""

_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "LINUX_IMMUTABLE", "SYS_PTRACE", "SYS_ADMIN",
    "SYS_RESOURCE", "MKNOD",
)  # fmt: skip
"""Those that the units leave the daemons (docs/security.md)."""


def all_capabilities() -> list[str]:
    """Those of a privileged container on this machine."""
    return _bounding_set(_ALL)


def _bounding_set(names: Sequence[str]) -> list[str]:
    """What of them this machine has: a container cannot be given more."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if "CapBnd" in line)
    return [f"CAP_{name}" for name in names if mask >> _ALL.index(name) & 1]


@contextmanager
def containerd() -> Iterator[Containerd]:
    """A containerd that serves while the block runs."""
    base = Path(tempfile.mkdtemp(prefix="crust-"))
    daemon = Containerd(base)
    (base / "tmpfs").mkdir()
    (base / "config.toml").write_text(_CONFIG.format(base=base))
    _mount("-t", "tmpfs", "tmpfs", base / "tmpfs")
    for name in ("upper", "work", "rootfs"):
        (base / "tmpfs" / name).mkdir()
    upper = f"upperdir={base}/tmpfs/upper,workdir={base}/tmpfs/work"
    _mount("-t", "overlay", "-o", f"lowerdir=/,{upper}", "overlay", daemon.rootfs)
    # the user of a container reaches the interpreter, which may be in root's home
    for directory in (*Path(sys.executable).resolve().parents, *CHECKOUT.parents):
        inside = daemon.rootfs / directory.relative_to("/")
        inside.chmod(inside.stat().st_mode | 0o011)
    log = base / "containerd.log"
    with log.open("wb") as file:
        command = ["containerd", "--config", str(base / "config.toml")]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        assert _logs(log, "containerd successfully booted"), log.read_text()
        daemon.ctr("version")
        yield daemon
    finally:
        daemon.remove_all()
        process.terminate()
        process.wait()
        for mount in reversed(mountinfo.below(str(base))):
            mount_api.unmount(mount.target)
        trees.remove(base)
        for pattern in (daemon.namespace, f"*/{daemon.namespace}"):  # cgroup v2, and v1
            for group in Path("/sys/fs/cgroup").glob(pattern):
                with suppress(OSError):
                    group.rmdir()


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def _logs(log: Path, words: str) -> bool:
    """Whether a line of the log, which may not exist yet, has `words` in time."""
    follow = ("timeout", str(_TIMEOUT_S), "tail", "--lines=+1", "--follow=name", "--retry", log)
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        is_logged = any(words in line for line in tail.stdout)
        tail.terminate()
    return is_logged
