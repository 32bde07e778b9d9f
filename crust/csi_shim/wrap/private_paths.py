"""Where the driver stages and publishes a deferred volume: names only, no look at the disk.

They are a pure function of driver, volume id and target, so that they are the same after any restart and upgrade.
They lie below the directories of the kubelet for raw block volumes, in exactly its two forms: every driver's pod sees
them, drivers that parse such paths find what they expect, and a kubelet never looks there for volumes of its own. No
name is `mount` or `globalmount` or holds `pvc-`: some drivers act on these.
"""

import functools
import hashlib
import os
from dataclasses import dataclass

from crust import volumes

_BELOW = "plugins/kubernetes.io/csi/volumeDevices"
_DIGITS = 40
PREFIX = "crust-"
"""Of the names of all volumes: no PersistentVolume that a CO made is called so."""


def root(kubelet_root: str) -> str:
    """The kubelet's directory for raw block volumes."""
    return os.path.join(kubelet_root, _BELOW)


def directories(kubelet_root: str) -> tuple[str, str]:
    """Where the volumes' own directories are: staged ones, published ones."""
    above = root(kubelet_root)
    return f"{above}/staging", f"{above}/publish"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGITS]


@dataclass(frozen=True, slots=True)
class PrivatePaths:
    """The paths of one volume: `staging` is a directory, below `published` is a leaf for each target."""

    key: volumes.VolumeKey
    staging: str
    published: str

    @staticmethod
    @functools.lru_cache(maxsize=1024)  # every call about a volume asks
    def of(kubelet_root: str, key: volumes.VolumeKey) -> "PrivatePaths":
        """The paths of a volume."""
        name = f"{PREFIX}{_digest(chr(0).join((key.driver, key.volume_id)))}"
        staging, published = directories(kubelet_root)
        return PrivatePaths(key, f"{staging}/{name}", f"{published}/{name}")

    def leaf(self, target: str) -> str:
        """Where the driver publishes the device for a target of the CO."""
        return f"{self.published}/{_digest(target)}"
