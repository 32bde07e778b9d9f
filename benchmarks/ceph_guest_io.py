"""I/O of a guest on an image of Ceph that QEMU opens, against qemu-img bench through librbd on the same image.

What the guest itself costs is measured beside it, with the same two programs: on a local file that is the guest's
other disk. There neither librbd nor a cluster takes part, so a ratio there comes from the guest, virtio and the
accelerator alone.

Both sides ask for the same: one request at a time; a 4 KiB write that is stable when it returns (O_DIRECT and O_DSYNC
in the guest, into blocks that a file has already, so the guest's journal is not written; a write and a flush on the
host); 1 MiB reads past every cache. The OSD stores on this machine's disk: one in memory answers faster than any that
keeps what it is given.

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
from crust import volumes
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from examples.kata.guest import image
from examples.kata.vm import accel, machine, spec, values

NAME = "ceph-guest"
ROUNDS = 3
WRITES = 200
READS = 48
FILESYSTEM_BYTES = 512 << 20
IMAGE_BYTES = 640 << 20
CACHE = Path(".cache/guest")
CEPH, LOCAL = "image of Ceph", "local file"
GUEST, HOST = "in the guest", "by qemu-img bench"
WRITE, READ = "synced 4 KiB write", "1 MiB read"
_TIMEOUT_S = 300.0
_GOAL = 0.8
_WORKLOAD = """
import json, os, sys, time
writes, reads = map(int, sys.argv[1:])
fd = os.open("/data/f", os.O_RDWR | os.O_CREAT)
for n in range(reads):
    os.pwrite(fd, b"x" * (1 << 20), n << 20)
