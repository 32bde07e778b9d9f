"""Removes what killed runs have left: processes, frozen filesystems, loop devices, control groups, directories.

All files of a run lie below a directory /tmp/ct-XXXXXX, whose file `.run` the run's first process has locked until it
ends (flock(2)); tests/marked_run.sh makes both, while it has the lock of /tmp. The directory's name is the mark of a
run: its processes have it in their environment or among their mounts, its control groups in their name, its loop
devices in the name of their file; or a loop device is upon another one of the run, as a kubelet's upon a raw volume,
or its file lies on one, or on an overlay upon the directory, as the root of a booted machine is. A run is dead if
nobody has its lock. If nobody has the lock of /tmp, and its directory is empty, it was killed before it had one. What
has no mark stays.

Processes end first: a directory that is removed under the mounts of a process takes them out of its namespace, and
then a filesystem on a loop device keeps the device, whose file keeps the filesystem, and nothing reaches either. The
devices are listed before that: with its processes a machine's mounts have gone.

The program says what it removed, and ends with 1 if something of a dead run stays. Without root it sees, and ends,
processes of the same user alone.
"""

import errno
import fcntl
import os
import re
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crust.blockdriver.host import fsfreeze
from crust.core import errors
from crust.host.block import loop, loopctl
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from tests.support import trees

RUNS = "/tmp"
_MARK = re.compile(rf"{RUNS}/(ct-[0-9A-Za-z]{{6}})(?![0-9A-Za-z])")
_UPPER = re.compile(rf" - overlay .*,upperdir={_MARK.pattern}")
_GONE = (FileNotFoundError, ProcessLookupError)
_ELSEWHERE = (*_GONE, NotADirectoryError)
"""What a process sees of a path that another one named."""
_ROUNDS = 20
"""A process may start another one while it is being ended; a device may lie on another one."""
_END_S = 60


def remove_all() -> bool:
    """Remove what dead runs have left; returns whether all of it is gone."""
    with syscalls.closing(os.open(RUNS, os.O_RDONLY | os.O_DIRECTORY)) as beginnings:
        fcntl.flock(beginnings, fcntl.LOCK_EX)
        dead = [name for name in sorted(_directories()) if _is_dead(name)]
    left = [name for name in dead if not _remove(name)]
    return not left


