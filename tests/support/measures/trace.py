"""Count the functions and files of crust that run in one CSI call: `make trace`; --verbose names them.

A profile function (`sys.setprofile`, in every thread) notes crust's own functions; generated code, lambdas and
comprehensions do not count. Before a call that processes repeat (a creation, a publish through the proxy) another
volume has had it, so that no cache that is filled once is in its figure; the stage is the first of its driver. Of
CreateVolume and DeleteVolume the files of records are counted too: those opened for reading, and those that are made
under their name or get it (rename or link), from Python's audit events, and what is synced.
The syncs between two renames are one wait for the disk: none of them orders another.
"""

import argparse
import asyncio
import logging
import os
import stat
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import crust
from tests.support.drivers.block_driver import Bench
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

CRUST = f"{os.path.dirname(crust.__file__)}/"
GENERATED = f"{CRUST}wire/"
T = TypeVar("T")
RECORD = ".json"
SETTLE_S = 0.5


class Trace:
    """Notes what runs while it is on."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._on = False
        self._functions: defaultdict[str, set[str]] = defaultdict(set)
        self._records_read = self._records_written = self._files = self._directories = 0
        self._waits, self._is_ordered = 0, True

    def install(self) -> None:
        """Watch this process until it ends."""
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._counting(getattr(os, name)))
        sys.addaudithook(self._audit)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    async def print_call(self, title: str, call: Awaitable[T], *, records: bool = False) -> T:
        """Await `call`, and print what ran."""
        await asyncio.sleep(SETTLE_S)  # tasks of the calls before
        self._functions.clear()
        self._records_read = self._records_written = self._files = self._directories = 0
        self._waits, self._is_ordered = 0, True
        self._on = True
        answer = await call
        self._on = False
        functions = sum(len(names) for names in self._functions.values())
        print(f"{title:42}{functions:4} functions in {len(self._functions):2} files")
        if records:
            print(
                f"{'':42}{self._records_read:4} record files read, {self._records_written} records written,"
                f" {self._waits} waits for the disk ({self._files} files, {self._directories} directories)"
            )
        if self._verbose:
            for path, names in sorted(self._functions.items()):
                print(f"  {path:46}{len(names):3}  {', '.join(sorted(names))}")
        return answer

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if not self._on or event != "call" or not code.co_filename.startswith(CRUST):
            return
        if code.co_filename.startswith(GENERATED) or code.co_name.startswith("<"):
            return
        self._functions[code.co_filename.removeprefix(CRUST)].add(code.co_qualname)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in ("os.rename", "os.link"):
            self._records_written += str(arguments[1]).endswith(RECORD)
            self._is_ordered = True
        elif event == "open" and arguments[2] & os.O_CREAT:
            self._records_written += str(arguments[0]).endswith(RECORD)
        elif event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self._records_read += str(arguments[0]).endswith(RECORD)

    def _counting(self, sync: Any) -> Any:
        def counted(fd: int) -> None:
            is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            self._directories += self._on and is_directory
            self._files += self._on and not is_directory
            self._waits += self._on and self._is_ordered
            self._is_ordered = False
            sync(fd)

        return counted


async def through_proxy_and_shim(trace: Trace, root: str) -> None:
    """A first deferred publish of a volume, over sockets, with a fake driver and no kernel."""
    async with FakeNode(Places.make(root)) as node, node.handler():
        for number in range(3):
            target = node.places.target(f"earlier-{number}")
            await node.co.publish(f"vol-{number}", target)
            await node.co.unpublish(f"vol-{number}", target)
        target = node.places.target("one")
        publish = node.co.publish("vol-9", target)
        await trace.print_call("deferred NodePublish, proxy and shim", publish)
        await node.co.unpublish("vol-9", target)


async def inside_the_driver(trace: Trace, root: str) -> None:
    """The life of a volume in crust's driver, engine files; its servicers' methods are called."""
    bench = Bench(Path(root))
    # two: the driver asks first beside an existing file whether the filesystem clones files
    earlier = [await bench.create(name) for name in ("earliest", "earlier")]
    volume = await trace.print_call("CreateVolume (files)", bench.create("one"), records=True)
    await trace.print_call("NodeStage of a new ext4", bench.stage(volume.volume_id))
    target = bench.target("host")
    await trace.print_call("NodePublish on the host", bench.publish(volume.volume_id, target))
    await bench.unpublish(volume.volume_id, target)
    target = bench.target("guest")
    publish = bench.publish(volume.volume_id, target, deferred=True)
    await trace.print_call("deferred NodePublish inside the driver", publish)
    await bench.unpublish(volume.volume_id, target)

    await bench.unstage(volume.volume_id)
    for made in earlier:
        await bench.delete(made.volume_id)
    delete = bench.delete(volume.volume_id)
    await trace.print_call("DeleteVolume (files)", delete, records=True)
    bench.let_go()


def main() -> None:
    """Run the calls, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="name the functions of each file")
    trace = Trace(verbose=parser.parse_args().verbose)
    trace.install()
    logging.getLogger().addHandler(logging.NullHandler())  # only the figures are printed
    for part in (through_proxy_and_shim, inside_the_driver):
        with tempfile.TemporaryDirectory(prefix="ct-") as root:
            asyncio.run(part(trace, root))


if __name__ == "__main__":
    main()