os.fsync(fd)
os.close(fd)
# Memory of this size is a mapping of its own and begins 16 bytes into it; O_DIRECT wants whole pages.
memory = memoryview(bytearray(4 << 20))[4080:][:1 << 20]
taken = {"write": [], "read": []}
fd = os.open("/data/f", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
for n in range(writes):
    began = time.perf_counter_ns()
    os.pwrite(fd, memory[:4096], n * 4096)
    taken["write"].append(time.perf_counter_ns() - began)
for n in range(reads):
    began = time.perf_counter_ns()
    os.preadv(fd, [memory], n << 20)
    taken["read"].append(time.perf_counter_ns() - began)
json.dump(taken, sys.stdout)
"""


class BenchFailed(Exception):
    """A program of the measurement failed."""


Key = tuple[str, str, str]
"""Operation, disk, way."""


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by operation, disk and way."""

    samples: dict[Key, figures.Samples]
    accelerator: str

    def times(self, what: str, disk: str) -> float:
        """How many times as long as the host the guest takes."""
        return self.samples[what, disk, GUEST].median / self.samples[what, disk, HOST].median

    def report(self) -> figures.Report:
        """The figures against the goal."""
        kind = (
            "KVM"
            if self.accelerator == "kvm"
            else "software emulation (TCG): the guest's processor is slow"
        )
        return figures.Report(
            name=NAME,
            title="An image of Ceph in a microVM",
            method=(
                f"{ROUNDS} rounds of {WRITES} synced writes and {READS} reads, one at a time; ext4 in the guest, one "
                f"OSD (BlueStore) on the same machine and disk. The accelerator is {kind}."
            ),
            rows=tuple(
                figures.Row(
                    f"{what}, {disk}: {way}", each, "" if way == HOST else f"{what}, {disk}: {HOST}"
                )
                for (what, disk, way), each in self.samples.items()
            ),
            goals=tuple(self._goal(what) for what in (WRITE, READ)),
            meaning=(
                "librbd runs in QEMU's own process. The ratio of the local file is what the guest, virtio and the "
                "accelerator cost without Ceph; it belongs to a faster disk, so compare the milliseconds that the "
                f"guest adds: to a synced write {self._added(WRITE)}, to a read {self._added(READ)}."
            ),
        )

    def _goal(self, what: str) -> figures.Goal:
        times = self.times(what, CEPH)
        return figures.Goal(
            f"a {what} in the guest has at least 80 % of the rate through librbd",
            f"{1 / times:.0%} (a local file in this guest: {1 / self.times(what, LOCAL):.0%})",
            1 / times >= _GOAL,
        )

    def _added(self, what: str) -> str:
        added = {
            disk: self.samples[what, disk, GUEST].median - self.samples[what, disk, HOST].median
            for disk in (CEPH, LOCAL)
        }
        return f"{added[CEPH]:.2f} ms on Ceph and {added[LOCAL]:.2f} ms on the local file"


async def measure() -> Result:
    """Run it in a cluster and a VM of its own."""
    guest_image = await asyncio.to_thread(image.build, CACHE)
    accelerator = await accel.probe(guest_image, CACHE)
    taken: figures.Collector[Key] = figures.Collector()
    with (
        TemporaryDirectory(prefix="crust-bench-") as place,
        ceph_cluster.running(Path(place) / "ceph", store="bluestore") as ceph,
    ):
        disks = await asyncio.to_thread(_Disks.made, ceph, Path(place) / "local.img")
        wanted = spec.MachineSpec("bench", guest_image, accelerator.kind, volume_slots=1)
        vm = await machine.start(wanted, Path(place) / "vm")
        try:
            for number in range(ROUNDS):
                for disk in (CEPH, LOCAL):
                    await _in_guest(vm, disks, disk, number, taken)
                    await asyncio.to_thread(disks.grow, disk)
                    await asyncio.to_thread(_on_host, disks, disk, taken)
        finally:
            await vm.stop()
    order = sorted(taken.values, key=lambda key: (key[0] == READ, key[1], key[2] == GUEST))
    samples = {key: figures.Samples.of("ms", taken.values[key]) for key in order}
    return Result(samples, accelerator.kind)


async def _nothing() -> None:
    """Nobody else has the cluster: no claim is recorded."""


@dataclass(frozen=True, slots=True)
class _Disks:
    """The two disks that are measured."""

    ceph: CephCluster
    local: Path

    @classmethod
    def made(cls, ceph: CephCluster, local: Path) -> "_Disks":
        with ceph.ioctx(POOL) as ioctx:
            rbd.RBD().create(ioctx, "bench", FILESYSTEM_BYTES, old_format=False, features=61)
        local.touch()
        os.truncate(local, FILESYSTEM_BYTES)
        return cls(ceph, local)

    def grow(self, disk: str) -> None:
        """Add what the host's requests go to, if it is not there."""
        if disk == LOCAL:
            os.truncate(self.local, IMAGE_BYTES)
            return
        with self.ceph.ioctx(POOL) as ioctx, rbd.Image(ioctx, "bench") as opened:
            if opened.size() != IMAGE_BYTES:
                opened.resize(IMAGE_BYTES)

    async def plug(self, vm: machine.Machine, disk: str) -> None:
        """Give the disk to the guest, which finds its filesystem or makes it."""
        if disk == LOCAL:
            await vm.attach("disk", self.local)
        else:
            found = volumes.NetworkImage(
                self.ceph.fsid, POOL, "", "bench", (self.ceph.monitors,), "admin"
            )
            key = self.ceph.keys["client.admin"]
            await vm.attach_image("disk", found, key, _nothing, read_only=False)
        made = values.VolumeMount("disk", "ext4", format=volumes.GuestFormat())
        await vm.guest.mount(made)

    def node(self, disk: str) -> dict[str, object]:
        """What qemu-img opens, with the options that the guest's disk has."""
        if disk == LOCAL:
            return {"driver": "file", "filename": str(self.local), "aio": "native"}
        conf = str(self.ceph.conf)
        return {"driver": "rbd", "pool": POOL, "image": "bench", "conf": conf, "user": "admin"}


async def _in_guest(
    vm: machine.Machine, disks: _Disks, disk: str, number: int, taken: figures.Collector[Key]
) -> None:
    await disks.plug(vm, disk)
    command = ("python3", "-c", _WORKLOAD, str(WRITES), str(READS))
    name = f"bench-{'local' if disk == LOCAL else 'ceph'}-{number}"
    wanted = values.ContainerSpec(name, command, binds=(values.Bind("disk", "/data"),))
    done = await vm.guest.run(wanted, limit_bytes=1 << 22, timeout_s=_TIMEOUT_S)
    if done.exit.code != 0:
        raise BenchFailed(done.stderr.decode(errors="replace")[-500:])
    await vm.detach("disk")
    found = json.loads(done.stdout)
    for what, key in ((WRITE, "write"), (READ, "read")):
        for each in found[key]:
            taken.add((what, disk, GUEST), each / 1e6)


def _on_host(disks: _Disks, disk: str, taken: figures.Collector[Key]) -> None:
    """qemu-img prints the time of a whole run: that is one sample, per operation."""
    node = disks.node(disk)
    write = ("-w", "--flush-interval=1", "-s", "4096", "-c", str(WRITES))
    read = ("-s", str(1 << 20), "-c", str(READS))
    _bench(node, "-w", *read)  # what is read, or overwritten as in the guest, has been written
    taken.add((WRITE, disk, HOST), _bench(node, *write) / WRITES)
    taken.add((READ, disk, HOST), _bench(node, *read) / READS)


def _bench(node: dict[str, object], *options: str) -> float:
    """Milliseconds of one run of qemu-img bench behind the filesystem, one request at a time."""
    place = ("-o", str(FILESYSTEM_BYTES))
    opened = f"json:{json.dumps(node)}"
    argv = ("qemu-img", "bench", "-t", "none", "-d", "1", *place, *options, opened)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    found = re.search(r"Run completed in ([0-9.]+) seconds", done.stdout)
    if found is None:
        raise BenchFailed(done.stderr[-500:])
    return float(found[1]) * 1000
