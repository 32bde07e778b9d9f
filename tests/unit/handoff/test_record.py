"""crust.handoff.record: every written record can be read, and nothing else can."""

import json
import string
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crust.core import errors, volumes
from crust.handoff.record import Record, UnreadableHandoffRecord, UnrecordableMount
from crust.host.mounts import mount_options
from tests.support.raised import raised
from tests.support.records.records import HANDLER, IMAGE, KEY, MOUNT, TARGET, a_record

WORDS = st.text(string.ascii_lowercase + string.digits + "_=", min_size=1, max_size=12).filter(
    lambda word: _is_fit(word)
)

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/", exclude_categories=["Cc"]),
    min_size=1,
    max_size=40,
).filter(lambda name: name not in (".", ".."))

FORMATS = st.builds(
    volumes.GuestFormat, st.none() | st.integers(4096, 2**26), st.none() | st.integers(0, 50)
)


def _is_fit(word: str) -> bool:
    try:
        return mount_options.parse([word], for_guest=True) == (word,)
    except errors.InvalidRequest:
        return False


@st.composite
def deferred_mounts(draw: st.DrawFn) -> volumes.DeferredMount:
    gid = draw(st.none() | st.integers(1, 2**32 - 2))
    policy = draw(st.sampled_from(volumes.GroupPolicy))
    numbers = st.integers(0, 2**63 - 1)
    identity = volumes.DeviceIdentity(
        draw(st.integers(0, 4095)), draw(st.integers(0, 2**20 - 1)), draw(numbers)
    )
    return volumes.DeferredMount(
        source=draw(
            st.builds(volumes.BlockSource, NAMES.map("/dev/{}".format), st.just(identity))
            | st.just(IMAGE)
        ),
        fs_type=draw(st.sampled_from(["ext4", "xfs", "btrfs"])),
        mount_options=tuple(draw(st.lists(WORDS, max_size=5, unique=True))),
        group=None if gid is None else volumes.GroupChange(gid, policy),
        readonly=draw(st.booleans()),
        capacity_bytes=draw(numbers),
        content_generation=draw(numbers),
        format=draw(st.none() | FORMATS),
        encryption=draw(st.none() | st.sampled_from(volumes.Encryption)),
    )


@given(deferred_mounts(), NAMES)
def test_record_round_trips_through_bytes(mount: volumes.DeferredMount, name: str) -> None:
    target = volumes.TargetPath.parse(f"/var/lib/kubelet/{name}/mount")
    record = Record.of(mount, KEY, target, HANDLER)
    data = record.to_bytes()
    assert Record.parse(data, digest=target.digest) == record
    assert record.mount == mount
    assert data.count(b"\n") == 1
    assert data.isascii()
    assert Record.parse(data).to_bytes() == data


@given(st.binary(max_size=300))
def test_arbitrary_bytes_make_parse_raise_only_its_own_errors(data: bytes) -> None:
    with pytest.raises(errors.Corrupt):
        Record.parse(data)


@given(st.data())
def test_damaged_records_make_parse_raise_only_its_own_errors(data: st.DataObject) -> None:
    good = a_record().to_bytes()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    damaged = good[:start] + data.draw(st.binary(max_size=8)) + good[end:]
    try:
        Record.parse(damaged)
    except errors.Corrupt:
        return


def test_record_has_the_keys_of_kata_and_the_kep() -> None:
    plain = json.loads(a_record(readonly=True).to_bytes())
    assert plain["volume-type"] == "block"
    assert plain["device"] == "/dev/loop7"
    assert plain["fstype"] == "ext4"
    assert plain["metadata"] == {"fsGroup": "3000", "fsGroupChangePolicy": "OnRootMismatch"}
    assert plain["options"] == ["ro", "noatime"]


def _changed(**changes: Any) -> bytes:
    plain = json.loads(a_record().to_bytes())
    plain.update({key.replace("__", "-"): value for key, value in changes.items()})
    return json.dumps(plain).encode()


