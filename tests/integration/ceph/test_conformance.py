"""The controller part on a Ceph pool passes the suite, in both profiles; what is skipped is what it has not.

It runs in mode controller, on any host: there is no Node service. Every node reaches the pool, so there is no
topology and nothing to attach.
"""

import tempfile
from pathlib import Path

import pytest

from crust_conformance import suite
from crust_conformance.options import MIB, Options, Parameters, Profile
from examples.cluster.ceph_cluster import CephCluster
from tests.support import capabilities
from tests.support.ceph import rbd_driver
from tests.support.third_party import csi_sanity

_LACKING = (
    "node",
    "node.",
    "controller.PUBLISH",
    "controller.GET_NODE_INFO",
    "controller.LIST_VOLUMES_PUBLISHED_NODES",
    "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS",
    "plugin.OFFLINE",
)
_OTHER_PROFILE_CAPABILITIES = {
    "1.12": {"C-145": "GET_VOLUME_HEALTH", "C-146": "LIST_VOLUME_HEALTH"},
    "1.13": {"C-138": "VOLUME_CONDITION", "C-139": "VOLUME_CONDITION"},
}


_CLONE = (
    "[It] Controller Service [Controller Server] "
    "CreateVolume should create volume from an existing source volume"
)
"""Its clean-up deletes the source once, while the copy still reads it: external-provisioner deletes again."""


@pytest.mark.parametrize("profile", ["1.12", "1.13"])
def test_the_controller_conforms(ceph: CephCluster, profile: Profile) -> None:
    given = Parameters(
        mutable_parameters={"writeIOPS": "100", "readBytesPerSecond": "0"},
        size_bytes=320 * MIB,
        raw_size_bytes=64 * MIB,
        fs_types=("xfs", "ext4", "btrfs"),
    )
    with (
        tempfile.TemporaryDirectory() as target_root,
        rbd_driver.serving(ceph, profile=profile) as driver,
    ):
        outcome = suite.run_suite(
            Options(
                socket=str(driver.socket),
                target_root=Path(target_root),
                profile=profile,
                parameters=given,
                log=driver.log,
                restart_command=driver.restart_command,
                strict=True,
            )
        )
    assert outcome.numbers("failed", "warning", "note") == frozenset()
    assert outcome.exit_code == 0
    assert outcome.numbers("passed")
    for case, why in outcome.skipped.items():
        missing = [capability.strip() for capability in why.split(",")]
        assert any(capability.startswith(_LACKING) for capability in missing) or (
            missing == [f"controller.{_OTHER_PROFILE_CAPABILITIES[profile].get(case)}"]
        ), f"{case} is skipped: {why}"


def test_csi_sanity_fails_only_at_mounts_without_kernel_rbd(ceph: CephCluster) -> None:
    """On a host whose kernel maps no images a volume is published with deferral alone, which csi-sanity knows not."""
    capabilities.need("csi-sanity")
    with rbd_driver.serving(ceph, mode="all") as driver:
        mutable = driver.base / "mutable.yaml"
        mutable.write_text('writeIOPS: "100"\n')
        outcome = csi_sanity.run(
            str(driver.socket), driver.base,
            f"--csi.testvolumemutableparameters={mutable}", f"--csi.testvolumesize={320 * MIB}",
        )  # fmt: skip
    without_kernel = {name for name, why in outcome.failed.items() if "[NoHostDevice]" in why}
    assert all(name.startswith("[It] Node Service") for name in without_kernel)
    others = {name: why for name, why in outcome.failed.items() if name not in without_kernel}
    assert others.keys() <= {_CLONE}
    assert all("[StillAttached]" in why for why in others.values())
    attaching = ("ControllerPublishVolume", "ControllerUnpublishVolume", "volume lifecycle")
    assert all(any(word in name for word in attaching) for name in outcome.skipped)
    assert len(outcome.passed) >= 78
