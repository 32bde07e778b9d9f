"""The files, loop devices and mountpoints of the host's own tests."""

from tests.integration.host.conftest import attach, mountpoint, sparse_file

__all__ = ["attach", "mountpoint", "sparse_file"]