def _in_crust(key: str, value: Any) -> bytes:
    plain = json.loads(a_record().to_bytes())
    plain["crust"][key] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="torn"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[" * 60_000, id="deep"),
        pytest.param(a_record().to_bytes()[:-20], id="cut"),
        pytest.param(_changed(device="dev/loop7"), id="relative device"),
        pytest.param(_changed(device="/dev/../etc/shadow"), id="device with dots"),
        pytest.param(_changed(fstype=""), id="no filesystem"),
        pytest.param(_changed(fstype="ext4,foo"), id="filesystem with a comma"),
        pytest.param(_changed(volume__type="directvol"), id="another volume type"),
        pytest.param(_changed(options=["ro"]), id="ro in options only"),
        pytest.param(_changed(options=["bind"]), id="bind"),
        pytest.param(_changed(options=["_netdev"]), id="an option of the host"),
        pytest.param(_changed(options=["noatime,ro"]), id="two options in one"),
        pytest.param(_changed(options="noatime"), id="options as text"),
        pytest.param(_changed(metadata={"fsGroup": 100}), id="gid as a number"),
        pytest.param(_changed(metadata={"fsGroup": "0"}), id="gid 0"),
        pytest.param(_changed(metadata={"fsGroup": "4294967295"}), id="gid -1"),
        pytest.param(_changed(metadata={"fsGroupChangePolicy": "Always"}), id="policy alone"),
        pytest.param(
            _changed(metadata={"createFilesystem": "true"}), id="a key that formats in kata"
        ),
        pytest.param(_in_crust("readonly", 0), id="a number for a boolean"),
        pytest.param(_in_crust("schema", 0), id="schema 0"),
        pytest.param(_in_crust("schema", "1"), id="schema as text"),
        pytest.param(_in_crust("generation", 0), id="generation 0"),
        pytest.param(_in_crust("capacity_bytes", -1), id="negative size"),
        pytest.param(_in_crust("capacity_bytes", 2**63), id="size beyond int64"),
        pytest.param(_in_crust("target_path", "/a/../b"), id="target with dots"),
        pytest.param(_in_crust("target_path", "/" + "a" * 5000), id="target too long"),
        pytest.param(_in_crust("handler", "Kata!"), id="handler's name"),
        pytest.param(_in_crust("published_at", "2026-01-01T00:00:00"), id="time without a zone"),
        pytest.param(_in_crust("identity", {"major": 7, "minor": 7}), id="no disk sequence"),
        pytest.param(_in_crust("required", ["limits.burst"]), id="one of a part"),
        pytest.param(_in_crust("required", "limits"), id="required as text"),
    ],
)
def test_invalid_record_is_unreadable_and_the_error_names_the_field(data: bytes) -> None:
    with pytest.raises(UnreadableHandoffRecord, match=r"/r/mountInfo\.json"):
        Record.parse(data, path="/r/mountInfo.json")


@pytest.mark.spec("H-5")
def test_keys_of_later_version_are_ignored_unless_required() -> None:
    plain = json.loads(_in_crust("limits", {"read_iops": 5, "burst": 7}))
    plain["later"] = {"a": 1}
    plain["crust"] |= {"later": [], "required": ["limits", "limits.read_iops", "schema"]}
    plain["crust"]["identity"]["later"] = True
    record = Record.parse(json.dumps(plain).encode())
    assert record.mount == a_record(io_limits=volumes.IoLimits(read_iops=5)).mount


@pytest.mark.spec("H-6")
def test_newer_schema_is_reported_whatever_else_differs() -> None:
    plain = json.loads(_in_crust("schema", 3))
    plain["brand-new"] = True
    with raised(
        "NewerHandoffSchema", match="its schema is 3, and this version of crust reads up to 1"
    ):
        Record.parse(json.dumps(plain).encode())


@pytest.mark.spec("H-7")
def test_record_in_another_entry_is_refused() -> None:
    with pytest.raises(UnreadableHandoffRecord, match="whose entry is"):
        Record.parse(a_record().to_bytes(), digest="0" * 64)


@pytest.mark.spec("H-9")
@pytest.mark.parametrize(
    "option",
    [
        "password=hunter2",
        "secret",
        "keyfile=/x/hunter2",
        "credentials=/x/hunter2",
        "src=smb://u:hunter2@h/x",
    ],
)
def test_credential_is_refused_and_absent_from_the_error(option: str) -> None:
    with raised("CredentialInOptions") as writing:
        a_record(mount_options=(option,))
    with pytest.raises(UnreadableHandoffRecord) as reading:
        Record.parse(_changed(options=[option]))
    for caught in (writing, reading):
        chain: BaseException | None = caught.value
        while chain is not None:
            assert "hunter2" not in f"{chain!r} {chain}"
            chain = chain.__cause__ or chain.__context__


