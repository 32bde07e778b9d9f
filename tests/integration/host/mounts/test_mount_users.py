"""The users of a mount, beside a file server that hangs."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from crust.host.block import holders, loop
from crust.host.mounts import mount_api, mount_users
from tests.integration.host.conftest import Attach

pytestmark = pytest.mark.root

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[str]:
    """A mounted filesystem whose server never answers.

    It is a mount of FUSE whose server reads no request. Nothing is written to it, so no sync(2) waits for it. The
    kernel ends every call when the server's descriptor is closed, which it is when this process dies too.
    """
    path = tmp_path / "hung"
    path.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        if _libc.mount(b"hung", os.fsencode(path), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "no mount of FUSE", str(path))
        yield str(path)
    finally:
        os.close(server)
    mount_api.unmount(str(path))


def in_a_thread(look: Callable[[], T]) -> T:
    """So that a search that hangs is a failed test, and ends with the file server."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(look())
        except Exception as error:  # whatever it is, the test gets it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future.result(timeout=30)


def test_of_does_not_wait_for_a_hung_file_server(attach: Attach, hung: str) -> None:
    """stat(2) of a file that is open there never returns, and with it the unstage that only wants the reason."""
    device = attach()
    below = os.open(hung, os.O_PATH)
    held = os.open(device.path, os.O_RDONLY)
    try:
        with pytest.raises(holders.DeviceInUse, match=rf"\[{os.getpid()}\] by fd {held}"):
            in_a_thread(lambda: loop.detach(device))
        assert in_a_thread(lambda: mount_users.of(hung)) != ()
    finally:
        os.close(held)
        os.close(below)
