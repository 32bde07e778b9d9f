"""The CSI codec: invalid messages are refused, valid ones lose nothing, and maps have a size limit."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.core import errors, volumes
from crust.rpc import channel
from crust.rpc.messages import crust_v1, csi, limits
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused
from tests.support.raised import raised
from tests.support.records.records import IMAGE

Mode = csi_pb2.VolumeCapability.AccessMode


def mount(mode: int = 1, **fields: object) -> csi_pb2.VolumeCapability:
    pb = csi_pb2.VolumeCapability(access_mode=Mode(mode=Mode.Mode.ValueType(mode)))
    pb.mount.CopyFrom(csi_pb2.VolumeCapability.MountVolume(**fields))  # type: ignore[arg-type]
    return pb


def test_a_capability_without_an_access_type_is_refused() -> None:
    pb = csi_pb2.VolumeCapability(access_mode=Mode(mode=Mode.SINGLE_NODE_WRITER))
    with pytest.raises(limits.MissingField, match="access_type"):
        csi.capability(pb)


@pytest.mark.parametrize("number", [0, 8, 99])
def test_an_access_mode_that_csi_does_not_have_is_refused(number: int) -> None:
    with pytest.raises(errors.InvalidRequest, match="access_mode"):
        csi.capability(mount(number))


def test_an_empty_list_of_capabilities_is_refused_by_its_field_name() -> None:
    with pytest.raises(limits.MissingField, match="volume_capabilities"):
        csi.capabilities([])


def test_mount_flags_above_four_kibibytes_are_refused_without_being_shown() -> None:
    with pytest.raises(limits.FieldTooLong) as caught:
        csi.capability(mount(mount_flags=["s3same" * 1000]))
    assert "s3same" not in str(caught.value)


@pytest.mark.spec("D-5")
def test_the_two_group_fields_must_agree() -> None:
    with pytest.raises(errors.InvalidRequest, match="differ"):
        csi.capability(mount(volume_mount_group="1", volume_supplemental_group="2"))
    both = csi.capability(mount(volume_mount_group="7", volume_supplemental_group="7"))
    assert both.access == volumes.MountAccess(group=volumes.GroupChange(7))


@pytest.mark.spec("D-5")
def test_group_without_a_policy_is_changed_only_on_root_mismatch() -> None:
    """Released kubelets send no policy; a walk of a large volume at every start of a pod takes hours."""
    wanted = volumes.GroupChange(7, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    for sent in (mount(volume_mount_group="7"), mount(volume_supplemental_group="7")):
        assert csi.capability(sent).access == volumes.MountAccess(group=wanted)


@pytest.mark.parametrize("group", ["0", "-1", "4294967295", "users", "٣"])
@pytest.mark.spec("D-5")
def test_invalid_gid_is_refused(group: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        csi.capability(mount(volume_supplemental_group=group))
    if group != "0":
        with pytest.raises(errors.InvalidRequest):
            csi.capability(mount(volume_mount_group=group))


def test_group_0_is_allowed_for_the_host_and_refused_for_a_guest() -> None:
    capability = csi.capability(mount(volume_mount_group="0"))
    assert capability.access == volumes.MountAccess(group=volumes.GroupChange(0))
    assert csi.capability(csi.capability_to_wire(capability)) == capability
    with pytest.raises(errors.InvalidRequest, match="'0'"):
        csi.capability(csi.capability_to_wire(capability, deferred=True))
    with pytest.raises(errors.InvalidRequest, match="'0'"):
        csi.capability(mount(volume_mount_group="0", volume_supplemental_group="0"))


@pytest.mark.spec("D-5")
def test_a_policy_needs_a_group_and_must_be_known() -> None:
    with pytest.raises(errors.InvalidRequest, match="without"):
        csi.capability(mount(volume_supplemental_group_change_policy="Always"))
    with pytest.raises(csi.UnsupportedValue):
        csi.capability(
            mount(
                volume_supplemental_group="5",
                volume_supplemental_group_change_policy="Sometimes",
            )
        )


gids = st.integers(1, 2**32 - 2)
groups = st.none() | st.builds(volumes.GroupChange, gids, st.sampled_from(volumes.GroupPolicy))
accesses = st.just(volumes.BlockAccess()) | st.builds(
    volumes.MountAccess,
    st.sampled_from(["", "ext4", "xfs"]),
    st.lists(st.text("abc=", max_size=5), max_size=3).map(tuple),
    groups,
)
capabilities = st.builds(volumes.VolumeCapability, accesses, st.sampled_from(volumes.AccessMode))


@given(capabilities)
def test_capability_survives_the_wire_with_its_group(value: volumes.VolumeCapability) -> None:
    assert csi.capability(csi.capability_to_wire(value, deferred=True)) == value


deferred_mounts = st.builds(
    volumes.DeferredMount,
    source=st.builds(
        volumes.BlockSource,
        st.just("/dev/loop7"),
        st.builds(
            volumes.DeviceIdentity,
            st.integers(0, 4095),
            st.integers(0, 2**20 - 1),
            st.integers(1, 2**63),
        ),
    ),
    fs_type=st.sampled_from(["ext4", "xfs"]),
    mount_options=st.lists(st.sampled_from(["noatime", "nosuid", "data=ordered"])).map(tuple),
    group=groups,
    readonly=st.booleans(),
    capacity_bytes=st.integers(1, 2**62),
    content_generation=st.integers(0, 2**31),
    format=st.none()
    | st.builds(
        volumes.GuestFormat,
        st.none() | st.integers(4096, 2**26),
        st.none() | st.integers(0, 50),
    ),
)


@given(deferred_mounts)
def test_a_deferred_mount_survives_the_wire(value: volumes.DeferredMount) -> None:
    assert csi.deferred_mount(csi.deferred_mount_to_wire(value)) == value


def test_encrypted_deferred_mount_survives_the_wire_with_its_passphrase() -> None:
    mount = csi.deferred_mount(wire_mount())
    secret = {"passphrase": "correct horse"}
    mount = replace(mount, encryption=volumes.Encryption.LUKS, secrets=secret)
    received = csi.deferred_mount(csi.deferred_mount_to_wire(mount))
    assert received == mount
    assert received.secrets == secret


def test_encryption_without_a_passphrase_or_of_an_unknown_kind_is_refused() -> None:
    pb = wire_mount()
    pb.encryption = "luks"
    with pytest.raises(csi.InvalidDeferredMount, match="no passphrase"):
        csi.deferred_mount(pb)
    pb.secrets["passphrase"] = "correct horse"
    pb.encryption = "rot13"
    with pytest.raises(csi.InvalidDeferredMount, match="not known") as caught:
        csi.deferred_mount(pb)
    assert "horse" not in str(caught.value)


@pytest.mark.spec("D-48")
def test_image_survives_the_wire_with_the_key_of_its_user() -> None:
    mount = replace(csi.deferred_mount(wire_mount()), source=IMAGE, secrets={"userKey": "AQ=="})
    received = csi.deferred_mount(csi.deferred_mount_to_wire(mount))
    assert received == mount
    assert received.secrets == {"userKey": "AQ=="}
    assert "AQ==" not in repr(received)


@pytest.mark.spec("D-48")
@pytest.mark.parametrize("field", ["cluster", "pool", "image", "monitors", "user"])
def test_image_with_a_field_missing_is_refused(field: str) -> None:
    pb = wire_image()
    pb.network_image.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(csi.InvalidDeferredMount, match=field):
        csi.deferred_mount(pb)


@pytest.mark.spec("D-48")
def test_image_without_the_key_of_its_user_is_refused() -> None:
    pb = wire_image()
    pb.secrets.clear()
    with pytest.raises(csi.InvalidDeferredMount, match="userKey"):
        csi.deferred_mount(pb)


def wire_image() -> csi_pb2.DeferredMount:
    mount = volumes.DeferredMount(IMAGE, "ext4", capacity_bytes=1 << 20, secrets={"userKey": "k"})
    return csi.deferred_mount_to_wire(mount)


@pytest.mark.parametrize(("inode", "percent"), [(4095, 0), (2**26 + 1, 0), (0, 51), (0, -1)])
def test_mkfs_options_out_of_range_are_refused(inode: int, percent: int) -> None:
    pb = wire_mount()
    pb.format.ext4_bytes_per_inode = inode
    pb.format.ext4_reserved_percent = percent
    with pytest.raises(csi.InvalidDeferredMount, match="ext4_"):
        csi.deferred_mount(pb)


def wire_mount() -> csi_pb2.DeferredMount:
    identity = volumes.DeviceIdentity(7, 3, 12)
    source = volumes.BlockSource("/dev/loop3", identity)
    return csi.deferred_mount_to_wire(volumes.DeferredMount(source, "ext4", capacity_bytes=1 << 20))


@pytest.mark.parametrize("field", ["block_device", "fs_type", "capacity_bytes"])
def test_deferred_mount_without_a_required_field_is_refused(field: str) -> None:
    pb = wire_mount()
    pb.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(csi.InvalidDeferredMount):
        csi.deferred_mount(pb)


def test_a_deferred_mount_with_a_relative_device_path_or_no_identity_is_refused() -> None:
    pb = wire_mount()
    pb.block_device.path = "dev/loop3"
    with pytest.raises(csi.InvalidDeferredMount, match="relative"):
        csi.deferred_mount(pb)
    pb = wire_mount()
    pb.block_device.ClearField("identity")
    with pytest.raises(csi.InvalidDeferredMount, match="identity"):
        csi.deferred_mount(pb)


def test_a_deferred_mount_with_a_credential_is_refused_both_ways() -> None:
    pb = wire_mount()
    pb.mount_options.append("password=x1y2")
    with raised("CredentialInOptions"):
        csi.deferred_mount(pb)


@pytest.mark.parametrize("text", ["x" * 200, "é" * 100, "a" + "é" * 64])
def test_long_condition_message_is_shortened(text: str) -> None:
    message = csi.condition_to_wire(volumes.VolumeCondition(abnormal=True, message=text)).message
    assert 120 < len(message.encode()) <= 128
    assert message.endswith("…")
    assert text.startswith(message[:-1])
    whole = volumes.VolumeCondition(abnormal=True, message=text[:64])
    assert csi.condition_to_wire(whole).message == whole.message


def test_statistics_survive_the_wire_with_and_without_a_condition() -> None:
    usage = (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 10, 4, 6),)
    for condition in (None, volumes.VolumeCondition(abnormal=True, message="gone")):
        value = volumes.VolumeStats(usage, condition)
        answer: Any = csi.stats_to_wire(value)
        reported = answer.volume_condition if answer.HasField("volume_condition") else None
        assert crust_v1.stats(answer.usage, reported) == value


def test_capacity_range_is_checked_when_decoded() -> None:
    with pytest.raises(errors.OutOfRange):
        csi.capacity_range(csi_pb2.CapacityRange(required_bytes=2, limit_bytes=1))
    with pytest.raises(errors.InvalidRequest):
        csi.capacity_range(csi_pb2.CapacityRange(required_bytes=-1))


def test_limits_count_bytes_and_allow_what_csi_allows() -> None:
    assert limits.required("ü" * 64, "name") == "ü" * 64
    with pytest.raises(limits.FieldTooLong):
        limits.required("ü" * 65, "name")
    assert limits.required("a/b\tc\n", "name") == "a/b\tc\n"
    with raised("InvalidCharacters"):
        limits.required("a\0b", "name")
    with pytest.raises(limits.FieldTooLong):
        limits.mapping({"k": "v" * 4096}, "parameters")


TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
FULL = {"key": "x" * (limits.MAP_MAX_BYTES - 3)}


def test_a_map_of_4_kib_is_fine_and_one_byte_more_is_not() -> None:
    assert limits.mapping(FULL, "parameters") == FULL
    limits.check_context(FULL, "volume_context")
    for check in (limits.mapping, limits.check_context):
        with pytest.raises(limits.FieldTooLong, match="4097 bytes"):
            check({**FULL, "y": ""}, "volume_context")


def test_kubelet_keys_count_in_parameters_and_not_in_contexts() -> None:
    grown = {**FULL, TOKENS: "t" * 9000}
    limits.check_context(grown, "volume_context")
    with pytest.raises(limits.FieldTooLong):
        limits.mapping(grown, "parameters")


class Deleter:
    """Accepts every DeleteVolume."""

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, context: object
    ) -> csi_pb2.DeleteVolumeResponse:
        return csi_pb2.DeleteVolumeResponse()


async def test_too_long_secrets_are_refused_without_being_shown(short: str) -> None:
    path = f"{short}/a.sock"
    methods = methods_of(Deleter(), csi_pb2.DESCRIPTOR.services_by_name["Controller"])
    async with server.serving(path, Service("t", methods)), channel.connect(path) as c:
        delete = csi_pb2_grpc.ControllerStub(c).DeleteVolume
        await delete(csi_pb2.DeleteVolumeRequest(volume_id="a", secrets=FULL))
        longer = csi_pb2.DeleteVolumeRequest(volume_id="a", secrets={**FULL, "y": ""})
        code = grpc.StatusCode.INVALID_ARGUMENT
        assert "xxx" not in await refused(delete(longer), code, "secrets is too long")
