"""The CSI codec: invalid messages are refused, valid ones lose nothing, and maps have a size limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.core import errors, volumes
from crust.rpc import channel
from crust.rpc.messages import csi
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import encoded
from tests.support.faults.refusals import refused
from tests.support.raised import raised
from tests.support.records.records import IMAGE

Mode = csi_pb2.VolumeCapability.AccessMode


def mount(mode: int = 1, **fields: object) -> csi_pb2.VolumeCapability:
    pb = csi_pb2.VolumeCapability(access_mode=Mode(mode=Mode.Mode.ValueType(mode)))
    pb.mount.CopyFrom(csi_pb2.VolumeCapability.MountVolume(**fields))  # type: ignore[arg-type]
    return pb


@pytest.mark.parametrize(
    ("wire", "error", "words"),
    [
        (
            csi_pb2.VolumeCapability(access_mode=Mode(mode=Mode.SINGLE_NODE_WRITER)),
            csi.MissingField,
            "access_type",
        ),
        *((mount(number), errors.InvalidRequest, "access_mode") for number in (0, 8, 99)),
        (
            mount(volume_mount_group="1", volume_supplemental_group="2"),
            errors.InvalidRequest,
            "differ",
        ),
        (mount(volume_supplemental_group_change_policy="Always"), errors.InvalidRequest, "without"),
        (
            mount(
                volume_supplemental_group="5", volume_supplemental_group_change_policy="Sometimes"
            ),
            csi.UnsupportedValue,
            "Sometimes",
        ),
    ],
)
@pytest.mark.spec("D-5")
def test_capability_that_contradicts_itself_is_refused_by_its_field(
    wire: csi_pb2.VolumeCapability, error: type[errors.CrustError], words: str
) -> None:
    with pytest.raises(error, match=words):
        csi.capability(wire)
    with pytest.raises(csi.MissingField, match="volume_capabilities"):
        csi.capabilities([])


def test_mount_flags_above_four_kibibytes_are_refused_without_being_shown() -> None:
    with pytest.raises(csi.FieldTooLong) as caught:
        csi.capability(mount(mount_flags=["s3same" * 1000]))
    assert "s3same" not in str(caught.value)


@pytest.mark.spec("D-5")
@pytest.mark.parametrize(
    "fields",
    [
        {"volume_mount_group": "7"},
        {"volume_supplemental_group": "7"},
        {"volume_mount_group": "7", "volume_supplemental_group": "7"},
    ],
)
def test_group_that_comes_without_policy_is_changed_on_root_mismatch(
    fields: dict[str, Any],
) -> None:
    """Released kubelets send no policy; a walk of a large volume at every start of a pod takes hours."""
    wanted = volumes.GroupChange(7, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    assert csi.capability(mount(**fields)).access == volumes.MountAccess(group=wanted)


@pytest.mark.parametrize("group", ["0", "-1", "4294967295", "users", "٣", "1" * 5000])
@pytest.mark.spec("D-5")
def test_invalid_gid_is_refused(group: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        csi.capability(mount(volume_supplemental_group=group))
    if group != "0":
        with pytest.raises(errors.InvalidRequest):
            csi.capability(mount(volume_mount_group=group))


def test_group_0_is_allowed_for_host_and_refused_for_guest() -> None:
    capability = csi.capability(mount(volume_mount_group="0"))
    assert capability.access == volumes.MountAccess(group=volumes.GroupChange(0))
    assert csi.capability(encoded(capability)) == capability
    with pytest.raises(errors.InvalidRequest, match="'0'"):
        csi.capability(encoded(capability, deferred=True))
    with pytest.raises(errors.InvalidRequest, match="'0'"):
        csi.capability(mount(volume_mount_group="0", volume_supplemental_group="0"))


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
    assert csi.capability(encoded(value, deferred=True)) == value


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
        volumes.GuestFormat, st.none() | st.integers(4096, 2**26), st.none() | st.integers(0, 50)
    ),
)


@given(deferred_mounts)
def test_deferred_mount_survives_the_wire(value: volumes.DeferredMount) -> None:
    assert csi.deferred_mount(csi.deferred_mount_to_wire(value)) == value


@pytest.mark.spec("D-48")
@pytest.mark.parametrize(
    "changes",
    [
        {"encryption": volumes.Encryption.LUKS, "secrets": {"passphrase": "correct horse"}},
        {"source": IMAGE, "secrets": {"userKey": "correct horse"}},
    ],
    ids=["passphrase", "key of an image"],
)
def test_deferred_mount_survives_the_wire_with_its_secret(changes: dict[str, Any]) -> None:
    sent = replace(csi.deferred_mount(wire_mount()), **changes)
    received = csi.deferred_mount(csi.deferred_mount_to_wire(sent))
    assert received == sent
    assert received.secrets == changes["secrets"]
    assert "horse" not in repr(received)


def wire_image() -> csi_pb2.DeferredMount:
    mount = volumes.DeferredMount(IMAGE, "ext4", capacity_bytes=1 << 20, secrets={"userKey": "k"})
    return csi.deferred_mount_to_wire(mount)


def wire_mount() -> csi_pb2.DeferredMount:
    identity = volumes.DeviceIdentity(7, 3, 12)
    source = volumes.BlockSource("/dev/loop3", identity)
    return csi.deferred_mount_to_wire(volumes.DeferredMount(source, "ext4", capacity_bytes=1 << 20))


def _encrypted(answer: csi_pb2.DeferredMount) -> None:
    answer.encryption, answer.secrets["passphrase"] = "rot13", "correct horse"


@pytest.mark.spec("D-48")
@pytest.mark.parametrize(
    ("make", "alter", "words"),
    [
        *(
            (wire_mount, lambda answer, name=name: answer.ClearField(name), "deferred_mount")
            for name in ("block_device", "fs_type", "capacity_bytes")
        ),
        *(
            (wire_image, lambda answer, name=name: answer.network_image.ClearField(name), name)
            for name in ("cluster", "pool", "image", "monitors", "user")
        ),
        (wire_image, lambda answer: answer.secrets.clear(), "userKey"),
        (wire_mount, lambda answer: setattr(answer, "encryption", "luks"), "no passphrase"),
        (wire_mount, _encrypted, "not known"),
        *(
            (wire_mount, lambda answer, name=name, value=value: setattr(answer.format, name, value), name)
            for name, value in (
                ("ext4_bytes_per_inode", 4095),
                ("ext4_bytes_per_inode", 2**26 + 1),
                ("ext4_reserved_percent", 51),
                ("ext4_reserved_percent", -1),
            )
        ),
        (wire_mount, lambda answer: setattr(answer.block_device, "path", "dev/loop3"), "relative"),
        (wire_mount, lambda answer: answer.block_device.ClearField("identity"), "identity"),
    ],
)  # fmt: skip
def test_deferred_mount_that_is_incomplete_or_impossible_is_refused(
    make: Callable[[], csi_pb2.DeferredMount],
    alter: Callable[[csi_pb2.DeferredMount], None],
    words: str,
) -> None:
    answer = make()
    alter(answer)
    with pytest.raises(csi.InvalidDeferredMount, match=words) as caught:
        csi.deferred_mount(answer)
    assert "horse" not in str(caught.value)


@pytest.mark.parametrize("text", ["x" * 200, "é" * 100, "a" + "é" * 64])
def test_long_condition_message_is_shortened(text: str) -> None:
    message = csi.condition_to_wire(volumes.VolumeCondition(abnormal=True, message=text)).message
    assert 120 < len(message.encode()) <= 128
    assert message.endswith("…")
    assert text.startswith(message[:-1])
    whole = volumes.VolumeCondition(abnormal=True, message=text[:64])
    assert csi.condition_to_wire(whole).message == whole.message


def test_capacity_range_is_checked_when_decoded() -> None:
    with pytest.raises(errors.OutOfRange):
        csi.capacity_range(csi_pb2.CapacityRange(required_bytes=2, limit_bytes=1))
    with pytest.raises(errors.InvalidRequest):
        csi.capacity_range(csi_pb2.CapacityRange(required_bytes=-1))


def test_limits_count_bytes_and_allow_what_csi_allows() -> None:
    assert csi.required("ü" * 64, "name") == "ü" * 64
    with pytest.raises(csi.FieldTooLong):
        csi.required("ü" * 65, "name")
    assert csi.required("a/b\tc\n", "name") == "a/b\tc\n"
    with raised("InvalidCharacters"):
        csi.required("a\0b", "name")
    with pytest.raises(csi.FieldTooLong):
        csi.mapping({"k": "v" * 4096}, "parameters")


TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
FULL = {"key": "x" * (csi.MAP_MAX_BYTES - 3)}


def test_map_above_4_kib_is_refused() -> None:
    assert csi.mapping(FULL, "parameters") == FULL
    csi.check_context(FULL, "volume_context")
    for check in (csi.mapping, csi.check_context):
        with pytest.raises(csi.FieldTooLong, match="4097 bytes"):
            check({**FULL, "y": ""}, "volume_context")


def test_kubelet_keys_count_in_parameters_and_not_in_contexts() -> None:
    grown = {**FULL, TOKENS: "t" * 9000}
    csi.check_context(grown, "volume_context")
    with pytest.raises(csi.FieldTooLong):
        csi.mapping(grown, "parameters")


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


@pytest.mark.parametrize(
    ("mode", "flags", "by_field", "wanted"),
    [
        (1, [], False, False),
        (1, [], True, True),
        (3, [], False, True),
        (1, ["noatime", "ro"], False, True),
        (1, ["ro,rw"], False, False),
    ],
)
def test_publish_is_readonly_by_field_mode_or_flag(
    mode: int, flags: list[str], *, by_field: bool, wanted: bool
) -> None:
    request = csi_pb2.NodePublishVolumeRequest(
        readonly=by_field, volume_capability=mount(mode, mount_flags=flags)
    )
    assert csi.is_readonly(request) is wanted
