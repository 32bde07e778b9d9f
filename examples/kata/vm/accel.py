"""Which accelerator works: KVM is used only if a probe VM boots our kernel under it and its agent answers.

/dev/kvm also exists on machines where no kernel boots under it (nested or software-emulated virtualisation), so its
presence proves nothing. The result is cached beside the images, per host boot, QEMU binary and image.
"""

import asyncio
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from crust.core import errors
from examples.kata.guest import image
from examples.kata.vm import faults, machine, spec

_log = logging.getLogger(__name__)

PROBE_S = 20.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The accelerator to use, and why in a sentence."""

    kind: spec.Acceleration
    reason: str


_ACCELERATOR = pydantic.TypeAdapter(Accelerator)


async def probe(guest_image: image.GuestImage, cache: Path) -> Accelerator:
    """KVM if a VM boots under it within PROBE_S, else software emulation; the result is cached in `cache`."""
    key = await asyncio.to_thread(_key, guest_image)
    remembered = cache / f"accelerator-{key}.json"
    known = await asyncio.to_thread(_recall, remembered)
    if known is None:
        known = await _try(guest_image)
        await asyncio.to_thread(_remember, remembered, known)
    return known


async def _try(guest_image: image.GuestImage) -> Accelerator:
    if not await asyncio.to_thread(os.access, "/dev/kvm", os.R_OK | os.W_OK):
        return Accelerator("tcg", "/dev/kvm is missing or not accessible")
    _log.info("trying KVM", extra={"within_s": PROBE_S})
    # A short path, because a socket's path is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="crust-kvm-", dir="/tmp") as scratch:
        wanted = spec.MachineSpec("kvm-probe", guest_image, "kvm", volume_slots=1)
        try:
            vm = await machine.start(wanted, Path(scratch, "vm"), boot_timeout_s=PROBE_S)
        except errors.CrustError as err:
            return Accelerator("tcg", f"KVM is present, and no guest starts under it: {_why(err)}")
        await vm.kill()
    return Accelerator("kvm", "a guest started under KVM")


def _why(err: errors.CrustError) -> str:
    return faults.printable("; ".join(filter(None, (err.why, err.hint))), 240)


def _key(guest_image: image.GuestImage) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = spec.QEMU.stat()
    parts = (boot, f"{status.st_size} {status.st_mtime_ns}", guest_image.digest)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _recall(path: Path) -> Accelerator | None:
    try:
        return _ACCELERATOR.validate_json(path.read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None


def _remember(path: Path, known: Accelerator) -> None:
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(known)))
    aside.rename(path)
