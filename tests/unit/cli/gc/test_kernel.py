"""The host as `crust gc` sees it: a host that it cannot see is no host without users."""

import errno

import pytest

from crust.cli.gc.kernel import Kernel
from crust.host.block import openers
from crust.host.mounts import propagation


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EMFILE, errno.EIO])
def test_host_is_hidden_while_links_to_files_are_unread(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without CAP_SYS_PTRACE the list of a process's descriptors works, and no link in it can be read."""

    def refused() -> openers.Openers:
        raise OSError(number, "refused")

    for question in ("host_is_visible", "in_namespace_of_host"):
        monkeypatch.setattr(propagation, question, lambda: True)
    monkeypatch.setattr(openers, "openers", refused)
    assert "open files of other processes" in Kernel().not_visible()
    monkeypatch.setattr(openers, "openers", dict)
    assert not Kernel().not_visible()
