"""RuntimeCheckDeviceUnused: a shim that sees no processes asks whether a driver may have its device back."""

import os

import grpc

from crust.core import volumes
from crust.wire.v1 import runtime_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode

Code = grpc.StatusCode
REQUEST = runtime_pb2.RuntimeCheckDeviceUnusedRequest(major=7, minor=3)


async def test_device_is_unused_until_a_process_writes_to_it(node: FakeNode) -> None:
    await node.runtime.RuntimeCheckDeviceUnused(
        REQUEST, timeout=10
    )  # the kernel has no such device
    device = volumes.BlockSource("/dev/loop3", volumes.DeviceIdentity(7, 3, 12))
    node.devices.numbers[os.makedev(7, 3)] = device
    await node.runtime.RuntimeCheckDeviceUnused(REQUEST, timeout=10)
    node.targets.written.add("/dev/loop3")
    call = node.runtime.RuntimeCheckDeviceUnused(REQUEST, timeout=10)
    await refused(call, Code.FAILED_PRECONDITION, "DeviceInUse", "qemu[1000]")
