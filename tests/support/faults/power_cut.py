"""What is left of a directory after a power cut, at each point of a run: a model of files and names.

`recorded` watches this process. Durable are a file's content as of its last fsync, and a directory's names as of its
own. Everything else is lost: a file whose name was synced and its content was not is empty, a removed name whose
directory was not synced is back. With `names_survive` all names are as they are when the power goes, as most
filesystems' journals have it at some moment; contents that were not synced are lost just the same.

What the kernel and other programs write, to a loop device or a mounted filesystem, the model does not see. When a
program ended, a filesystem was unmounted, or something on it was synced, all files are durable as they are:
tests/integration/host/filesystems/test_mkfs.py shows that an mkfs syncs its last write.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crust.host.mounts import mount_api
from crust.host.process import commands
from tests.support.faults import syncs

Tree = dict[str, Path | None]
"""Relative paths: a file's saved content, None for a directory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The state after a power cut, when so many marks had been set."""

    tree: Tree
    marks: int

    def rebuild(self, root: Path) -> None:
        """Make the directory `root` hold what is left."""
        root.mkdir(mode=0o700)
        for path, content in sorted(self.tree.items()):
            if content is None:
                (root / path).mkdir(mode=0o700)
            else:
                copy_sparse(content, root / path)


@dataclass
class _File:
    saved: Path
    """The content as of the last sync; empty until then."""


@dataclass
class _Directory:
    names: dict[str, "_File | _Directory"] = field(default_factory=dict)
    """The names as of the last sync. What they name stays theirs whatever its directory is called meanwhile."""


@dataclass
class Recorder:
    """The names and contents below `root`, now and durably."""

    root: Path
    store: Path
    names_survive: bool
    cuts: list[Cut] = field(default_factory=list)
    _marks: int = 0
    _now: dict[str, _File | _Directory] = field(default_factory=lambda: {"": _Directory()})
    _count: int = 0
    _guard: threading.RLock = field(default_factory=threading.RLock)

    def mark(self) -> None:
        """A call was answered: from here on its work must survive."""
        with self._guard:
            self._marks += 1
            self.cuts.append(Cut(self._tree(), self._marks))

    def synced(self, path: str) -> None:
        """An fsync of `path` has ended."""
        with self._guard:
            relative = self._relative(path)
            if relative is None:
                self.all_synced()
            elif isinstance(node := self._now.get(relative), _Directory):
                node.names = {
                    os.path.basename(name): child
                    for name, child in self._now.items()
                    if name and os.path.dirname(name) == relative
                }
            elif node is not None:
                node.saved = self._save(path)
            self._changed()

    def all_synced(self) -> None:
        """What other programs, or the kernel, wrote is durable."""
        with self._guard:
            for path, file in self._now.items():
                if isinstance(file, _File) and path.endswith(".img"):
                    file.saved = self._save(str(self.root / path))
            self._changed()

    def named(self, path: str, *, source: str = "", linked: bool = False) -> None:
        """`path` exists now: made, or renamed or linked from `source`."""
        with self._guard:
            relative = self._relative(path)
            if not relative:
                return
            if source:
                old = self._relative(source)
                assert old is not None, f"{source} comes from outside"
                self._now[relative] = self._now[old] if linked else self._now.pop(old)
                self._move_below(old, relative)
            elif os.path.isdir(path):
                self._now[relative] = _Directory()
            elif relative not in self._now:
                self._now[relative] = _File(self._blob())
            self._changed()

    def _move_below(self, old: str, new: str) -> None:
        """What is in a directory that has another name now."""
        for path in [path for path in self._now if path.startswith(f"{old}/")]:
            self._now[new + path.removeprefix(old)] = self._now.pop(path)

    def unnamed(self, path: str) -> None:
        with self._guard:
            relative = self._relative(path)
            if relative is not None and relative in self._now:
                del self._now[relative]
                self._changed()

    def _relative(self, path: str) -> str | None:
        # The driver reaches its pool by a descriptor of the directory.
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if path == str(self.root):
            return ""
        return path[len(str(self.root)) + 1 :] if path.startswith(f"{self.root}/") else None

    def _blob(self) -> Path:
        self._count += 1
        blob = self.store / str(self._count)
        blob.touch(mode=0o600)
        return blob

    def _save(self, path: str) -> Path:
        blob = self._blob()
        blob.unlink()
        copy_sparse(Path(path), blob)
        return blob

    def _tree(self) -> Tree:
        if self.names_survive:
            return {path: _content(node) for path, node in self._now.items() if path}
        tree: Tree = {}
        pending = [("", self._now[""])]
        while pending:
            directory, node = pending.pop()
            for name, child in node.names.items() if isinstance(node, _Directory) else ():
                path = os.path.join(directory, name)
                tree[path] = _content(child)
                pending.append((path, child))
        return tree

    def _changed(self) -> None:
        tree = self._tree()
        if not self.cuts or self.cuts[-1].tree != tree:
            self.cuts.append(Cut(tree, self._marks))


def _content(node: _File | _Directory) -> Path | None:
    return node.saved if isinstance(node, _File) else None


@contextmanager
def recorded(root: Path, store: Path, *, names_survive: bool) -> Iterator[Recorder]:
    """Watch what this process does to the directory `root`. Directories that exist below it are durable."""
    recorder = Recorder(root, store, names_survive)
    for path in sorted(root.rglob("*")):
        recorder.named(str(path))
        recorder.synced(str(path.parent))
    recorder.cuts.clear()

    def after(name: str, arguments: tuple[Any, ...], _result: Any) -> None:
        match name:
            case "fsync" | "fdatasync":
                recorder.synced(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            case "rename" | "link":
                source, path = map(os.fspath, arguments)
                recorder.named(path, source=source, linked=name == "link")
            case "unlink" | "rmdir":
                recorder.unnamed(os.fspath(arguments[0]))
            case "mkdir":
                recorder.named(os.fspath(arguments[0]))
            case _ if arguments[1] & os.O_CREAT:
                recorder.named(os.fspath(arguments[0]))

    calls = ("fsync", "fdatasync", "open", "mkdir", "rename", "link", "unlink", "rmdir")
    with syncs.watched(calls, after=after), pytest.MonkeyPatch.context() as patched:
        patched.setattr(commands, "run_command", _program(recorder, commands.run_command))
        patched.setattr(mount_api, "unmount", _unmount(recorder, mount_api.unmount))
        yield recorder


def _program(
    recorder: Recorder, real: Callable[..., Awaitable[Any]]
) -> Callable[..., Awaitable[Any]]:
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return await real(*args, **kwargs)
        finally:
            await asyncio.to_thread(recorder.all_synced)

    return called


def _unmount(recorder: Recorder, real: Callable[[str], None]) -> Callable[[str], None]:
    def called(target: str) -> None:
        real(target)
        recorder.all_synced()

    return called


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file's data, size and mode, and none of its holes."""
    with source.open("rb") as old, target.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        end = 0
        while end < size:
            try:
                start = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError:  # a hole up to the end
                break
            end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            new.seek(start)
            new.write(os.pread(old.fileno(), end - start, start))
    target.chmod(source.stat().st_mode & 0o777)
