"""A file or directory whose filesystem never answers: a real hang in the kernel, of whoever looks at it by this path.

It is a mount of FUSE whose server reads no request, not even the first. Nothing is written to it, so a sync(2) of
others does not wait for it. The kernel ends every call when the server's descriptor is closed, which it is when this
process dies too: nothing can stay hung.
"""

import ctypes
import os
from pathlib import Path

from crust.host.mounts import mount_api

_libc = ctypes.CDLL(None, use_errno=True)


class HungFile:
    """What is at `path`, covered from now on. Use as a context manager: at its end the path leads there again."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        kind = 0o40000 if path.is_dir() else 0o100000
        self._server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._server},rootmode={kind:o},user_id=0,group_id=0"
        if _libc.mount(b"hung", os.fsencode(path), b"fuse", 0, options.encode()):
            number = ctypes.get_errno()
            os.close(self._server)
            raise OSError(number, os.strerror(number), self._path)

    def end(self) -> None:
        """The server dies: calls that hang end with an error, and so does every later one."""
        if self._server >= 0:
            os.close(self._server)
            self._server = -1

    def __enter__(self) -> "HungFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        mount_api.unmount(self._path)
