"""Each list of filesystems and of engines has every filesystem and every engine: a new one is missing nowhere."""

from typing import get_args

from crust.blockdriver import serve
from crust.core.settings.driver import LOCAL_ENGINES, DriverSettings
from crust.host.filesystems import mkfs, superblocks, supported
from crust.host.mounts import mount_parameters
from examples.kata.guest import kernel
from examples.kata.guest.agent import format as guest_format


def test_every_engine_that_can_be_set_is_made() -> None:
    engines = get_args(DriverSettings.model_fields["engine"].annotation)
    assert serve._ENGINES.keys() == set(engines)
    assert set(engines) > LOCAL_ENGINES


def test_every_filesystem_is_made_read_mounted_and_known_to_the_guest() -> None:
    known = set(supported.SUPPORTED)
    assert mkfs._TABLE.keys() == known
    assert superblocks._READERS.keys() == superblocks._BLOCK_SIZES.keys() == known
    assert mount_parameters._ALLOWED.keys() >= known
    assert guest_format._MKFS.keys() == known
    assert kernel.FILESYSTEM_MODULES.keys() >= known
