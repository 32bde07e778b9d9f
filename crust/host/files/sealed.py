"""A sealed directory takes no names, from nobody: it has the immutable attribute (ioctl_iflags(2), chattr(1) `+i`).

The proxy seals the directory below a guard mount, which a bind that is not recursive shows without the guard, and
takes each seal off again, by an unpublish or at its start (docs/decisions/0042). A filesystem without the attribute
(NFS, 9p) takes none. The right to set it is CAP_LINUX_IMMUTABLE. All functions block.
"""

import os
import tempfile

from crust.core import errors
from crust.host.files import attributes
from crust.host.files.attributes import IMMUTABLE
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls

NEEDS = "CAP_LINUX_IMMUTABLE"
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW


def seal(path: AnyPath, shown: object) -> bool:
    """Seal the directory; False if its filesystem has no such attribute. Raises `errors.CrustError` with `shown`."""
    action, hint = f"cannot make {shown} immutable", f"it needs {NEEDS}"
    with syscalls.opened(path, action, _DIRECTORY, hint=hint) as directory:
        return attributes.change(directory, IMMUTABLE, IMMUTABLE) is not None


def unseal(path: AnyPath, shown: object) -> bool:
    """Take the seal off; returns whether there was one. An absent path, a file and a link have none."""
    action, hint = f"{shown} stays immutable", f"it needs {NEEDS}"
    try:
        with syscalls.opened(path, action, _DIRECTORY, hint=hint) as directory:
            before = attributes.change(directory, IMMUTABLE, 0)
    except (errors.NotFound, syscalls.FileInTheWay):
        return False
    return bool(before and before & IMMUTABLE)


def try_to_seal() -> None:
    """Seal a file without a name, which is gone with its descriptor; raises `OSError` without the right."""
    with tempfile.TemporaryFile(buffering=0) as nameless:
        attributes.change(nameless.fileno(), IMMUTABLE, IMMUTABLE)


def is_offered(path: AnyPath) -> bool:
    """Whether the filesystem of this directory has the attribute. Raises `errors.CrustError`."""
    with syscalls.opened(path, f"cannot read the attributes of {path}", _DIRECTORY) as directory:
        return attributes.of(directory) is not None
