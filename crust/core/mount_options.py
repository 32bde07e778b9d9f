"""Mount options as a CO sends them: which of them the host's kernel gets, and which a guest's kernel gets.

A CO's mount flags are options of mount(8). Some are instructions to the *host* (`_netdev`, `x-systemd…`,
propagation). `ro` has a field of its own in CSI. Some move or replace mounts (`bind`, `remount`) and never belong to
a volume. Some filesystems accept credentials as options. Credentials must not be written to any file, so this module
refuses such an option where it reads it; the error has the option's name, never its value.
"""

import re
from collections.abc import Iterable, Iterator
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


def for_guest(flags: Iterable[str]) -> MountOptions:
    """The options for a guest's kernel: no instructions to the host, no security labels of the host.

    Raises `CredentialInOptions` and `MountOptionNotAllowed`.
    """
    host = for_host(flags)
    options = tuple(
        option
        for option in host.options
        if _name(option) not in _SECURITY_LABELS and not _TUNES_THE_HOST.fullmatch(_name(option))
    )
    return MountOptions(options, host.readonly)


def for_host(flags: Iterable[str]) -> MountOptions:
    """The options for the host's kernel. Raises `CredentialInOptions` and `MountOptionNotAllowed`."""
    options: dict[str, None] = {}
    readonly = False
    for option in _split(flags):
        name = _name(option)
        _check(option, name)
        if option in _READONLY:
            readonly = _READONLY[option]
        elif name not in _HOST_ONLY and not name.startswith(("x-", "X-")):
            options[option] = None
    return MountOptions(tuple(options), readonly)


def check_no_credential(flags: Iterable[str]) -> None:
    """Raise `CredentialInOptions` if one of `flags` looks like a credential."""
    for option in _split(flags):
        if _CREDENTIAL.search(_name(option).lower()) or _LOGIN_IN_URL.search(option):
            raise errors.InvalidRequest.named(
                "CredentialInOptions",
                f"the mount option {_name(option)[:64]!r} is not accepted",
                why="it looks like a credential, and the options are written to disk for the runtime",
                hint="publish this volume without deferral, or pass the credential as a CSI secret",
            )


def _split(flags: Iterable[str]) -> Iterator[str]:
    for flag in flags:  # one flag may hold several options; a quoted SELinux label holds commas
        yield from (option.strip() for option in _OPTION.findall(flag) if option.strip())


def _name(option: str) -> str:
    return option.partition("=")[0]


def _check(option: str, name: str) -> None:
    check_no_credential([option])
    if name in _CHANGES_MOUNTS | _NAMES_DEVICES or "\0" in option or "\n" in option:
        raise errors.InvalidRequest.named(
            "MountOptionNotAllowed",
            f"the mount option {name[:64]!r} is not accepted",
            why="it does not describe how a volume's filesystem is mounted",
            hint="remove it from the volume's mount options",
        )
