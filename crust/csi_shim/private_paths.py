"""Where the driver stages and publishes a deferred volume: names only, no look at the disk.

They are a pure function of driver, volume id and target, so that they are the same after any restart and upgrade.
They lie below the directories of the kubelet for raw block volumes, in exactly its two forms: every driver's pod sees
them, drivers that parse such paths find what they expect, and a kubelet never looks there for volumes of its own. No
name is `mount` or `globalmount` or holds `pvc-`: some drivers act on these.
"""

import hashlib
import os
from dataclasses import dataclass

from crust import volumes

_BELOW = "plugins/kubernetes.io/csi/volumeDevices"
_DIGITS = 40


def root(kubelet_root: str) -> str:
    """The kubelet's directory for raw block volumes."""
    return os.path.join(kubelet_root, _BELOW)


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True)
class PrivatePaths:
    """The paths of one volume: `staging` is a directory, below `published` is a leaf for each target."""

    key: volumes.VolumeKey
    staging: str
    published: str

    @classmethod
    def of(cls, kubelet_root: str, key: volumes.VolumeKey) -> "PrivatePaths":
        """The paths of a volume."""
        name = f"crust-{_digest(chr(0).join((key.driver, key.volume_id)))}"
        above = root(kubelet_root)
        return cls(key, f"{above}/staging/{name}", f"{above}/publish/{name}")

    def leaf(self, target: str) -> str:
        """Where the driver publishes the device for a target of the CO."""
        return f"{self.published}/{_digest(target)}"
