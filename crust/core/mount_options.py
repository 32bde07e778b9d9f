"""Mount options as a CO sends them: which of them the host's kernel gets, and which a guest's kernel gets.

A CO's mount flags are options of mount(8). Some are instructions to the *host* (`_netdev`, `x-systemd…`,
propagation). `ro` has a field of its own in CSI. Some move or replace mounts (`bind`, `remount`) and never belong to
a volume. Some filesystems accept credentials as options. Credentials must not be written to any file, so this module
refuses such an option where it reads it; the error has the option's name, never its value.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from crust.core import errors

_READONLY = {"ro": True, "rw": False}
_HOST_ONLY = frozenset({
    "defaults", "_netdev", "nofail", "async", "auto", "noauto", "user", "nouser", "users", "owner", "group", "loop",
    "private", "rprivate", "shared", "rshared", "slave", "rslave", "unbindable", "runbindable",
})  # fmt: skip
_CHANGES_MOUNTS = frozenset({"bind", "rbind", "remount", "move"})
_NAMES_DEVICES = frozenset({"device", "journal_dev", "journal_path", "logdev", "rtdev", "source"})
_TUNES_THE_HOST = re.compile(r"read_ahead_kb|directmount|btrfs-.+")
"""What some drivers take out of the mount flags themselves: no option of any kernel (gce, azuredisk)."""
_SECURITY_LABELS = frozenset({"context", "fscontext", "defcontext", "rootcontext", "seclabel"})
_CREDENTIAL = re.compile(r"pass|secret|token|cred|key")
_LOGIN_IN_URL = re.compile(r"://[^/]*:[^/]*@")
_OPTION = re.compile(r'(?:[^,"]|"[^"]*")+')


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Options of one filesystem mount, without "ro" and "rw": `readonly` replaces them."""

    options: tuple[str, ...]
    readonly: bool


def parse(flags: Iterable[str], *, for_guest: bool) -> MountOptions:
    """The options for the kernel that mounts, without instructions to the host.

    For a guest's kernel without security labels of the host too. Raises `CredentialInOptions` and
    `MountOptionNotAllowed`.
    """
    options: dict[str, None] = {}
    readonly = False
    for flag in flags:  # one flag may hold several options; a quoted SELinux label holds commas
        for option in map(str.strip, _OPTION.findall(flag)):
            name = option.partition("=")[0]
            _check(option, name)
            is_left_out = name in _HOST_ONLY or name.startswith(("x-", "X-"))
            if for_guest and (name in _SECURITY_LABELS or _TUNES_THE_HOST.fullmatch(name)):
                is_left_out = True
            if option in _READONLY:
                readonly = _READONLY[option]
            elif option and not is_left_out:
                options[option] = None
    return MountOptions(tuple(options), readonly)


def _check(option: str, name: str) -> None:
    if _CREDENTIAL.search(name.lower()) or _LOGIN_IN_URL.search(option):
        raise errors.InvalidRequest.named(
            "CredentialInOptions",
            f"the mount option {name[:64]!r} is not accepted",
            why="it looks like a credential, and the options are written to disk for the runtime",
            hint="publish this volume without deferral, or pass the credential as a CSI secret",
        )
    if name in _CHANGES_MOUNTS | _NAMES_DEVICES or "\0" in option or "\n" in option:
        raise errors.InvalidRequest.named(
            "MountOptionNotAllowed",
            f"the mount option {name[:64]!r} is not accepted",
            why="it does not describe how a volume's filesystem is mounted",
            hint="remove it from the volume's mount options",
        )
