"""I/O of a guest on an image of Ceph that QEMU opens, against qemu-img bench through librbd on the same image.

The guest's own cost is measured beside it, with the same two programs: on a local file that is the guest's other
disk. There neither librbd nor a cluster takes part, so a ratio there comes from the guest, virtio and the accelerator
alone.

Both sides open the image with the options and the librbd settings that the guest's disk gets; qemu-img reads the key
from a file. Both ask for the same, one request at a time and then four at once: 4 KiB writes that are stable when
they return (O_DIRECT and O_DSYNC in the guest, into blocks that a file has already, so the guest's journal is not
written; `directsync` on the host: each a write and a flush of librbd), and 1 MiB reads past every cache. A sample is
the time of a whole run, divided by its requests: a rate, on both sides. The start of a run counts little in it: the
guest's threads have started before its clock does, and the writes are many, because the first ones of qemu-img, which
has just opened the image, take longer. The OSD stores on this machine's disk: one in memory answers faster than any
that keeps its data.

The two never have the image at once: RBD would move its lock at each turn. The host's requests go to the end
of the image, which is grown after the guest has made its filesystem, so they overwrite nothing of it.
"""

import asyncio
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import rbd

from benchmarks import figures
from crust.core import volumes
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.kata.guest import image
from examples.kata.vm import accel, images, machine, spec, values

NAME = "ceph-guest"
ROUNDS = 8
WRITES = 480
READS = 48
DEPTHS = (1, 4)
FILESYSTEM_BYTES = 512 << 20
IMAGE_BYTES = 640 << 20
MEMORY_MIB = 1024
"""A guest with less than 512 MiB has no huge pages, and its kernel then takes the 256 pages of a read one by one."""
CACHE = Path(".cache/guest")
CEPH, LOCAL = "image of Ceph", "local file"
GUEST, HOST = "in the guest", "by qemu-img bench"
WRITE, READ = "synced 4 KiB write", "1 MiB read"
_TIMEOUT_S = 300.0
_GOAL = 0.8
_WORKLOAD = """
import collections, ctypes, itertools, json, os, sys, threading, time
writes, reads, *depths = map(int, sys.argv[1:])
if not os.path.exists("/data/f"):
    fd = os.open("/data/f", os.O_RDWR | os.O_CREAT)
    for n in range(reads):
        os.pwrite(fd, b"x" * (1 << 20), n << 20)
    os.fsync(fd)
    os.close(fd)
# O_DIRECT wants whole pages; and huge ones, so it begins at a multiple of their size.
whole = bytearray(max(depths) + 4 << 20)
begin = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % (2 << 20)
memory = memoryview(whole)[begin:]
fd = os.open("/data/f", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
def write(part):
    return os.pwrite, part[:4096], 4096
def read(part):
    return os.preadv, [part], 1 << 20
def milliseconds(ask, count, depth):
    # The loop is the interpreter's own: an emulated processor takes long for a loop in Python.
    def steps(first):
        call, buffer, size = ask(memory[first << 20:first + 1 << 20])
        offsets = [n * size for n in range(first, count, depth)]
        return map(call, itertools.repeat(fd), itertools.repeat(buffer), offsets)
    every = [steps(first) for first in range(depth)]
    # An emulated processor takes as long to start four threads as for ten writes: that is before the clock.
    begin = threading.Barrier(depth)
    def run(calls):
        begin.wait()
        collections.deque(calls, 0)
    # this thread is one of them
    others = [threading.Thread(target=run, args=(calls,)) for calls in every[1:]]
    for thread in others:
        thread.start()
    began = time.perf_counter_ns()
    run(every[0])
    for thread in others:
        thread.join()
    return (time.perf_counter_ns() - began) / count / 1e6
taken = [(milliseconds(write, writes, depth), milliseconds(read, reads, depth)) for depth in depths]
json.dump(taken, sys.stdout)
"""


class BenchFailed(Exception):
    """A program of the measurement failed."""


