"""Waits until a central controller leads and its node answers. Also a program: `python -m … SOCKET`."""

import sys
import time

import grpc

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

READY_S = 60.0
_PENDING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


def wait(socket: str) -> None:
    """GetCapacity is asked of the node: a number above 0 means that the controller leads, and the node is there."""
    until = time.monotonic() + READY_S
    with grpc.insecure_channel(channel.target_of(socket), options=channel.OPTIONS) as connected:
        controller = csi_pb2_grpc.ControllerStub(connected)
        while time.monotonic() < until:
            try:
                answer = controller.GetCapacity(
                    csi_pb2.GetCapacityRequest(), timeout=READY_S, wait_for_ready=True
                )
            except grpc.RpcError as error:
                if error.code() not in _PENDING:
                    raise
            else:
                if answer.available_capacity:
                    return
            time.sleep(0.05)  # nobody tells
    raise TimeoutError(f"the cluster behind {socket} does not serve")


if __name__ == "__main__":
    wait(sys.argv[1])
