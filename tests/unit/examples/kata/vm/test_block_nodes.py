"""The names of QEMU's block nodes."""

from examples.kata.vm import block_nodes


def test_node_names_fit_what_qemu_allows() -> None:
    assert len(block_nodes.name_of("x" * 20)) <= 31
