"""Whether the host sees a path's mounts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.host.mounts import mount_api, mountinfo

pytestmark = pytest.mark.root

_CHECK = """
import sys
from crust.core import errors
from crust.host.mounts import propagation
try:
    propagation.check_propagation([sys.argv[1]])
    print("propagates")
except errors.CrustError as error:
    print(error.error_name, error)
"""

_SEEN = _CHECK.replace("check_propagation([sys.argv[1]])", "check_seen(sys.argv[1])")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Path]:
    """A kubelet's root on a mount that is shared, as all are under systemd."""
    root = tmp_path / "kubelet"
    root.mkdir()
    _run("mount", "-t", "tmpfs", "tmpfs", root)
    _run("mount", "--make-shared", root)
    (root / "pods").mkdir()
    yield root
    for mount in mountinfo.below(str(root)):
        mount_api.unmount(mount.target)
    mount_api.unmount(str(root))


def _run(*argv: object) -> str:
    done = subprocess.run(
        list(map(str, argv)), check=True, capture_output=True, text=True, timeout=50
    )
    return done.stdout


def _checked(root: Path, *, propagation: str, before: str = "true", check: str = _CHECK) -> str:
    """What the check says in a mount namespace of its own, in which `before` was done."""
    script = f'{before} && exec "$@"'
    return _run(
        "unshare", "--mount", "--propagation", propagation,
        "sh", "-ec", script, "sh", sys.executable, "-c", check, root,
    )  # fmt: skip


def test_a_slave_of_the_host_is_refused_with_the_remedy(kubelet: Path) -> None:
    """What PrivateTmp= and HostToContainer give."""
    refusal = _checked(kubelet, propagation="slave")
    assert refusal.startswith("MountsNotPropagated")
    assert "slave" in refusal
    assert "Bidirectional" in refusal
    assert "PrivateTmp=" in refusal


@pytest.mark.parametrize(
    ("propagation", "before", "why"),
    [
        # `shared:2 master:33`: what systemd makes of a unit's root, and `ctr` of an rshared bind
        ("slave", "mount --make-shared ROOT", "slave"),
        ("private", "true", "private to this mount namespace"),
        # a disk of its own for the pods, say
        (
            "unchanged",
            "mount -t tmpfs tmpfs ROOT/pods && mount --make-private ROOT/pods",
            "ROOT/pods is private",
        ),
    ],
)
def test_a_private_mount_is_refused(kubelet: Path, propagation: str, before: str, why: str) -> None:
    before, why = (text.replace("ROOT", str(kubelet)) for text in (before, why))
    assert why in _checked(kubelet, propagation=propagation, before=before)


def test_mounts_of_a_peer_of_the_host_propagate(kubelet: Path) -> None:
    """A root that is not there yet is judged by its parent."""
    for root in (kubelet, kubelet / "later" / "still"):
        assert _checked(root, propagation="unchanged") == "propagates\n"


@pytest.mark.parametrize("propagation", ["unchanged", "slave"])
def test_driver_mounts_are_seen_by_peer_and_by_slave(kubelet: Path, propagation: str) -> None:
    below = kubelet / "plugins" / "kubernetes.io" / "csi" / "volumeDevices"
    assert _checked(below, propagation=propagation, check=_SEEN) == "propagates\n"


def test_shim_that_would_miss_mounts_is_refused(kubelet: Path) -> None:
    told = _checked(kubelet / "plugins", propagation="private", check=_SEEN)
    assert told.startswith("MountsNotSeen")
    for word in ("HostToContainer", "check_propagation = false", "wrap = false", str(kubelet)):
        assert word in told
