"""What the suite's CO takes for an answer of the host."""

import errno
import os
from pathlib import Path

import pytest

from crust_conformance import catalogue
from crust_conformance.options import Options
from crust_conformance.orchestrator.calls import connected
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.host_view import HostView


class _FailingHost(HostView):
    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, path: Path, data: bytes, *, offset: int = 0) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOSPC]
)
def test_volume_that_fails_is_not_read_only(tmp_path: Path, number: int) -> None:
    options = Options(socket=f"{tmp_path}/csi.sock", target_root=tmp_path)
    case = catalogue.cases("C")["C-223"]
    with connected(options.socket) as channels:
        co = Co(channels, options, frozenset(), _FailingHost(number), case)
        if number in (errno.EIO, errno.ENOSPC):
            with pytest.raises(OSError, match=os.strerror(number)):
                co.can_write(tmp_path)
        else:
            assert not co.can_write(tmp_path)
