"""What is known of vendors' drivers."""

from crust.csi_shim.wrap import vendors
from tests.support.wrapped_volume import DRIVER


def test_driver_that_fails_node_expand_of_block_is_not_called() -> None:
    assert not vendors.expands_at_node("linstor.csi.linbit.com")
    assert vendors.expands_at_node(DRIVER)
