"""What a kubelet does for a volumeMount with `subPath` or `subPathExpr`, before the container is created.

The three steps of kubelet_pods.go and subpath_linux.go: stat of the path in the target; SafeMakeDir, if it is absent,
component by component from the target's descriptor, each with mode 0 first; and a bind of the opened directory to
volume-subpaths, which becomes the container's mount source. `subPathExpr` is expanded before, and is the same here.
"""

import os
import stat

from crust.host.mounts import mount_api

_NOFOLLOW = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare(target: str, sub_path: str, bound: str) -> None:
    """Make `sub_path` in the target as a kubelet does, and bind it to `bound`, which is the mount source then."""
    if not os.path.exists(f"{target}/{sub_path}"):
        _safe_make_directory(target, sub_path, stat.S_IMODE(os.stat(target).st_mode))
    os.makedirs(bound, 0o750, exist_ok=True)
    opened = os.open(f"{target}/{sub_path}", _NOFOLLOW)
    try:
        mount_api.bind(f"/proc/self/fd/{opened}", bound)
    finally:
        os.close(opened)


def clean(bound: str) -> None:
    """CleanSubPaths: unbind and remove the directory, before the volume is unpublished."""
    mount_api.unmount(bound)
    os.removedirs(bound)


def _safe_make_directory(target: str, sub_path: str, mode: int) -> None:
    parent = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in sub_path.split("/"):
        try:
            try:
                os.mkdir(name, 0, dir_fd=parent)
            except FileExistsError:
                pass
            else:
                os.chmod(name, mode, dir_fd=parent)
            child = os.open(name, _NOFOLLOW | os.O_DIRECTORY, dir_fd=parent)
        finally:
            os.close(parent)
        parent = child
    os.close(parent)
