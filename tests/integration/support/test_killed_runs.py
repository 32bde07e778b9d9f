"""A killed test run leaves processes, a frozen filesystem, loop devices and a seal; the next one removes them."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.host.block import loop
from tests.support import killed_runs

pytestmark = pytest.mark.root

RUN = """
import os, signal, subprocess
from crust.blockdriver.host import fsfreeze
from crust.host.block import loop
from crust.host.files import sealed
from crust.host.mounts import mount_api

directory = os.environ["TMPDIR"]
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True)
os.makedirs(f"{directory}/pods/sealed")
sealed.seal(f"{directory}/pods/sealed", "a target")
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
open(f"{directory}/disk", "wb").truncate(32 << 20)
subprocess.run(["mkfs.ext4", "-q", f"{directory}/disk"], check=True)
disk = loop.attach(f"{directory}/disk")
os.mkdir(f"{directory}/m")
subprocess.run(["mount", disk.path, f"{directory}/m"], check=True)
open(f"{directory}/m/inner", "wb").truncate(1 << 20)
inner = loop.attach(f"{directory}/m/inner")
open("/mnt/target", "wb").close()
mount_api.bind(inner.path, "/mnt/target")
os.makedirs(f"{directory}/o/u")
os.mkdir(f"{directory}/o/w")
options = f"lowerdir=/mnt,upperdir={directory}/o/u,workdir={directory}/o/w"
subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", "/media"], check=True)
open("/media/image", "wb").truncate(1 << 20)
of_machine = loop.attach("/media/image")
attach = ["losetup", "--find", "--show", "/mnt/target"]
raw = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
frozen = fsfreeze.Freeze(f"{directory}/m")
without = subprocess.Popen(["sleep", "infinity"], env={}, start_new_session=True)
print(directory, os.getpid(), without.pid, disk.path, inner.path, raw, of_machine.path, flush=True)
signal.pause()
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One that has printed what it has."""

    directory: Path
    shell: "subprocess.Popen[str]"
    pids: list[int]
    devices: tuple[loop.LoopDevice, ...]


@contextmanager
def running() -> Iterator[Run]:
    """As the Makefile starts one."""
    private = ("unshare", "--mount", "--propagation", "private")
    command = ("tests/marked_run.sh", *private, sys.executable, "-c", RUN)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        directory, *words = shell.stdout.readline().split()
        try:
            devices = loop.list_named(lambda _: True)
            own = tuple(device for device in devices if device.path in words[2:])
            assert len(own) == 4
            yield Run(Path(directory), shell, list(map(int, words[:2])), own)
        finally:
            shell.kill()
            shell.wait()
            killed_runs.remove_all()


def has_devices(run: Run) -> bool:
    return all(map(loop.is_attached, run.devices))


def lives(pid: int) -> bool:
    """Whether it has not ended; its parent may not have waited for it yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    has_ended = bool(select.select([descriptor], [], [], 0)[0])
    os.close(descriptor)
    return not has_ended


def is_gone(run: Run) -> bool:
    kept = any(map(lives, run.pids)) or any(map(loop.is_attached, run.devices))
    return not kept and not run.directory.exists()


def test_what_a_killed_run_left_is_removed() -> None:
    with running() as run:
        assert has_devices(run)
        run.shell.kill()
        os.kill(run.pids[0], signal.SIGKILL)
        run.shell.wait()
        assert killed_runs.remove_all()
        assert is_gone(run)


def test_terminated_run_removes_all_that_it_has() -> None:
    """Its command does not hear of it: the shell alone is terminated, as make does."""
    with running() as run:
        assert has_devices(run)
        run.shell.terminate()
        run.shell.wait()
        assert is_gone(run)


def test_directory_of_a_run_killed_in_its_beginning_is_removed(tmp_path: Path) -> None:
    made = tmp_path / "mktemp"
    made.write_text('#!/bin/sh\n/bin/mktemp "$@" | tee "$0.made"\nkill -KILL $PPID\n')
    made.chmod(0o755)
    paths = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["tests/marked_run.sh", "true"], env=paths, check=False)
    assert ended.returncode == -signal.SIGKILL
    directory = Path(made.with_suffix(".made").read_text().strip())
    assert directory.is_dir()
    killed_runs.remove_all()
    assert not directory.exists()


def test_control_groups_of_a_killed_cluster_are_removed() -> None:
    """No process has to be in them any more: those of a cluster end with its process 1."""
    with running() as run:
        top = Path("/sys/fs/cgroup/memory")
        group = (top if top.is_dir() else top.parent) / f"crust-tests-{run.directory.name}"
        (group / "kubepods" / "besteffort").mkdir(parents=True)
        run.shell.kill()
        os.kill(run.pids[0], signal.SIGKILL)
        run.shell.wait()
        assert killed_runs.remove_all()
        assert not group.exists()


def test_what_a_running_one_has_stays() -> None:
    with running() as run:
        killed_runs.remove_all()
        assert all(map(lives, run.pids))
        assert has_devices(run)
        assert run.directory.exists()
