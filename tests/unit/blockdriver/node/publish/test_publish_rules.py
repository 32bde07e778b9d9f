"""The second-publish table of the CSI specification, cell by cell, and the rule of deferral."""

import pytest

from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records.node_state import Published
from crust.core import volumes
from tests.support.drivers.block_driver import Mode, block, mount
from tests.support.raised import raised

SHARED = {
    Mode.MULTI_NODE_READER_ONLY,
    Mode.MULTI_NODE_SINGLE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
}


def publish(
    target: str = "/pods/a/mount",
    capability: volumes.VolumeCapability | None = None,
    *,
    readonly: bool = False,
    deferred: bool = False,
    context: dict[str, str] | None = None,
) -> Publish:
    return Publish(
        volume_id=volumes.VolumeId("vol-1"),
        target=volumes.TargetPath.parse(target),
        staging=volumes.TargetPath.parse("/staging/vol-1"),
        capability=capability or mount(),
        readonly=readonly,
        deferred=deferred,
        volume_context=tuple((context or {}).items()),
    )


def recorded(request: Publish) -> Published:
    return publish_rules.entry_of(request, "ext4")


@pytest.mark.parametrize("mode", list(Mode))
def test_publish_another_target_depends_on_the_access_mode(mode: Mode) -> None:
    present = recorded(publish("/pods/a/mount", mount(mode=mode)))
    wanted = recorded(publish("/pods/b/mount", mount(mode=mode)))
    if mode in SHARED:
        publish_rules.check_other_targets([present], wanted)
        return
    with raised("PublishedElsewhere", match="/pods/a/mount"):
        publish_rules.check_other_targets([present], wanted)


def test_publish_elsewhere_names_the_other_pod_where_it_is_known() -> None:
    names = {"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "db-0"}
    for context, words in ((names, "stop the pod shop/db-0"), ({}, "stop the pod that uses it")):
        present = recorded(publish(context=context, deferred=True))
        with raised("PublishedElsewhere", match=words):
            publish_rules.check_other_targets([present], recorded(publish("/pods/b/mount")))


@pytest.mark.parametrize(
    "other",
    [block(), mount("xfs"), mount("ext4", "noatime"), mount(mode=Mode.MULTI_NODE_MULTI_WRITER)],
    ids=["access type", "filesystem", "options", "mode"],
)
def test_second_target_with_another_capability_is_refused(other: volumes.VolumeCapability) -> None:
    present = publish_rules.entry_of(publish("/pods/a/mount", other), "xfs")
    if isinstance(other.access, volumes.MountAccess):
        present = publish_rules.entry_of(publish("/pods/a/mount", other), other.access.fs_type)
    with raised("PublishedElsewhere"):
        publish_rules.check_other_targets([present], recorded(publish("/pods/b/mount")))


@pytest.mark.parametrize("present_deferred", [False, True])
@pytest.mark.parametrize("wanted_deferred", [False, True])
@pytest.mark.parametrize("present_readonly", [False, True])
@pytest.mark.parametrize("wanted_readonly", [False, True])
def test_publish_host_and_guest_share_only_read_only(
    *, present_deferred: bool, wanted_deferred: bool, present_readonly: bool, wanted_readonly: bool
) -> None:
    present = recorded(publish(readonly=present_readonly, deferred=present_deferred))
    wanted = recorded(publish("/pods/b/mount", readonly=wanted_readonly, deferred=wanted_deferred))
    kernels_differ = present_deferred or wanted_deferred
    if kernels_differ and not (present_readonly and wanted_readonly):
        with raised("PublishedElsewhere"):
            publish_rules.check_other_targets([present], wanted)
    else:
        publish_rules.check_other_targets([present], wanted)


def test_fingerprint_ignores_pod_names_and_tokens() -> None:
    first = publish(context={"csi.storage.k8s.io/pod.name": "a", "crust.dev/defer": "always"})
    again = publish(
        context={
            "csi.storage.k8s.io/pod.name": "b",
            "csi.storage.k8s.io/serviceAccount.tokens": "fresh",
            "crust.dev/defer": "always",
        }
    )
    other = publish(context={"crust.dev/defer": "never"})
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "request_",
    [
        publish(readonly=True),
        publish(capability=mount("ext4", "ro")),
        publish(capability=mount(mode=Mode.SINGLE_NODE_READER_ONLY)),
    ],
    ids=["flag", "mount option", "access mode"],
)
def test_publish_read_only_has_three_forms(request_: Publish) -> None:
    assert recorded(request_).readonly


def test_entry_holds_no_host_option_and_no_credential() -> None:
    request = publish(capability=mount("ext4", "noatime", "_netdev", "rw"), deferred=True)
    assert recorded(request).options == ("noatime",)
    secret = publish(capability=mount("ext4", "password=x1y2"))
    with raised("CredentialInOptions"):
        recorded(secret)
    assert "x1y2" not in repr(secret)


def test_fingerprint_is_stable_across_driver_versions() -> None:
    """A kubelet publishes again whenever tokens change; what an earlier version wrote down must be equal then."""
    group = volumes.GroupChange(2000)
    context = {"crust.dev/defer": "never", "csi.storage.k8s.io/pod.uid": "u"}
    filesystem = publish(
        capability=mount("xfs", "noatime", group=group), readonly=True, context=context
    )
    expected = "d74d2a9bd486dd2e2cc1d1b8a2648a72e347f06820112a8e56171a87728b0e1a"
    assert filesystem.fingerprint == expected
    expected = "136a1501b2634a0eeeb36b6051b0c2cd304a0d8b925bf5119ebca16f102a2b7e"
    assert publish(capability=block()).fingerprint == expected
