"""The key of a Ceph user in a file: read once, at the start, and never written.

The file holds the key alone, or a keyring as `ceph auth get` prints it. Whoever can read it can change every volume
of the pool, so one that others may read is refused.
"""

import configparser
import os
import stat

from crust.core import errors

_LIMIT_BYTES = 64 * 1024


class CephKeyFileUnusable(errors.Refused):
    """The file with a Ceph user's key cannot be used."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the key in {path} is not used",
            why=why,
            hint="write the output of `ceph auth get-key client.<user>` to it, and chmod 0600",
        )
        self.path = path


def read(path: str, user: str) -> str:
    """The key of `user` (without `client.`). Raises `CephKeyFileUnusable`; no text of the file is in the error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise CephKeyFileUnusable(
            path, f"it cannot be opened: {os.strerror(err.errno or 0)}"
        ) from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CephKeyFileUnusable(path, "it is no regular file")
        if found.st_uid not in (0, os.geteuid()):
            raise CephKeyFileUnusable(path, "it belongs to another user")
        if found.st_mode & 0o077:
            raise CephKeyFileUnusable(
                path, f"others may read it: its mode is {found.st_mode & 0o777:04o}"
            )
        text = file.read(_LIMIT_BYTES).decode("utf-8", "replace").strip()
    key = _of_keyring(text, user) if text.startswith("[") else text
    if not key or len(key.split()) != 1:
        raise CephKeyFileUnusable(path, f"it has no key of client.{user}")
    return key


def _of_keyring(text: str, user: str) -> str:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return ""
    return parser.get(f"client.{user}", "key", fallback="")
