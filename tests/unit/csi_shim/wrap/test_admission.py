"""What may be deferred, judged by the original request; and what the driver is asked in its place."""

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import deferral_keys, errors, volumes
from crust.csi_shim.wrap import admission, as_block, leaves, private_directories, vendors
from crust.csi_shim.wrap.admission import CannotBeDeferred
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.host.mounts import mount_options
from crust.host.mounts.mount_options import InvalidMountOption
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co, capability, publish_request
from tests.support.drivers.fake_driver import MIB, FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.raised import raised

MODE = csi_pb2.VolumeCapability.AccessMode
DRIVER = "csi.example.org"
KEY = volumes.VolumeKey(volumes.DriverName(DRIVER), volumes.VolumeId("vol-1"))
PATHS = PrivatePaths.of("/var/lib/kubelet", KEY)
EMPTY = {"crust.dev/created-empty": "true"}


def publish(
    *,
    mode: int = MODE.SINGLE_NODE_WRITER,
    context: dict[str, str] | None = None,
    mount: dict[str, Any] | None = None,
    block: bool = False,
    **fields: Any,
) -> csi_pb2.NodePublishVolumeRequest:
    return publish_request(
        "vol-1",
        "/var/lib/kubelet/pods/1/mount",
        capability(mode=mode, block=block, **mount or {}),
        staging="/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount",
        volume_context=context or {},
        **{"defer": False, **fields},
    )


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


def test_publish_as_block_differs_in_nothing_else() -> None:
    context = {"crust.dev/defer": "always", "csi.storage.k8s.io/pod.name": "p", "vendor": "1"}
    request = publish(
        context=context, readonly=True, defer=True, secrets={"a": "b"},
        publish_context={"devicePath": "/dev/x"},
    )  # fmt: skip
    block = as_block.publish_request(request, PATHS, staged=True)
    assert block.volume_capability.WhichOneof("access_type") == "block"
    assert not block.defer_fs_ops
    assert not block.readonly
    assert (block.target_path, block.staging_target_path) == (
        PATHS.leaf(request.target_path), PATHS.staging,
    )  # fmt: skip
    assert dict(block.volume_context) == {"csi.storage.k8s.io/pod.name": "p", "vendor": "1"}
    for name in ("target_path", "staging_target_path", "readonly", "defer_fs_ops"):
        block.ClearField(name)
        request.ClearField(name)
    block.volume_capability.mount.CopyFrom(request.volume_capability.mount)
    block.volume_context["crust.dev/defer"] = "always"
    assert block == request


def test_stage_made_of_publish_has_no_data_of_pod() -> None:
    context = {"csi.storage.k8s.io/pod.name": "p", "vendor": "1", "crust.dev/defer": "never"}
    stage = as_block.stage_of(publish(context=context, secrets={"a": "b"}))
    assert dict(stage.volume_context) == {"vendor": "1", "crust.dev/defer": "never"}
    assert not stage.secrets


def test_private_directories_have_the_kubelets_form_and_nothing_else() -> None:
    above = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"
    assert PATHS.staging.startswith(f"{above}/staging/crust-")
    assert PATHS.published == PATHS.staging.replace("/staging/", "/publish/")
    leaf = PATHS.leaf("/var/lib/kubelet/pods/1/mount")
    assert leaf.startswith(f"{PATHS.published}/")
    names = [PATHS.staging.rpartition("/")[2], leaf.rpartition("/")[2]]
    assert [len(name) for name in names] == [46, 40]
    assert not any(word in leaf for word in ("pvc-", "globalmount", "/mount"))
    assert PrivatePaths.of("/var/lib/kubelet", KEY) == PATHS
    assert PATHS.leaf("/other") != leaf
    other = volumes.VolumeKey(volumes.DriverName("other"), KEY.volume_id)
    assert PrivatePaths.of("/var/lib/kubelet", other).staging != PATHS.staging
    assert private_directories.root("/k/") == "/k/plugins/kubernetes.io/csi/volumeDevices"
    one, two = (replace(KEY, volume_id=volumes.VolumeId(name)) for name in ("../\0c", "../c"))
    assert PrivatePaths.of("/k", one) != PrivatePaths.of("/k", two)
    hostile = PrivatePaths.of("/var/lib/kubelet", one)
    assert re.fullmatch(rf"{above}/staging/crust-[0-9a-f]{{40}}", hostile.staging)
    assert re.fullmatch(rf"{hostile.published}/[0-9a-f]{{40}}", hostile.leaf("/../../etc"))