Key = tuple[str, int, str, str]
"""Operation, requests at once, disk, way."""


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds per request, of whole runs."""

    samples: dict[Key, figures.Samples]
    accelerator: str

    def rate(self, request: str, depth: int, disk: str) -> float:
        """The guest's rate as a part of the host's."""
        host, guest = (self.samples[request, depth, disk, way].median for way in (HOST, GUEST))
        return host / guest

    def report(self) -> figures.Report:
        """The figures against the goal."""
        kind = (
            "KVM"
            if self.accelerator == "kvm"
            else "software emulation (TCG): the guest's processor is slow"
        )
        return figures.Report(
            name=NAME,
            ways=(HOST, GUEST),
            title="An image of Ceph in a microVM",
            method=(
                f"{ROUNDS} rounds of {WRITES} synced writes and {READS} reads, one at a time and {DEPTHS[-1]} at "
                "once; a value is the time of a run, divided by its requests. ext4 in a guest of "
                f"{MEMORY_MIB} MiB, one OSD (BlueStore) on the same machine and disk. The accelerator is {kind}."
            ),
            rows=tuple(
                figures.Row(
                    _label(key),
                    samples,
                    "" if key[-1] == HOST else _label((*key[:-1], HOST)),
                    is_other=key[-1] == HOST,
                )
                for key, samples in self.samples.items()
            ),
            goals=tuple(
                self._goal(request, depth) for request in (WRITE, READ) for depth in DEPTHS
            ),
            if_missed="a request waits for the guest's slow processor under software emulation; KVM was not measured",
            meaning=(
                "librbd runs in QEMU's own process: a guest adds its processor's time and hops between threads, "
                "each of which waits for a processor. The local file shows that without Ceph."
            ),
        )

    def _goal(self, request: str, depth: int) -> figures.Goal:
        rate = self.rate(request, depth, CEPH)
        return figures.Goal(
            f"{_named(request, depth)} in the guest: at least 80 % of the rate through librbd",
            f"{rate:.0%} (a local file in this guest: {self.rate(request, depth, LOCAL):.0%})",
            rate >= _GOAL,
        )


def _named(request: str, depth: int) -> str:
    return f"{request}s, {'one at a time' if depth == 1 else f'{depth} at once'}"


def _label(key: Key) -> str:
    request, depth, disk, way = key
    return f"{_named(request, depth)}, {disk}: {way}"


async def measure() -> Result:
    """Run it in a cluster and a VM of its own."""
    guest_image = await asyncio.to_thread(image.build, CACHE)
    accelerator = await accel.probe(guest_image, CACHE)
    taken: figures.Collector[Key] = figures.Collector()
    with (
        TemporaryDirectory(prefix="crust-bench-") as place,
        ceph_cluster.running(Path(place) / "ceph", store="bluestore") as ceph,
    ):
        disks = await asyncio.to_thread(_Disks.made, ceph, Path(place))
        wanted = spec.MachineSpec(
            "bench", guest_image, accelerator.kind, memory_mib=MEMORY_MIB, volume_slots=1
        )
        vm = await machine.start(wanted, Path(place) / "vm")
        try:
            for number in range(ROUNDS):
                for disk in (CEPH, LOCAL):
                    await _in_guest(vm, disks, disk, number, taken)
                    await asyncio.to_thread(disks.grow, disk)
                    await asyncio.to_thread(_on_host, disks, disk, taken)
        finally:
            await vm.stop()
    order = sorted(taken.values, key=lambda key: (key[0] == READ, *key[1:3], key[3] == GUEST))
    samples = {key: figures.Samples.of("ms", taken.values[key]) for key in order}
    return Result(samples, accelerator.kind)


async def _nothing() -> None:
    """Nobody else has the cluster: no claim is recorded."""


@dataclass(frozen=True, slots=True)
class _Disks:
    """The two disks that are measured. qemu-img opens `opened`: the guest's disk, with a file for the key."""

    ceph: CephCluster
    opened: images.OpenedImage
    local: Path

    @classmethod
    def made(cls, ceph: CephCluster, place: Path) -> "_Disks":
        with ceph.ioctx(POOL) as ioctx:
            rbd.RBD().create(ioctx, "bench", FILESYSTEM_BYTES, old_format=False, features=61)
        image = volumes.NetworkImage(ceph.fsid, POOL, "", "bench", (ceph.monitors,), "admin")
        opened = images.OpenedImage(image, place / "host.conf", ceph.keys["client.admin"])
        opened.write_conf()
        with opened.conf.open("a") as conf:  # qemu-img bench takes no secret
            conf.write(f"keyring = {ceph.directory}/keyring\n")
        local = place / "local.img"
        local.touch()
        os.truncate(local, FILESYSTEM_BYTES)
        return cls(ceph, opened, local)

    def grow(self, disk: str) -> None:
        """Add the target of the host's requests, if it does not exist."""
        if disk == LOCAL:
            os.truncate(self.local, IMAGE_BYTES)
            return
        with self.ceph.ioctx(POOL) as ioctx, rbd.Image(ioctx, "bench") as opened:
            if opened.size() != IMAGE_BYTES:
                opened.resize(IMAGE_BYTES, allow_shrink=False)

    async def plug(self, vm: machine.Machine, disk: str) -> None:
        """Give the disk to the guest, which finds its filesystem or makes it."""
        if disk == LOCAL:
            await vm.attach("disk", self.local)
        else:
            image, key = self.opened.image, self.opened.key
            await vm.attach_image("disk", image, key, _nothing, read_only=False)
        made = values.VolumeMount("disk", "ext4", format=volumes.GuestFormat())
        await vm.guest.mount(made)

    def node(self, disk: str) -> dict[str, object]:
        """The block node that qemu-img opens, with the options of the guest's disk."""
        if disk == LOCAL:
            return {"driver": "file", "filename": str(self.local), "aio": "native"}
        node = self.opened.node("host", "", read_only=False)
        del node["key-secret"]
        return node


