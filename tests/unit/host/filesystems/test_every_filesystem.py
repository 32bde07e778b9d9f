"""Each list of filesystems has every filesystem: a new one is missing nowhere."""

from crust.host.filesystems import mkfs, superblocks
from crust.host.mounts import mount_options
from examples.kata.guest import kernel
from examples.kata.guest.agent import format as guest_format


def test_every_filesystem_is_made_read_mounted_and_known_to_guest() -> None:
    known = set(mkfs.SUPPORTED)
    assert mkfs.TABLE.keys() == known
    assert superblocks._READERS.keys() == superblocks._BLOCK_SIZES.keys() == known
    assert mount_options._ALLOWED.keys() >= known
    assert guest_format._MKFS.keys() == known
    assert kernel.FILESYSTEM_MODULES.keys() >= known
