"""Options of mount(8), sorted for the kernel's mount calls (fsconfig(2), fsmount(2)).

`crust.core.mount_options` splits what a CO sends, and takes out what is for user space or no filesystem's; this file
knows how the kernel takes the rest: attributes of the mount (nosuid, noatime, …), and parameters of the filesystem,
which pass unchanged and which the kernel checks. Values may be credentials: no error repeats them.
"""

from collections.abc import Sequence

from crust.core import errors

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
"""What a volume may ask of its filesystem, from ext4(5), xfs(5) and btrfs(5).

Not here is what names another device or file (logdev, rtdev, journal_path, journal_dev, device, quota files), what
looks for another superblock, and what is for debugging.
"""
_LABELS = ("context", "fscontext", "defcontext", "rootcontext", "seclabel")
"""Of the kernel's security modules, for every filesystem."""
_DEFAULTS = {"ext4": (("errors", "remount-ro"),)}
"""Against the superblock's own word: whoever wrote the volume could have set errors=panic there."""
_STOPS_THE_HOST = {("errors", "panic"), ("fatal_errors", "panic")}
_NOSUID_NODEV = 0x02 | 0x04


class InvalidMountOption(errors.InvalidRequest):
    """A mount option that is unknown or not allowed. `why` is the kernel's own message where it has one."""

    def __init__(self, fs_type: str, why: str) -> None:
        super().__init__(
            f"the mount options for {fs_type} are invalid",
            why=why,
            hint="correct mountOptions of the StorageClass or the PersistentVolume",
        )


Parameters = tuple[tuple[str, str | None], ...]
"""For the filesystem; None for an option without a value."""


def parse(
    fs_type: str, options: Sequence[str], *, untrusted: bool = False
) -> tuple[int, Parameters]:
    """Sort mount options, as `mount_options` gives them; raises `InvalidMountOption`.

    Returns MOUNT_ATTR_* of fsmount(2), and parameters. A later option overrides an earlier one, and the defaults of
    the filesystem. `untrusted=True` (somebody else than this driver may have written the filesystem) overrides "suid"
    and "dev".
    """
    attributes = 0
    parameters: list[tuple[str, str | None]] = list(_DEFAULTS.get(fs_type, ()))
    for option in options:
        if option in _ATTRIBUTES:
            clear, add = _ATTRIBUTES[option]
            attributes = attributes & ~clear | add
            continue
        key, equals, value = option.replace('"', "").partition("=")  # quotes around commas
        _check_key(fs_type, key)
        _check_value(fs_type, key, value)
        parameters.append((key, value if equals else None))
    attributes |= _NOSUID_NODEV if untrusted else 0
    return attributes, tuple(parameters)


def _check_key(fs_type: str, key: str) -> None:
    if key not in _LABELS and key not in _ALLOWED.get(fs_type, ()):
        raise InvalidMountOption(fs_type, f"{key[:64]!r} is not an option that a volume may have")


def _check_value(fs_type: str, key: str, value: str) -> None:
    if (key, value) in _STOPS_THE_HOST:
        raise InvalidMountOption(fs_type, f"{key}={value} would stop the node at the first error")