async def _in_guest(
    vm: machine.Machine, disks: _Disks, disk: str, number: int, taken: figures.Collector[Key]
) -> None:
    await disks.plug(vm, disk)
    command = ("python3", "-c", _WORKLOAD, *map(str, (WRITES, READS, *DEPTHS)))
    name = f"bench-{'local' if disk == LOCAL else 'ceph'}-{number}"
    wanted = values.ContainerSpec(name, command, binds=(values.Bind("disk", "/data"),))
    done = await vm.guest.run(wanted, limit_bytes=1 << 22, timeout_s=_TIMEOUT_S)
    if done.exit.code != 0:
        raise BenchFailed(done.stderr.decode(errors="replace")[-500:])
    await vm.detach("disk")
    for depth, (write, read) in zip(DEPTHS, json.loads(done.stdout), strict=True):
        taken.add((WRITE, depth, disk, GUEST), write)
        taken.add((READ, depth, disk, GUEST), read)


def _on_host(disks: _Disks, disk: str, taken: figures.Collector[Key]) -> None:
    node = disks.node(disk)
    read = ("-t", "none", "-s", str(1 << 20), "-c", str(READS))
    write = ("-t", "directsync", "-w", "-s", "4096", "-c", str(WRITES))
    _bench(node, "-w", *read)  # write the blocks that are read, or overwritten as in the guest
    for depth in DEPTHS:
        at_once = ("-d", str(depth))
        taken.add((WRITE, depth, disk, HOST), _bench(node, *at_once, *write) / WRITES)
        taken.add((READ, depth, disk, HOST), _bench(node, *at_once, *read) / READS)


def _bench(node: dict[str, object], *options: str) -> float:
    """Milliseconds of one run of qemu-img bench behind the filesystem."""
    place = ("-o", str(FILESYSTEM_BYTES))
    opened = f"json:{json.dumps(node)}"
    argv = ("qemu-img", "bench", *place, *options, opened)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    completed = re.search(r"Run completed in ([0-9.]+) seconds", done.stdout)
    if completed is None:
        raise BenchFailed(done.stderr[-500:])
    return float(completed[1]) * 1000
