"""A machine that a real systemd boots (systemd-nspawn), with an environment in /opt/crust as pip makes it.

Its root file system is this machine's own, under an overlay, so nothing is downloaded: the environment has the wheel
of this checkout, and the wheel's dependencies from the checkout's own environment. It has no network, and the loop
devices of this machine.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from crust.host.block import loop
from crust.host.mounts import growth, mount_api, mountinfo
from tests.support import environments, trees

CHECKOUT = environments.CHECKOUT
ENVIRONMENT = "/opt/crust"
_DEPENDENCIES = "/opt/dependencies"
_TIMEOUT_S = 50
_LOOPS = 64
_GROUP = f"crust-tests-{Path(tempfile.gettempdir()).name}-{os.getpid()}"
"""With the run's name, by which those of a killed one are found."""
_HIDDEN = ("etc/crust", "var/lib/crust", "var/lib/kubelet", "run", "opt")
"""Of this machine: what is there may be of an installation by hand."""


@dataclass(slots=True)
class Machine:
    """One that runs. `leader` is its process 1, seen from outside."""

    root: Path
    base: Path
    leader: int = 0
    _run: ExitStack = field(default_factory=ExitStack)

    def boot(self) -> None:
        """Boot it, after it was powered off in order if it runs. No loop device outlives that."""
        self.power_off()
        self.leader = self._run.enter_context(_booted(self.base, self.root))
        for number in range(_LOOPS):
            self.run("mknod", "-m", "600", f"/dev/loop{number}", "b", "7", str(number))

    def power_off(self) -> None:
        """Power it off."""
        self._run.close()
        _detach_loops(self.root)

    def seen(self, path: str) -> str:
        """The path, from outside, of a file that it has on a file system of its own, as below /run."""
        return f"/proc/{self.leader}/root{path}"

    def run(
        self, *command: str, timeout_s: float = _TIMEOUT_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in it; never raises for its exit code."""
        return subprocess.run(
            self._entering(command), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    @contextmanager
    def running(self, *command: str) -> Iterator["subprocess.Popen[str]"]:
        """A command that runs in it beside others, with pipes as input and output; the block's end kills it."""
        process = subprocess.Popen(
            self._entering(command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in children(process.pid):  # the end of nsenter alone would end nothing
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _entering(self, command: tuple[str, ...]) -> list[str]:
        enter = ("nsenter", f"--target={self.leader}", "--all", "--wd=/", "env", "-i")
        paths = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return [*enter, paths, *command]

    def output(self, *command: str, timeout_s: float = _TIMEOUT_S) -> str:
        """The output of a command that must succeed."""
        done = self.run(*command, timeout_s=timeout_s)
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()]


@contextmanager
def machine() -> Iterator[Machine]:
    """Boot one, and power it off after the block."""
    base = Path(tempfile.mkdtemp(prefix="crust-"))
    try:
        root = _root(base)
        _install_environment(root)
        booted = Machine(root, base)
        try:
            booted.boot()
            yield booted
        finally:
            booted.power_off()
    finally:
        for mount in reversed(mountinfo.below(str(base))):
            mount_api.unmount(mount.target)
        trees.remove(base)


def _detach_loops(root: Path) -> None:
    """What a test that failed has left attached: a device keeps its file system alive after the unmount."""
    for image in (root / "var/lib/crust").rglob("*.img"):
        for device in loop.find(image):
            loop.detach(device)


def _root(base: Path) -> Path:
    root = base / "t" / "r"
    (base / "t").mkdir()
    environments.do("mount", "-t", "tmpfs", "tmpfs", base / "t")
    _overlay(base / "t" / "root", Path("/"), root)
    for name in _HIDDEN:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    for links in (root / "etc/systemd/system").glob("*.wants"):  # no service of this machine starts
        shutil.rmtree(links)
    # an overlay of / lacks the file systems that are mounted below it
    _overlay(base / "t" / "checkout", CHECKOUT, _checkout(base))
    seen = root / str(CHECKOUT)[1:]
    seen.mkdir(parents=True, exist_ok=True)
    environments.do("mount", "--bind", _checkout(base), seen)
    return root


def _overlay(layers: Path, lower: Path, at: Path) -> None:
    for path in (layers / "u", layers / "w", at):
        path.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={lower},upperdir={layers}/u,workdir={layers}/w"
    environments.do("mount", "-t", "overlay", "-o", options, "overlay", at)


def _checkout(base: Path) -> Path:
    """This checkout, as the machine may write to it."""
    return base / "t" / "c"


def _install_environment(root: Path) -> None:
    wheel = environments.build_wheel(root / "opt")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    chroot = ("chroot", root)
    environments.do(*chroot, "python3", "-m", "venv", "--without-pip", ENVIRONMENT)
    python = f"{ENVIRONMENT}/bin/python"
    environments.do("mount", "--bind", "/dev", root / "dev")
    environments.do("mount", "-t", "proc", "proc", root / "proc")
    environments.do(*chroot, *pip, "--python", python, "install", "--no-deps", f"/opt/{wheel.name}")
    for name in ("dev", "proc"):
        environments.do("umount", root / name)
    (packages,) = (root / ENVIRONMENT[1:]).glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(f"{_DEPENDENCIES}\n")
    command = (
        root / ENVIRONMENT[1:] / "bin" / "pip"
    )  # without the seconds that pip's own installation takes
    command.write_text(f'#!/bin/sh\nexec {" ".join(pip)} --python {python} "$@"\n')
    command.chmod(0o755)


@contextmanager
def _booted(base: Path, root: Path) -> Iterator[int]:
    console = (base / "console").open("wb")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        (base / "notify").unlink(missing_ok=True)
        listens.bind(str(base / "notify"))
        listens.settimeout(_TIMEOUT_S)
        joins = "; ".join(f"echo $$ >{group}/cgroup.procs" for group in _make_groups())
        options = (
            "--register=no --keep-unit --console=pipe --private-network "
            "--system-call-filter=pidfd_getfd "  # by which crust kata finds a device that a hypervisor has open
            "--notify-ready=yes --link-journal=no --machine=crust-test --bind=/dev/loop-control --boot "
            # these may lie below /tmp, where the machine, and some of its units, have their own
            f"--bind={_checkout(base)}:{CHECKOUT} --bind={sysconfig.get_path('purelib')}:{_DEPENDENCIES}"
        )
        if not growth.has_cap_sys_resource():  # systemd-nspawn gives it by default
            options += " --drop-capability=CAP_SYS_RESOURCE"
        if os.path.exists("/dev/kvm"):  # where it works, guests are started with it
            options += " --bind=/dev/kvm"
        start = f"{joins}; exec systemd-nspawn {options} -D {root} quiet"
        process = subprocess.Popen(
            ["sh", "-c", start], stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            env={**os.environ, "NOTIFY_SOCKET": str(base / "notify")},
        )  # fmt: skip
        try:
            yield _leader(listens)
        except TimeoutError:
            raise AssertionError((base / "console").read_text(errors="replace")[-2000:]) from None
        finally:
            process.terminate()  # it powers the machine off
            try:
                process.wait(_TIMEOUT_S)
            finally:
                process.kill()
                process.wait()
                console.close()
                _remove_groups()


def _leader(listens: socket.socket) -> int:
    """Wait until it has booted; returns its process 1."""
    leader = 0
    while True:
        for line in listens.recv(4096).decode().splitlines():
            if line.startswith("X_NSPAWN_LEADER_PID="):
                leader = int(line.partition("=")[2])
            if line == "READY=1" and leader:
                return leader


def _make_groups() -> list[Path]:
    """A control group of its own: systemd-nspawn makes groups beside itself."""
    hierarchies = [Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")]
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        hierarchies = [Path("/sys/fs/cgroup")]
    groups = [hierarchy / _GROUP for hierarchy in hierarchies if hierarchy.is_dir()]
    for group in groups:
        group.mkdir(exist_ok=True)  # at a second boot the kernel may still remove what was in it
    return groups


def _remove_groups() -> None:
    for top in (*Path("/sys/fs/cgroup").glob(f"*/{_GROUP}"), Path("/sys/fs/cgroup", _GROUP)):
        for directory, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                os.rmdir(directory)
