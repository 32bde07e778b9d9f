"""The user, the cluster, the key and the timeouts of a connection: the options of librados.

- Without protocol prefixes in `mon_host` librados retries a wrong key by the other protocol until the timeout, so the
  monitors seem to be away. Therefore the prefixes are required (MonitorsInvalid).
- The key is passed in memory. Ceph's own configuration files, keyrings, log files and admin sockets are switched off.
- A process with a key of its own reads it once, at the start, from a file with the key alone, or a keyring from
  `ceph auth get`. A process that can read the key can change every volume of the pool, so a file that others may read
  is refused.
"""

import configparser
import os
import re
import stat
from dataclasses import dataclass, field

from crust.core import errors

_ADDRESS = r"(\[[0-9a-fA-F:]+\]|[0-9A-Za-z.-]+):[0-9]{1,5}(/0)?"
_VECTOR = rf"\[v[12]:{_ADDRESS}(,v[12]:{_ADDRESS})*\]|v[12]:{_ADDRESS}"
_MONITORS = re.compile(rf"({_VECTOR})([,; ]({_VECTOR}))*")
_KEY_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Whole seconds: `connect_s` for the first answer of a monitor, the others for each call."""

    connect_s: int = 8
    """Longer than monitors take to elect a leader after one of three died: 6 s (`mon_election_timeout` and a round of
    paxos). Shorter than the least deadline of a sidecar: the external-resizer's 10 s."""
    monitors_s: int = 8
    """For the same reasons."""
    data_s: int = 10
    """Longer than a busy cluster takes for one step, shorter than the deadline of a CO's call."""


@dataclass(frozen=True, slots=True)
class CephUser:
    """A user and the cluster to which it connects. The key is never shown."""

    monitors: str
    """`mon_host`, each address with its protocol."""
    user: str
    """The name without `client.`."""
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _MONITORS.fullmatch(self.monitors):
            raise errors.InvalidRequest.named(
                "MonitorsInvalid",
                f"the monitors {self.monitors[:256]!r} cannot be used",
                why="each needs its protocol: without it a wrong key looks like monitors that are away",
            )

    def options(self, timeouts: Timeouts) -> dict[str, str]:
        return {
            "mon_host": self.monitors,
            "key": self.key,
            "keyring": "",
            "client_mount_timeout": str(timeouts.connect_s),
            "rados_mon_op_timeout": str(timeouts.monitors_s),
            "rados_osd_op_timeout": str(timeouts.data_s),
            "admin_socket": "",
            "log_file": "",
            "log_to_stderr": "false",
            "log_to_syslog": "false",
            "rbd_default_clone_format": "2",
        }


def key_of(path: str, user: str) -> str:
    """The key of `user` (without `client.`). Raises CephKeyFileUnusable; no text of the file is in the error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise _unusable(path, f"it cannot be opened: {os.strerror(err.errno or 0)}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, "it is no regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise _unusable(path, "it belongs to another user")
        if status.st_mode & 0o077:
            raise _unusable(path, f"others may read it: its mode is {status.st_mode & 0o777:04o}")
        text = file.read(_KEY_FILE_BYTES).decode("utf-8", "replace").strip()
    key = text
    if text.startswith("["):
        keyring = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            keyring.read_string(text)
            key = keyring.get(f"client.{user}", "key", fallback="")
        except configparser.Error:
            key = ""
    if not key or len(key.split()) != 1:
        raise _unusable(path, f"it has no key of client.{user}")
    return key


def _unusable(path: str, why: str) -> errors.Refused:
    return errors.Refused.named("CephKeyFileUnusable", f"the key in {path} is not used", why=why)
