"""Directories shared into a VM by virtiofsd, for comparing against block devices. 9p is served by QEMU itself.

virtiofsd ends by itself when its VM does; the code that starts a VM kills one that QEMU never connected to.
"""

import os
import socket
from pathlib import Path

from examples.kata.vm import faults, process, spec


def serve(share: spec.Share, directory: Path) -> process.Process:
    """Start virtiofsd for a share; it listens when this returns. Raises ShareFailed."""
    path = spec.share_socket(share, directory)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(1)
        argv = [
            *(str(spec.VIRTIOFSD), f"--fd={listener.fileno()}"),
            *("-o", f"source={share.path},cache={share.cache},sandbox=chroot"),
            "-f",
        ]
        pid = process.spawn(argv, [listener.fileno()], directory / "qemu.err")
        return process.Process(pid)
    except OSError as err:
        raise faults.ShareFailed(share.tag, err.strerror or str(err)) from err
    finally:
        listener.close()
