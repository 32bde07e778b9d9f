"""An image of a Ceph cluster as QEMU opens it (block driver rbd): the node's options, and librados' configuration.

QEMU's option `server` gives librados addresses without protocols: then a wrong key is retried for ever, and no
timeout can be set. So the monitors are in a configuration file, which has no secret and is the VM's own. The key goes
to QEMU as a secret object by QMP, and is removed when the image is open.

There is no timeout for I/O: a guest whose cluster does not answer waits, as with any disk.
"""

from dataclasses import dataclass, field
from pathlib import Path

from crust.core import volumes

_CONF = """\
# of one disk of this virtual machine; the key is not here
[global]
mon_host = {monitors}
client_mount_timeout = {connect_s}
keyring =
log_file =
log_to_stderr = false
admin_socket =
rbd_blocklist_on_break_lock = false
"""
DRIVER = "rbd"
_CONNECT_S = 10
"""QEMU's main loop is blocked that long at most; that the cluster answers was checked just before."""


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image, the key of its user, and the configuration file that QEMU reads."""

    image: volumes.NetworkImage
    conf: Path
    key: str = field(repr=False)

    def write_conf(self) -> None:
        """Write the file; it blocks."""
        text = _CONF.format(monitors=",".join(self.image.monitors), connect_s=_CONNECT_S)
        self.conf.touch(mode=0o600)
        self.conf.write_text(text, encoding="ascii")

    def secret(self, name: str) -> dict[str, object]:
        """Arguments of object-add. QEMU takes the key in base64, as Ceph writes it."""
        return {"qom-type": "secret", "id": name, "format": "base64", "data": self.key}

    def node(self, name: str, secret: str, *, read_only: bool) -> dict[str, object]:
        """Arguments of blockdev-add."""
        return {
            "driver": DRIVER,
            "node-name": name,
            "pool": self.image.pool,
            "namespace": self.image.namespace,
            "image": self.image.image,
            "user": self.image.user,
            "key-secret": secret,
            "conf": str(self.conf),
            "read-only": read_only,
            "discard": "unmap",
            "cache": {"direct": True},
        }


def can_be_opened() -> bool:
    """Whether QEMU and this Python have the parts to open an image (qemu-block-extra, python3-rados, python3-rbd)."""
    import importlib.util

    modules = Path("/usr/lib").glob("*/qemu/block-rbd.so")
    return any(modules) and all(importlib.util.find_spec(name) for name in ("rados", "rbd"))
