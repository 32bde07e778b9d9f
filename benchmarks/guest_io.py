"""A volume in a microVM: its block device mounted in the guest, against a host mount shared into the guest.

One guest (the distribution's standard kernel, which has 9p) has both: a virtio-blk disk with ext4, and an ext4 that
the host mounts and shares by 9p, and by virtio-fs if virtiofsd is installed. Every round measures each of them in
turn, with small files and with synced writes. The images are on one host filesystem.
"""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import figures
from examples.kata.guest import image
from examples.kata.vm import accel, machine, spec, values

NAME = "guest"
ROUNDS = 3
FILES = 2000
WRITES = 300
IMAGE_BYTES = 512 << 20
CACHE = Path(".cache/guest")
BLOCK = "virtio-blk, ext4 in the guest"
NINE_P = "9p of a host mount"
VIRTIO_FS = "virtio-fs of a host mount"
_TIMEOUT_S = 600.0

Times = dict[tuple[str, str], list[float]]


class WorkloadFailed(Exception):
    """The workload ended with an error in the guest."""


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds by operation and way."""

    samples: dict[tuple[str, str], figures.Samples]
    accelerator: str

    def report(self) -> figures.Report:
        """The figures; there is no goal."""
        return figures.Report(
            name=NAME,
            ways=tuple(dict.fromkeys(way for _, way in self.samples)),
            title="A volume's filesystem, seen from a workload in a microVM",
            method=(
                f"{ROUNDS} rounds of {FILES:,} small files and {WRITES} synced writes per way, in one guest. "
                f"{self._accelerator()}"
            ),
            rows=tuple(
                figures.Row(
                    f"{work}: {way}",
                    samples,
                    "" if way == BLOCK else f"{work}: {BLOCK}",
                    is_other=way != BLOCK,
                )
                for (work, way), samples in self.samples.items()
            ),
            meaning=(
                "A filesystem in the guest answers names from the guest's caches; a share asks the host for each. "
                "fsync(2) on a share has one journal, the host's."
            ),
        )

    def _accelerator(self) -> str:
        if self.accelerator == "kvm":
            return "The accelerator is KVM."
        return "The accelerator is software emulation (TCG): the times do not apply to KVM, the ratios only roughly."


async def measure() -> Result:
    """Run it in a VM of its own."""
    guest_image = await asyncio.to_thread(image.build, CACHE, "standard")
    accelerator = await accel.probe(guest_image, CACHE)
    with TemporaryDirectory(prefix="crust-bench-") as place, _host_mount(Path(place)) as mounted:
        async with _guest(guest_image, accelerator.kind, Path(place), mounted) as vm:
            times: Times = {}
            ways = await _mount(vm, Path(place))
            for number in range(ROUNDS):
                for way, volume in ways.items():
                    await _work(vm, way, volume, number, times)
    order = sorted(
        times, key=lambda key: list(dict.fromkeys(work for work, _ in times)).index(key[0])
    )
    return Result({key: figures.Samples.of("ms", times[key]) for key in order}, accelerator.kind)


async def _mount(vm: machine.Machine, place: Path) -> dict[str, str]:
    """Mount the disk and each share; returns the volume's name in the guest for each."""
    ways = {BLOCK: "disk", NINE_P: "ninep"}
    await vm.attach("disk", await asyncio.to_thread(_ext4, place / "disk.img"))
    await vm.guest.mount(values.VolumeMount("disk", "ext4"))
    # as Kata mounts it, with larger messages
    nine_p = ("version=9p2000.L", "cache=mmap", "msize=262144")
    await vm.guest.mount(values.VolumeMount("ninep", "9p", nine_p))
    if spec.VIRTIOFSD.exists():
        await vm.guest.mount(values.VolumeMount("virtiofs", "virtiofs"))
        ways[VIRTIO_FS] = "virtiofs"
    return ways


async def _work(vm: machine.Machine, way: str, volume: str, number: int, times: Times) -> None:
    workload = (Path(__file__).parent / "guest_workload.py").read_bytes()
    command = ("python3", "-", "/data", str(FILES), str(WRITES))
    wanted = values.ContainerSpec(
        f"bench-{volume}-{number}", command, binds=(values.Bind(volume, "/data"),)
    )
    done = await vm.guest.run(wanted, stdin=workload, limit_bytes=1 << 22, timeout_s=_TIMEOUT_S)
    if done.exit.code != 0:
        raise WorkloadFailed(f"{way}: {done.exit}: {done.stderr.decode(errors='replace')[-500:]}")
    for work, taken in json.loads(done.stdout).items():
        times.setdefault((work, way), []).extend(nanoseconds / 1e6 for nanoseconds in taken)


@contextlib.asynccontextmanager
async def _guest(
    guest_image: image.GuestImage, kind: spec.Acceleration, place: Path, mounted: Path
) -> AsyncIterator[machine.Machine]:
    shares = [spec.Share("ninep", mounted, "9p")]
    if spec.VIRTIOFSD.exists():
        shares.append(spec.Share("virtiofs", mounted, "virtiofs"))
    wanted = spec.MachineSpec(
        "bench", guest_image, kind, memory_mib=512, volume_slots=1, shares=tuple(shares)
    )
    vm = await machine.start(wanted, place / "vm")
    try:
        yield vm
    finally:
        await vm.stop()


@contextlib.contextmanager
def _host_mount(place: Path) -> Iterator[Path]:
    """An ext4 that the host has mounted, as an ordinary publish does."""
    mounted = place / "mounted"
    mounted.mkdir()
    _run("mount", "-o", "loop", str(_ext4(place / "host.img")), str(mounted))
    try:
        yield mounted
    finally:
        _run("umount", str(mounted))


def _ext4(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    # The kernel must not initialise anything in the background during the measurement.
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(path))
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
