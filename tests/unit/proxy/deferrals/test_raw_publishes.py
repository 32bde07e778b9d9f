"""Which targets of raw publishes are known, and when one of them refuses a deferred publish."""

import os
from pathlib import Path

import pytest

from crust import volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.process.oserrors import ProcessOutOfResources
from crust.proxy.deferrals.raw_publishes import DevicePublishedRaw, RawPublishes
from tests.support.drivers.fake_driver import device_of
from tests.support.nodes.fake_targets import FakeDevices

PUBLISH = "plugins/kubernetes.io/csi/volumeDevices/publish"
DEVICE, OTHER = device_of("vol-1"), device_of("vol-2")


def check(raw: RawPublishes, devices: FakeDevices, path: str = DEVICE) -> None:
    identity = devices.identify(path)
    source = volumes.BlockSource(path, identity)
    raw.check(source, DeviceSet.alone(identity), readonly=False)


def test_device_at_a_target_that_passed_is_refused_until_it_is_unpublished() -> None:
    devices = FakeDevices(nodes={"/pods/a": DEVICE})
    raw = RawPublishes(devices)
    check(raw, devices)
    raw.passes("/pods/a")
    check(raw, devices, OTHER)
    with pytest.raises(DevicePublishedRaw, match="/pods/a"):
        check(raw, devices)
    raw.ended("/pods/a")
    check(raw, devices)


def test_target_without_a_device_refuses_nothing() -> None:
    devices = FakeDevices()
    raw = RawPublishes(devices)
    raw.passes("/pods/a")
    check(raw, devices)


class FullProcess(FakeDevices):
    """No descriptor is left to look at a target."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        raise ProcessOutOfResources("cannot look", why="EMFILE")


def test_target_that_cannot_be_looked_at_is_not_taken_for_free() -> None:
    raw = RawPublishes(FullProcess())
    raw.passes("/pods/a")
    with pytest.raises(ProcessOutOfResources):
        check(raw, FakeDevices())


def test_kubelets_raw_volumes_are_found_and_a_shims_are_not(tmp_path: Path) -> None:
    ours, other = (
        f"{tmp_path}/{PUBLISH}/crust-{'a' * 40}/{'b' * 40}",
        f"{tmp_path}/{PUBLISH}/pvc-1/uid-1",
    )
    for each in (ours, other):
        os.makedirs(each)
    devices = FakeDevices(nodes={ours: DEVICE, other: OTHER})
    raw = RawPublishes(devices)
    raw.find([str(tmp_path), f"{tmp_path}/absent"])
    check(raw, devices)
    with pytest.raises(DevicePublishedRaw, match="pvc-1/uid-1"):
        check(raw, devices, OTHER)