def test_driver_that_fails_node_expand_of_block_is_not_called() -> None:
    assert not vendors.expands_at_node("linstor.csi.linbit.com")
    assert vendors.expands_at_node(DRIVER)


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("diskplugin.csi.alibabacloud.com", "RuntimeClass rund or runv"),
        ("block.csi.example.com", "may not support raw block volumes"),
    ],
)
def test_driver_without_a_device_is_named(driver: str, remedy: str, tmp_path: Path) -> None:
    key = volumes.VolumeKey(volumes.DriverName(driver), volumes.VolumeId("d-1"))
    with raised("NotPublishedAsBlock") as caught:
        leaves.device(key, str(tmp_path / "leaf"), None)
    assert driver in caught.value.why
    assert remedy in (caught.value.hint or "")


# EXPAND_VOLUME is advertised for a driver whose nodes need nothing for it, before anything of a volume is here.


Code = grpc.StatusCode
RPC = csi_pb2.NodeServiceCapability.RPC


@dataclass
class Kubelet:
    """A caller of the shim."""

    driver: FakeDriver
    places: Places
    co: Co

    async def advertised(self) -> set[int]:
        request = csi_pb2.NodeGetCapabilitiesRequest()
        answer = await self.co.node.NodeGetCapabilities(request, timeout=10)
        types = [capability.rpc.type for capability in answer.capabilities]
        assert len(types) == len(set(types)), "advertised twice"
        return set(types)

    async def expand(self, volume_id: str, path: str) -> int:
        return (await self.co.expand(volume_id, path, 96 * MIB)).capacity_bytes


@pytest.fixture
async def kubelet(places: Places) -> AsyncIterator[Kubelet]:
    driver = FakeDriver(defers=False)
    driver.node_rpcs = [RPC.STAGE_UNSTAGE_VOLUME]
    wrapping = Wrapping(places.kubelet)
    async with (
        FakeNode(places, parts=("driver", "shim"), driver=driver, wrapping=wrapping),
        channel.connect(places.shim) as shim,
    ):
        yield Kubelet(driver, places, Co(shim))


@pytest.mark.parametrize(
    ("expands", "at_node", "advertised"),
    [
        (True, False, {RPC.EXPAND_VOLUME}),  # the controller's shim requires the node's part
        (False, False, set()),
        (True, True, {RPC.EXPAND_VOLUME}),
    ],
)
async def test_expand_volume_is_advertised_once_where_volumes_grow(
    kubelet: Kubelet, *, expands: bool, at_node: bool, advertised: set[int]
) -> None:
    online = csi_pb2.PluginCapability.VolumeExpansion.ONLINE
    kubelet.driver.expansion = [online] if expands else []
    kubelet.driver.node_rpcs += [RPC.EXPAND_VOLUME] if at_node else []
    assert await kubelet.advertised() == {RPC.STAGE_UNSTAGE_VOLUME, *advertised}


async def test_expansion_that_the_driver_need_not_do_is_checked(kubelet: Kubelet) -> None:
    kubelet.driver.expansion = [csi_pb2.PluginCapability.VolumeExpansion.ONLINE]
    target = kubelet.places.target("one")
    await refused(kubelet.expand("vol-1", target), Code.NOT_FOUND, "NoVolumeAt", target)
    await refused(kubelet.expand("", target), Code.INVALID_ARGUMENT, "volume_id")
    await refused(kubelet.expand("vol-1", "a/b"), Code.INVALID_ARGUMENT, "volume_path")
    os.mkdir(target)
    assert await kubelet.expand("vol-1", target) == 96 * MIB
    assert kubelet.driver.called("NodeExpandVolume") == []


async def test_capabilities_with_own_stats_and_expand_skip_directory_scan(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_: str) -> bool:
        raise AssertionError("a volume was looked for")

    monkeypatch.setattr(private_directories, "has_volumes", look)
    kubelet.driver.node_rpcs += [RPC.GET_VOLUME_STATS, RPC.EXPAND_VOLUME]
    assert await kubelet.advertised() == {*kubelet.driver.node_rpcs}


async def test_statistics_and_growth_are_advertised_while_staged_as_block(
    kubelet: Kubelet,
) -> None:
    before = await kubelet.advertised()
    path = f"{kubelet.places.kubelet}/staging"
    await kubelet.co.stage("vol-1", path, volume_context={deferral_keys.DEFER: "always"})
    added = {RPC.GET_VOLUME_STATS, RPC.EXPAND_VOLUME}
    assert await kubelet.advertised() - before == added
    await kubelet.co.unstage("vol-1", path)
    assert await kubelet.advertised() == before
