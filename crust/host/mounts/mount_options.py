"""Mount options: the flags of a CO for the kernel that mounts, the host's or a guest's, and the host's form of them.

A CO's mount flags are options of mount(8). Some are instructions to the *host* (`_netdev`, `x-systemd…`,
propagation). `ro` has a field of its own in CSI. Some move or replace mounts (`bind`, `remount`) and never belong to
a volume. Some filesystems accept credentials as options. Credentials must not be written to any file, so this module
refuses such an option where it reads it; the error has the option's name, never its value.

The others are attributes of the mount (nosuid, noatime, …), and parameters of the filesystem, which pass unchanged
and which the kernel checks (fsconfig(2), fsmount(2)). Their values may be credentials too: no error repeats them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from crust.core import errors

Parameters = tuple[tuple[str, str | None], ...]
"""For the filesystem; None for an option without a value."""

_READONLY = {"ro": True, "rw": False}
_HOST_ONLY = frozenset({
    "defaults", "_netdev", "nofail", "async", "auto", "noauto", "user", "nouser", "users", "owner", "group", "loop",
    "private", "rprivate", "shared", "rshared", "slave", "rslave", "unbindable", "runbindable",
})  # fmt: skip
_CHANGES_MOUNTS = frozenset({"bind", "rbind", "remount", "move"})
_NAMES_DEVICES = frozenset({"device", "journal_dev", "journal_path", "logdev", "rtdev", "source"})
_TUNES_THE_HOST = re.compile(r"read_ahead_kb|directmount|btrfs-.+")
"""Flags that some drivers take out themselves: no option of any kernel (gce, azuredisk)."""
_LABELS = frozenset({"context", "fscontext", "defcontext", "rootcontext", "seclabel"})
"""Of the kernel's security modules, for every filesystem."""
_CREDENTIAL = re.compile(r"pass|secret|token|cred|key")
_LOGIN_IN_URL = re.compile(r"://[^/]*:[^/]*@")
_OPTION = re.compile(r'(?:[^,"]|"[^"]*")+')

_NOATIME = 0x10
_STRICTATIME = 0x20
_ATIME = 0x70

# option -> (bits to clear, bits to set) of MOUNT_ATTR_*
_ATTRIBUTES: dict[str, tuple[int, int]] = {
    "nosuid": (0, 0x02),
    "suid": (0x02, 0),
    "nodev": (0, 0x04),
    "dev": (0x04, 0),
    "noexec": (0, 0x08),
    "exec": (0x08, 0),
    "nodiratime": (0, 0x80),
    "diratime": (0x80, 0),
    "nosymfollow": (0, 0x200000),
    "symfollow": (0x200000, 0),
    "relatime": (_ATIME, 0),
    "norelatime": (0, 0),
    "noatime": (_ATIME, _NOATIME),
    "atime": (_ATIME, 0),
    "strictatime": (_ATIME, _STRICTATIME),
    "nostrictatime": (_ATIME, 0),
}
_ALLOWED = {
    "ext4": frozenset({
        "acl", "auto_da_alloc", "barrier", "block_validity", "bsdgroups", "commit", "data", "data_err",
        "delalloc", "dioread_lock", "dioread_nolock", "discard", "errors", "grpid", "grpquota", "i_version",
        "init_itable", "inode_readahead_blks", "journal_async_commit", "journal_checksum", "journal_ioprio",
        "lazytime", "max_batch_time", "max_dir_size_kb", "min_batch_time", "noacl", "noauto_da_alloc",
        "nobarrier", "noblock_validity", "nobsdgroups", "nodelalloc", "nodiscard", "nogrpid", "noinit_itable",
        "nojournal_checksum", "nolazytime", "noload", "nombcache", "noquota", "norecovery", "nouid32",
        "nouser_xattr", "prjquota", "quota", "resgid", "resuid", "stripe", "sysvgroups", "user_xattr", "usrquota",
    }),
    "xfs": frozenset({
        "allocsize", "attr2", "discard", "filestreams", "gqnoenforce", "gquota", "grpid", "grpquota", "ikeep",
        "inode32", "inode64", "largeio", "lazytime", "logbsize", "logbufs", "noalign", "noattr2", "nodiscard",
        "nogrpid", "noikeep", "nolargeio", "nolazytime", "noquota", "norecovery", "nouuid", "pqnoenforce",
        "pquota", "prjquota", "qnoenforce", "quota", "sunit", "swalloc", "swidth", "sysvgroups", "uqnoenforce",
        "uquota", "usrquota", "wsync",
    }),
    "btrfs": frozenset({
        "acl", "autodefrag", "barrier", "clear_cache", "commit", "compress", "compress-force", "datacow",
        "datasum", "discard", "enospc_debug", "fatal_errors", "flushoncommit", "lazytime", "max_inline",
        "metadata_ratio", "noacl", "noautodefrag", "nobarrier", "nodatacow", "nodatasum", "nodiscard",
        "noenospc_debug", "noflushoncommit", "nolazytime", "nospace_cache", "nossd", "nossd_spread", "notreelog",
        "rescue", "skip_balance", "space_cache", "ssd", "ssd_spread", "subvol", "subvolid", "thread_pool",
        "treelog", "user_subvol_rm_allowed",
    }),
}  # fmt: skip
"""The options that a volume may have, from ext4(5), xfs(5) and btrfs(5).

Options that name another device or file (logdev, rtdev, journal_path, journal_dev, device, quota files), that choose
another superblock or that serve debugging are not here.
"""
_DEFAULTS = {"ext4": (("errors", "remount-ro"),)}
"""They override the superblock: a writer of the volume could have set errors=panic there."""
_STOPS_THE_HOST = {("errors", "panic"), ("fatal_errors", "panic")}
_NOSUID_NODEV = 0x02 | 0x04