def _is_dead(name: str) -> bool:
    """Whether the run has ended, or was killed while it began. Another directory of such a name is no run's."""
    try:
        with open(f"{RUNS}/{name}/.run", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # it lives, or is another user's
        return False
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            return not os.listdir(f"{RUNS}/{name}")
        return False
    return True


def _remove(name: str) -> bool:
    ended = 0
    known: set[loop.LoopDevice] = set()
    for _ in range(_ROUNDS):
        found = marked()
        pids = found.processes.get(name, set())
        if not pids:
            break
        known.update(devices(found).get(name, ()))
        ended += len(pids)
        _end(pids)
    detached = _detach(name, known)
    for group in sorted(_groups(name), key=len, reverse=True):
        with suppress(OSError):  # another process is in it
            os.rmdir(group)
    directory = Path(RUNS, name)
    with suppress(OSError):  # what stays is named
        trees.remove(directory)
    left = [*marked().processes.get(name, ()), *(device.path for device in _attached(name, known))]
    left.extend(str(path) for path in (directory,) if path.exists())
    if ended or detached or left:
        what = f"{ended} processes and {detached} loop devices of the run {name}"
        sys.stderr.write(f"removed {what}; left: {left or 'nothing'}\n")
    return not left


def _directories() -> Iterator[str]:
    for path in Path(RUNS).iterdir():
        if _MARK.fullmatch(str(path)):
            yield path.name


@dataclass(frozen=True, slots=True)
class Marked:
    """The processes of each run; and the runs of the mounts of overlays upon their directories, by the mount's id."""

    processes: Mapping[str, Set[int]]
    overlays: Mapping[int, str]

    def run_of(self, device: loop.LoopDevice) -> str | None:
        """The run of the overlay on which the device's file lies, as a process of a run sees it."""
        for pid in set().union(*self.processes.values()) if self.overlays else ():
            with suppress(*_ELSEWHERE):
                path = f"/proc/{pid}/root{device.backing}"
                with syscalls.closing(os.open(path, os.O_PATH)) as descriptor:
                    status = os.fstat(descriptor)
                    mount = mountinfo.mount_id_of("self", str(descriptor))
                if (status.st_dev, status.st_ino) == device.file and mount in self.overlays:
                    return self.overlays[mount]
        return None


NOTHING = Marked({}, {})


def marked() -> Marked:
    """Not this process and its parents, which may be started with a run's directory too."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    overlays: dict[int, str] = {}
    own = set(_own_line())
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in own:
            continue
        for name in _MARK.findall(_text(f"/proc/{entry}/environ")):
            found[name].add(int(entry))
        for line in _text(f"/proc/{entry}/mountinfo").splitlines():
            for name in _MARK.findall(line):
                found[name].add(int(entry))
            # a bind mount may be of anybody's filesystem
            overlays |= {int(line.split()[0]): name for name in _UPPER.findall(line)}
    return Marked(found, overlays)


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError as err:
        # EINVAL: the mounts of a process that has ended, and has a parent that did not wait for it (proc(5))
        is_others = err.errno == errno.EACCES and os.geteuid() != 0
        if not is_others and err.errno not in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
            raise
        return ""


def _own_line() -> Iterator[int]:
    pid = os.getpid()
    while pid:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(*_GONE), syscalls.closing(os.pidfd_open(pid)) as descriptor:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _END_S)


def _groups(name: str) -> Iterator[str]:
    """The control groups that have the run's name: they outlive their processes."""
    for pattern in (f"crust-tests-{name}*", f"*/crust-tests-{name}*"):  # cgroup v2, and v1
        for top in Path("/sys/fs/cgroup").glob(pattern):
            yield from (directory for directory, _, _ in os.walk(top))


def devices(found: Marked) -> Mapping[str, list[loop.LoopDevice]]:
    """The loop devices of each run."""
    every = loop.list_named(lambda _: True) if os.geteuid() == 0 else ()
    runs: dict[int, str] = {}
    for device in every:
        marks = _MARK.findall(f"{device.backing} {device.tag}")
        if name := marks[0] if marks else found.run_of(device):
            runs[_number(device)] = name
    # a file may lie on a device that is known to be a run's only in the round before
    for _ in every:
        for device in every:
            if name := runs.get(_below(device)):
                runs.setdefault(_number(device), name)
    owned: defaultdict[str, list[loop.LoopDevice]] = defaultdict(list)
    for device in every:
        if _number(device) in runs:
            owned[runs[_number(device)]].append(device)
    return owned


def _number(device: loop.LoopDevice) -> int:
    """As st_dev of a file has it, if the file lies on this device."""
    return os.makedev(device.identity.major, device.identity.minor)


def _below(device: loop.LoopDevice) -> int:
    """The number of the device that it is upon, or that its file lies on."""
    try:
        with syscalls.closing(os.open(device.path, os.O_RDONLY)) as descriptor:
            status = loopctl.status(descriptor)
    except OSError as err:
        if err.errno not in (errno.ENXIO, errno.ENOENT):  # another run has detached it meanwhile
            raise
        return 0
    return status.backing_device or status.device


def _attached(name: str, known: Iterable[loop.LoopDevice]) -> Set[loop.LoopDevice]:
    """The loop devices that the run still has: these, and what has its mark."""
    return {*filter(loop.is_attached, known), *devices(NOTHING).get(name, ())}


def _detach(name: str, known: Iterable[loop.LoopDevice]) -> int:
    """Detach the run's loop devices, those that lie on others first; returns how many."""
    before = {device.path for device in _attached(name, known)}
    for _ in range(_ROUNDS):
        for device in _attached(name, known):
            try:
                loop.detach(device)
            except (
                errors.CrustError
            ):  # a filesystem is on it, and on that perhaps another device's file
                _thaw(device)
    return len(before - {device.path for device in _attached(name, known)})


def _thaw(device: loop.LoopDevice) -> None:
    """A filesystem that is frozen keeps its device after its last mount has gone."""
    for fs_type in ("ext4", "xfs", "btrfs"):
        with suppress(errors.CrustError):
            fsfreeze.thaw_unmounted(device.path, fs_type)


if __name__ == "__main__":
    sys.exit(0 if remove_all() else 1)
