"""The system calls of a driver and its programs (strace), and whether what they write is durable in time.

`run` traces a program; `events` reads the trace: what was written, which names were given or removed, what was
synced, and the marks of `traced_life`. `late` replays them. At each moment it knows the files and directories of the
pool, and the loop devices, that have something unsynced: no fsync began after it and ended. The rules:

1. at an answer there is nothing unsynced;
2. a file gets its name (rename, link) after its content is synced, and a directory after all that is in it;
3. a step begins when the one before it is durable: nothing is written, named or removed while another object has
   something unsynced. So an image comes before its record, "formatting" before mkfs, and mkfs before "formatted".

A directory whose name begins with a dot is made or removed: what is in it has no order, and what is removed from it
needs no sync. A temporary file's own name need not survive. What the reserve and the lock files hold, neither.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.nodes.traced_life import MARK

_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate")
_NAMES = ("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat",
          "mkdir", "mkdirat", "rmdir", "creat", "open", "openat", "truncate")  # fmt: skip
_SYNCS = ("fsync", "fdatasync", "syncfs", "sync", "sync_file_range", "msync")
_OTHER = ("copy_file_range", "sendfile", "ioctl", "dup2", "dup3")
_WRITING_IOCTLS = ("BTRFS_IOC_CLONE", "FICLONE", "BLKZEROOUT", "BLKDISCARD")
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+)")
_UNFINISHED = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_KIND_OF_DEVICE = re.compile(r"<(?:block|char) \d+:\d+>")
_DESCRIPTOR = re.compile(r"\d+<([^>]*)>")
_BELOW_A_DESCRIPTOR = re.compile(r'"/proc/self/fd/(\d+)/(\./|\.(?="))?')
"""The driver reaches its pool by descriptors of the directory and its folders, and nothing else in this way."""
_DESCRIPTOR_OF = re.compile(r"\d+ +(?:openat\(.*O_PATH.*|dup[23]\(.*) = (\d+)<([^>]*)>$")
_TEXT = re.compile(r'"([^"]*)"')
_NOT_KEPT = ("records.reserve", "tools.lock", "driver.lock")

Kind = Literal["write", "create", "name", "unname", "directory", "sync", "mark"]


@dataclass(frozen=True, slots=True)
class Event:
    """What a system call did. `began` and `ended` are places in the trace; `source` is a renamed file's old path."""

    kind: Kind
    path: str
    began: int
    ended: int
    process: int
    source: str = ""


def run(argv: Sequence[str], trace: Path) -> None:
    """Run a program to its end under strace, with all its children."""
    calls = ",".join((*_WRITES, *_NAMES, *_SYNCS, *_OTHER))
    strace = ("strace", "-f", "--seccomp-bpf", "-yy", "-o", str(trace), "-e", f"trace={calls}")
    subprocess.run([*strace, *argv], check=True, timeout=300)


def events(trace: Iterable[str], pool: str) -> list[Event]:
    """The successful calls that write, name or sync, in the order in which they ended."""
    begun: dict[tuple[str, str], tuple[int, str]] = {}
    found: list[Event] = []
    held: dict[str, str] = {}

    def leads_to(match: re.Match[str]) -> str:
        return f'"{held.get(match[1], pool)}/'

    for number, line in enumerate(trace):
        line = _BELOW_A_DESCRIPTOR.sub(leads_to, _KIND_OF_DEVICE.sub("", line.rstrip("\n")))
        began = number
        if match := _UNFINISHED.match(line):
            begun[match[1], match[2]] = (number, match[3])
            continue
        if match := _RESUMED.match(line):
            began, start = begun.pop((match[1], match[2]))
            line = f"{match[1]} {match[2]}({start}{match[3]}"
        if (match := _DESCRIPTOR_OF.match(line)) and match[2].startswith(f"{pool}/"):
            held[match[1]] = match[2]
        if match := _LINE.match(line):
            made = _event(match[2], match[3], failed=match[4].startswith("-"))
            if made is not None:
                kind, path, source = made
                found.append(Event(kind, path, began, number, int(match[1]), source))
    return found


def _event(call: str, arguments: str, *, failed: bool) -> tuple[Kind, str, str] | None:
    paths = _TEXT.findall(arguments)
    if call == "rmdir" and paths[0].startswith(MARK):
        return "mark", os.path.basename(paths[0]), ""
    if failed:
        return None
    if call in _SYNCS:
        assert call in ("fsync", "fdatasync"), f"{call} is not understood here"
        return "sync", _descriptors(arguments)[0], ""
    if call in _NAMES:
        return _named(call, arguments, paths)
    if call.startswith("dup"):
        return None
    opened = _descriptors(arguments)
    if call == "ioctl":
        writes = any(name in arguments for name in _WRITING_IOCTLS)
        return ("write", opened[0], "") if writes else None
    return "write", opened[1 if call == "copy_file_range" else 0], ""