@pytest.mark.spec("H-8")
def test_host_options_are_dropped_and_ro_becomes_readonly() -> None:
    record = a_record(mount_options=("_netdev", "ro", "noatime,nodiratime", "x-systemd.automount"))
    assert record.mount.mount_options == ("noatime", "nodiratime")
    assert record.readonly


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fs_type", ""),
        ("fs_type", "a b"),
        ("capacity_bytes", -1),
        ("source", volumes.BlockSource("x", volumes.DeviceIdentity(7, 7, 42))),
        ("source", replace(IMAGE, cluster="ceph")),
        ("source", replace(IMAGE, pool="rbd\nkey = x")),
        ("source", replace(IMAGE, monitors=())),
        ("source", replace(IMAGE, monitors=("v2:192.0.2.1:3300 log_file=/x",))),
    ],
)
def test_mount_that_parse_would_refuse_is_not_written(field: str, value: object) -> None:
    with pytest.raises(UnrecordableMount):
        a_record(TARGET, **{field: value}).to_bytes()


def test_record_larger_than_its_limit_is_not_written() -> None:
    with pytest.raises(UnrecordableMount, match="bytes"):
        a_record(mount_options=tuple(f"o{n}={'x' * 900}" for n in range(80))).to_bytes()


def test_publish_is_the_same_by_volume_and_request_alone() -> None:
    one = a_record().replaced(request="a" * 64)
    other_answer = one.replaced(replace(one.mount, fs_type="xfs", readonly=True), generation=9)
    assert other_answer.same_publish(KEY, "a" * 64)
    assert not one.same_publish(KEY, "b" * 64)
    assert not one.same_publish(KEY, None)
    assert not one.replaced(volume_id="vol-2").same_publish(KEY, "a" * 64)
    assert one.digest == TARGET.digest


@pytest.mark.spec("H-40")
def test_group_without_a_policy_is_changed_only_on_root_mismatch() -> None:
    record = a_record()
    plain = json.loads(record.to_bytes())
    plain["metadata"] = {"fsGroup": "7"}
    group = Record.parse(json.dumps(plain).encode()).mount.group
    assert group == volumes.GroupChange(7, volumes.GroupPolicy.ON_ROOT_MISMATCH)


def test_runtime_without_formatting_or_encryption_must_refuse_the_record() -> None:
    work = {"format": volumes.GuestFormat(), "encryption": volumes.Encryption.LUKS}
    for name, value in work.items():
        record = Record.of(replace(MOUNT, **{name: value}), KEY, TARGET, HANDLER)  # type: ignore[arg-type]
        assert json.loads(record.to_bytes())["crust"]["required"] == [name]
    assert "required" not in json.loads(Record.of(MOUNT, KEY, TARGET, HANDLER).to_bytes())["crust"]


def test_secret_of_deferred_mount_is_in_no_record() -> None:
    secret = {"passphrase": "correct horse"}
    mount = replace(MOUNT, encryption=volumes.Encryption.LUKS, secrets=secret)
    record = Record.of(mount, KEY, TARGET, HANDLER)
    assert not record.mount.secrets
    assert b"horse" not in record.to_bytes()
    assert "horse" not in repr(mount) + repr(record)


@pytest.mark.spec("H-50")
def test_record_of_image_has_no_device_and_requires_knowing_images() -> None:
    plain = json.loads(a_record(source=IMAGE).to_bytes())
    assert plain["volume-type"] == "network"
    assert plain["crust"]["required"] == ["image"]
    assert plain["crust"]["image"]["monitors"] == ["v2:192.0.2.1:3300"]
    assert "device" not in plain
    assert "identity" not in plain["crust"]


@pytest.mark.spec("H-50")
@pytest.mark.parametrize("source", [MOUNT.source, IMAGE])
@pytest.mark.parametrize(
    "change",
    [
        {"volume-type": "block", "device": None},
        {"volume-type": "network", "device": "/dev/loop7"},
        {"volume-type": "block", "device": "/dev/loop7", "image": asdict(IMAGE)},
        {"volume-type": "network", "image": None},
        {"volume-type": "network", "image": asdict(IMAGE), "identity": None, "required": []},
    ],
)
def test_record_with_two_kinds_of_source_or_none_is_refused(
    source: volumes.BlockSource | volumes.NetworkImage, change: dict[str, Any]
) -> None:
    plain = json.loads(a_record(source=source).to_bytes())
    for key, value in change.items():
        part = plain if key in ("volume-type", "device") else plain["crust"]
        part[key] = value
    with pytest.raises(UnreadableHandoffRecord):
        Record.parse(json.dumps(plain).encode())


def test_record_of_an_image_has_no_block_device() -> None:
    record = a_record(source=IMAGE)
    assert record.shown_source == "image rbd/crust/vol-1"
    with raised("NoDeviceOfImage", match="rbd/crust/vol-1"):
        _ = record.device
