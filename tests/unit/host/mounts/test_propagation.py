"""The look at the host's process 1: hidden by the kernel, or not seen for another reason, which is no answer."""

import errno
import os
from collections.abc import Callable

import pytest

from crust.host import answers
from crust.host.mounts import propagation
from tests.support.faults import lies

_LOOKS = [
    (propagation.in_namespace_of_host, "/proc/1/ns/mnt"),
    (propagation._groups_of_host, "/proc/1/mountinfo"),
]


@pytest.fixture(autouse=True)
def pid_namespace_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagation, "host_is_visible", lambda: True)
    monkeypatch.setattr(propagation, "_INITIAL_MOUNT_NAMESPACE", "mnt:[0]")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize(("look", "path"), _LOOKS)
def test_process_1_that_is_not_seen_is_not_hidden(
    look: Callable[[], object], path: str, number: int
) -> None:
    with (
        lies.failing(lies.Concerns(frozenset({path}), ()), lies.Failure(0, number)),
        pytest.raises(answers.NotSeen),
    ):
        look()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT])
@pytest.mark.parametrize(("look", "path"), _LOOKS)
def test_hidden_process_1_leaves_the_decision_to_the_mounts(
    look: Callable[[], object], path: str, number: int
) -> None:
    with lies.failing(lies.Concerns(frozenset({path}), ()), lies.Failure(0, number)):
        assert not look()


@pytest.mark.parametrize("number", lies.ERRNOS)
def test_mount_namespace_that_is_not_seen_is_not_another_one(number: int) -> None:
    own = os.getpid()
    assert propagation.has_mounts_of(own)
    assert not propagation.has_mounts_of(0), "of another PID namespace"
    link = lies.Concerns(frozenset({f"/proc/{own}/ns/mnt"}), ())
    with lies.failing(link, lies.Failure(0, number)), pytest.raises(answers.NotSeen):
        propagation.has_mounts_of(own)