def parse(flags: Iterable[str], *, for_guest: bool) -> tuple[str, ...]:
    """The options for the kernel that mounts, without instructions to the host, and without "ro" and "rw".

    For a guest's kernel without security labels of the host too. Raises `CredentialInOptions` and
    `MountOptionNotAllowed`.
    """
    options: dict[str, None] = {}
    for option in _options(flags):
        name = option.partition("=")[0]
        if _CREDENTIAL.search(name.lower()) or _LOGIN_IN_URL.search(option):
            raise errors.InvalidRequest.named(
                "CredentialInOptions",
                f"the mount option {name[:64]!r} is not accepted",
                why="it looks like a credential, and the options are written to disk for the runtime",
            )
        if name in _CHANGES_MOUNTS | _NAMES_DEVICES or "\0" in option or "\n" in option:
            raise errors.InvalidRequest.named(
                "MountOptionNotAllowed",
                f"the mount option {name[:64]!r} is not accepted",
                why="it does not describe how a volume's filesystem is mounted",
            )
        is_left_out = name in _HOST_ONLY or name.startswith(("x-", "X-"))
        if for_guest and (name in _LABELS or _TUNES_THE_HOST.fullmatch(name)):
            is_left_out = True
        if option and option not in _READONLY and not is_left_out:
            options[option] = None
    return tuple(options)


def readonly(flags: Iterable[str]) -> bool:
    """Whether the last of the flags "ro" and "rw" is "ro"."""
    return [False, *(_READONLY[option] for option in _options(flags) if option in _READONLY)][-1]


def _options(flags: Iterable[str]) -> Iterator[str]:
    """The options of the flags: one flag may hold several, and a quoted SELinux label holds commas."""
    return (option.strip() for flag in flags for option in _OPTION.findall(flag))


class InvalidMountOption(errors.InvalidRequest):
    """A mount option that is unknown or not allowed. `why` is the kernel's own message where it has one."""

    def __init__(self, fs_type: str, why: str) -> None:
        super().__init__(f"the mount options for {fs_type} are invalid", why=why)


def for_kernel(
    fs_type: str, options: Sequence[str], *, untrusted: bool = False
) -> tuple[int, Parameters]:
    """Sort mount options, as `parse` gives them, for the host's kernel; raises `InvalidMountOption`.

    Returns MOUNT_ATTR_* of fsmount(2), and parameters. A later option overrides an earlier one, and the defaults of
    the filesystem. `untrusted=True` (a guest or a pod may have written the filesystem) overrides "suid" and "dev".
    """
    attributes = 0
    parameters: list[tuple[str, str | None]] = list(_DEFAULTS.get(fs_type, ()))
    for option in options:
        if option in _ATTRIBUTES:
            clear, add = _ATTRIBUTES[option]
            attributes = attributes & ~clear | add
            continue
        key, equals, value = option.replace('"', "").partition("=")  # quotes around commas
        if key not in _LABELS and key not in _ALLOWED.get(fs_type, ()):
            why = f"{key[:64]!r} is not an option that a volume may have"
            raise InvalidMountOption(fs_type, why)
        if (key, value) in _STOPS_THE_HOST:
            raise InvalidMountOption(
                fs_type, f"{key}={value} would stop the node at the first error"
            )
        parameters.append((key, value if equals else None))
    attributes |= _NOSUID_NODEV if untrusted else 0
    return attributes, tuple(parameters)
