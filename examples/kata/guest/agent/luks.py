"""The LUKS2 container of an encrypted volume: made on a blank disk, opened, grown, closed (specs/handoff.md, H-49).

The passphrase goes to cryptsetup on its standard input: a command line is readable for every process, and a file
would have to be removed. The name of the mapping is that of the volume, so an agent that was started again finds it
in sysfs and needs no passphrase. The volume key is not in the kernel's keyring but in the mapping, so that growing
needs none either.

A container that this mount has made is blank by construction: it decrypts to random bytes, which no look at the
windows of `format` could tell from data. An agent that is killed between the two leaves a container without a
filesystem, which is not formatted by anybody.
"""

from __future__ import annotations

import os
import subprocess

from . import devices, mounts, protocol

CRYPTSETUP = "cryptsetup"
_HOME = "/usr/sbin"
_PREFIX = "crust-"
_SYS_BLOCK = "/sys/block"
_WRONG_PASSPHRASE = 2
_BUSY = 5

# 32 MiB: a guest may have 256 MiB in all, and a container must open in the smallest guest that ever gets the volume.
# A fixed cost: the benchmark that would choose one measures a machine that is just starting.
_PBKDF = (
    *("--pbkdf", "argon2id", "--pbkdf-memory", "32768"),
    *("--pbkdf-force-iterations", "4", "--pbkdf-parallel", "1"),
)
_CIPHER = ("--cipher", "aes-xts-plain64", "--key-size", "512", "--hash", "sha256")


def make(disk: str, passphrase: str) -> None:
    """Make a container on a blank disk, which the caller has looked at. Faults: io_error."""
    mounts.load_encryption()
    command = ("luksFormat", "--type", "luks2", "--batch-mode", *_CIPHER, *_PBKDF)
    _run((*command, "--key-file", "-", disk), "making the LUKS container", passphrase)


def open_(disk: str, name: str, passphrase: str | None, *, read_only: bool) -> str:
    """The path of the mapping, which is opened unless it is open. Faults: passphrase_needed, passphrase_wrong, …"""
    kernel_name = device(name)
    if kernel_name is None:
        if passphrase is None:
            raise needed(name)
        mounts.load_encryption()
        flags = ("--readonly",) if read_only else ()
        command = ("open", "--type", "luks2", "--disable-keyring", *flags, "--key-file", "-")
        _run((*command, disk, _PREFIX + name), "opening the LUKS container", passphrase)
        kernel_name = device(name)
    if kernel_name is None:
        raise protocol.Fault(
            "io_error", f"volume {name} was opened, and the kernel shows no mapping"
        )
    return f"/dev/{kernel_name}"


def resize(name: str) -> None:
    """Grow the mapping to its disk; idempotent."""
    _run(("resize", _PREFIX + name), "growing the LUKS container")


def close(name: str) -> None:
    """Close the mapping; absent is success. Faults: busy."""
    if device(name) is not None:
        _run(("close", _PREFIX + name), "closing the LUKS container")


def device(name: str) -> str | None:
    """Kernel name (`dm-0`) of a volume's mapping; None if it is not open."""
    for kernel_name in os.listdir(_SYS_BLOCK):
        if kernel_name.startswith("dm-") and _mapping(kernel_name) == _PREFIX + name:
            return kernel_name
    return None


def needed(name: str) -> protocol.Fault:
    """The container is not open, and the request has no passphrase."""
    return protocol.Fault(
        "passphrase_needed", f"volume {name} is encrypted, and is not open", "send its passphrase"
    )


def usable_bytes(name: str) -> int:
    """The size of the mapping: the disk's without the header."""
    kernel_name = device(name)
    return 0 if kernel_name is None else devices.size_bytes(kernel_name)


def _mapping(block: str) -> str:
    try:
        with open(f"{_SYS_BLOCK}/{block}/dm/name", encoding="utf-8") as source:
            return source.read().strip()
    except OSError:
        return ""


def _run(arguments: tuple[str, ...], action: str, passphrase: str = "") -> None:
    done = subprocess.run(
        (f"{_HOME}/{CRYPTSETUP}", *arguments),
        input=passphrase.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # There is no udev here, for which libdevmapper would wait.
        env={"PATH": _HOME, "DM_DISABLE_UDEV": "1"},
        check=False,
    )
    if not done.returncode:
        return
    reason = done.stderr.decode(errors="replace").strip()[-400:]
    if done.returncode == _WRONG_PASSPHRASE and passphrase:
        raise protocol.Fault(
            "passphrase_wrong",
            "the passphrase does not open it: no key slot of the LUKS container accepts it",
            "correct the Secret, then delete the pod; nothing was changed on the disk",
        )
    code = "busy" if done.returncode == _BUSY else "io_error"
    raise protocol.Fault(code, f"{action} failed with status {done.returncode}: {reason}")
