"""What may be deferred of a wrapped driver, judged by the original request."""

import pytest

from crust.core import deferral_keys, errors, volumes
from crust.csi_shim.wrap import admission, vendors
from crust.csi_shim.wrap.admission import CannotBeDeferred
from crust.host.mounts import mount_options
from crust.host.mounts.mount_options import InvalidMountOption
from crust.wire.csi.v1 import csi_pb2
from tests.support.wrapped_volume import DRIVER, publish

MODE = csi_pb2.VolumeCapability.AccessMode
EMPTY = {"crust.dev/created-empty": "true"}


@pytest.mark.parametrize(
    ("mode", "readonly"),
    [
        (MODE.SINGLE_NODE_WRITER, False),
        (MODE.SINGLE_NODE_SINGLE_WRITER, False),
        (MODE.SINGLE_NODE_MULTI_WRITER, False),
        (MODE.SINGLE_NODE_READER_ONLY, True),
        (MODE.MULTI_NODE_READER_ONLY, True),
    ],
)
def test_other_modes_are_admitted_and_readers_are_read_only(mode: int, *, readonly: bool) -> None:
    assert admission.admit(DRIVER, publish(mode=mode)).readonly is readonly


INLINE = "csi.storage.k8s.io/ephemeral"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (publish(mode=MODE.MULTI_NODE_MULTI_WRITER), "several nodes write"),
        (publish(mode=MODE.MULTI_NODE_SINGLE_WRITER), "several nodes write"),
        (publish(context={INLINE: "true"}), "inline"),
        (publish(block=True), "raw block"),
        *(
            (publish(mount={"fs_type": fs_type}), fs_type)
            for fs_type in sorted(vendors.NETWORK_FILESYSTEMS)
        ),
        *(
            (publish(context={**EMPTY, key: "4096"}), key)  # no guest can follow it
            for key in vendors.MKFS_OPTIONS
        ),
    ],
)
def test_volume_that_no_guest_mounts_from_a_device_is_refused(
    request_: csi_pb2.NodePublishVolumeRequest, words: str
) -> None:
    with pytest.raises(CannotBeDeferred, match=words):
        admission.admit(DRIVER, request_)


@pytest.mark.parametrize(
    "context",
    [
        {},
        {INLINE: "false"},
        {"encrypted": "true", "encryptionType": "block"},
        *({key: "4096"} for key in vendors.MKFS_OPTIONS),
    ],
)
def test_volume_not_created_empty_is_admitted_and_never_formatted(context: dict[str, str]) -> None:
    admitted = admission.admit(DRIVER, publish(context=context))
    assert (admitted.fs_type, admitted.format) == ("ext4", None)


@pytest.mark.parametrize("row", vendors.NOT_DEFERRABLE, ids=lambda row: str(row.key))
@pytest.mark.parametrize("where", ["volume_context", "publish_context"])
def test_undeferrable_publish_is_refused_by_its_key(row: vendors.NotDeferrable, where: str) -> None:
    value = next(iter(sorted(row.values)), "1")
    request = publish()
    getattr(request, where)[row.key] = value
    with pytest.raises(CannotBeDeferred, match=row.key):
        admission.admit(row.driver or DRIVER, request)
    if row.driver:
        admission.admit(DRIVER, request)


@pytest.mark.parametrize(
    ("driver", "volume_id"),
    [("csi.vsphere.vmware.com", "file:0f3c"), ("csi-powerstore.dellemc.com", "0f3c/PS1/nfs")],
)
def test_file_share_is_refused_by_its_id(driver: str, volume_id: str) -> None:
    request = publish()
    request.volume_id = volume_id
    with pytest.raises(CannotBeDeferred, match="file share"):
        admission.admit(driver, request)
    admission.admit(DRIVER, request)


def test_encryption_that_driver_leaves_open_is_refused_without_secret() -> None:
    secrets = {"encryption-passphrase": "correct horse"}
    with pytest.raises(CannotBeDeferred, match="leaves the mapping open") as caught:
        admission.admit("csi.hetzner.cloud", publish(secrets=secrets))
    assert "correct horse" not in caught.value.shown()
    admission.admit("csi.hetzner.cloud", publish())
    admission.admit(DRIVER, publish(secrets=secrets))


def test_filesystem_is_of_capability_or_context_or_ext4() -> None:
    assert admission.admit(DRIVER, publish(mount={"fs_type": ""})).fs_type == "ext4"
    context = {"fsType": "xfs"}
    assert admission.admit(DRIVER, publish(context=context)).fs_type == "ext4"
    assert admission.admit("disk.csi.azure.com", publish(context=context)).fs_type == "xfs"
    attached = publish(publish_context={"FsType": "xfs"})
    assert admission.admit("linstor.csi.linbit.com", attached).fs_type == "xfs"


@pytest.mark.parametrize(
    ("sent", "options"), [("noatime", ("noatime", "nouuid")), ("nouuid", ("nouuid",))]
)
def test_xfs_is_mounted_with_nouuid_as_drivers_do(sent: str, options: tuple[str, ...]) -> None:
    request = publish(mount={"fs_type": "xfs", "mount_flags": [sent]})
    assert admission.admit(DRIVER, request).options == options


def test_options_for_the_host_do_not_reach_the_guest() -> None:
    flags = ["_netdev", "read_ahead_kb=4096", "directmount", "btrfs-bdi-read_ahead_kb=8", "discard"]
    assert admission.admit(DRIVER, publish(mount={"mount_flags": flags})).options == ("discard",)
    assert mount_options.parse(flags, for_guest=True) == ("discard",)


def test_option_that_no_guest_knows_is_refused_by_name() -> None:
    with pytest.raises(InvalidMountOption, match="frobnicate"):
        admission.admit(DRIVER, publish(mount={"mount_flags": ["frobnicate=1"]}))


def test_guest_formats_a_volume_that_was_created_empty() -> None:
    context = {**EMPTY, "crust.dev/ext4-reserved-percent": "1"}
    admitted = admission.admit(DRIVER, publish(context=context))
    assert admitted.format == volumes.GuestFormat(None, 1)


@pytest.mark.parametrize(("key", "values"), vendors.NEVER_FORMAT, ids=lambda key: str(key)[:30])
def test_vendors_key_overrides_created_empty(key: str, values: frozenset[str]) -> None:
    context = {**EMPTY, key: next(iter(sorted(values)), "1")}
    assert admission.admit(DRIVER, publish(context=context)).format is None


def test_mount_option_for_existing_content_overrides_created_empty() -> None:
    request = publish(context=EMPTY, mount={"mount_flags": ["directmount"]})
    assert admission.admit(DRIVER, request).format is None


@pytest.mark.parametrize(
    ("context", "partition"), [({"partition": "3"}, 3), ({"partition": "0"}, None), ({}, None)]
)
def test_partition_is_a_number(context: dict[str, str], partition: int | None) -> None:
    assert admission.admit(DRIVER, publish(context=context)).partition == partition
    with pytest.raises(deferral_keys.InvalidDeferKey, match="partition"):
        admission.admit(DRIVER, publish(context={"partition": "one"}))


def test_volume_without_an_id_is_refused() -> None:
    request = publish()
    request.volume_id = ""
    with pytest.raises(errors.InvalidRequest, match="volume_id"):
        admission.admit(DRIVER, request)