def _named(call: str, arguments: str, paths: list[str]) -> tuple[Kind, str, str] | None:
    if call in ("open", "openat", "creat"):
        creates = call == "creat" or "O_CREAT" in arguments
        return ("create", paths[0], "") if creates else None
    if call == "truncate":
        return "write", paths[0], ""
    if call.startswith(("rename", "link", "symlink")):
        return "name", paths[1], paths[0] if call.startswith("rename") else ""
    if call.startswith("mkdir"):
        return "directory", paths[0], ""
    return "unname", paths[0], ""


def _descriptors(arguments: str) -> list[str]:
    return _DESCRIPTOR.findall(arguments) or [""]


Content = tuple[Literal["content of"], str]
Names = tuple[Literal["names in"], str]
Unsynced = dict[Content | Names, int]
"""What has something that is not known to be durable, and since which place in the trace."""


def late(pool: str, happened: Iterable[Event], *, known: Iterable[str] = ()) -> Iterator[str]:
    """Each breach of a rule, in words. `known` are directories of a pool that an earlier process may not have synced.

    They must be synced before the first answer; files that are there count as durable.
    """
    unsynced: Unsynced = {("names in", each): -1 for each in known}
    start = True
    names = set(known)
    for event in happened:
        if event.kind == "mark":
            yield from (
                f"{event.path} was answered before {_words(each)} was synced" for each in unsynced
            )
            unsynced, start = {}, False
        elif event.kind == "sync":
            _synced(unsynced, event)
        elif _is_kept(event.path, pool):
            dirtied = _dirtied(event, names)
            if not start and (dirtied is not None or _aside(event.path)):
                yield from _hasty(unsynced, event)
            if dirtied is not None:
                unsynced[dirtied] = event.ended
            _moved(unsynced, event, names)


def _is_kept(path: str, pool: str) -> bool:
    if path.startswith("/dev/loop") and path != "/dev/loop-control":
        return True
    return path.startswith(f"{pool}/") and os.path.basename(path) not in _NOT_KEPT


def _is_temporary(path: str) -> bool:
    return os.path.basename(path).startswith(".")


def _aside(path: str) -> str:
    """The directory that is made or removed, and has the path in it; empty if none is."""
    directory = os.path.dirname(path)
    return directory if _is_temporary(directory) else ""


def _dirtied(event: Event, names: set[str]) -> Content | Names | None:
    """What the event leaves to be synced."""
    if event.kind == "write":
        return "content of", event.path
    is_removed = event.kind == "name" and not _is_temporary(event.source or event.path)
    if (_is_temporary(event.path) and not is_removed) or event.path.startswith("/dev/"):
        return None
    if event.kind == "unname" and _aside(event.path):
        return None
    if event.kind == "create" and event.path in names:
        return None
    return "names in", os.path.dirname(event.path)


def _hasty(unsynced: Unsynced, event: Event) -> Iterator[str]:
    """What should have been synced before the event: all but the rest of the file that is being written."""
    same: tuple[Content | Names, ...] = ()
    if aside := _aside(event.path):
        same = tuple(each for each in unsynced if aside in (each[1], _aside(each[1])))
    elif event.kind == "write":
        same = (("content of", event.path),)
        if not _is_temporary(event.path):
            same = (*same, ("names in", os.path.dirname(event.path)))
    for each in unsynced:
        if each not in same:
            yield f"{event.kind} of {event.path} before {_words(each)} was synced"


def _synced(unsynced: Unsynced, event: Event) -> None:
    for each in (("content of", event.path), ("names in", event.path)):
        if unsynced.get(each, event.began) < event.began:
            del unsynced[each]


def _moved(unsynced: Unsynced, event: Event, names: set[str]) -> None:
    gone = event.source if event.kind == "name" else event.path if event.kind == "unname" else ""
    names.discard(gone)
    if event.kind == "unname":  # a directory
        unsynced.pop(("names in", gone), None)
    since = unsynced.pop(("content of", gone), None)
    if event.kind != "unname":
        names.add(event.path)
        if since is not None:
            unsynced["content of", event.path] = since


def _words(each: Content | Names) -> str:
    return f"the {each[0]} {each[1]}"
