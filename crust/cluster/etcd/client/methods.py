"""The methods of etcd's API that crust calls, with their paths on the wire.

Nothing is generated from etcd's services: a path and two message types are all that a call needs, and the package of
our messages is not that of the paths (specs/proto/crust/wire/etcd/v3/etcd.proto).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from crust.wire.etcd.v3 import etcd_pb2 as pb

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """A path, and the classes of its messages."""

    path: str
    request: type[Q]
    response: type[R]


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Method(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse
)
LEASE_KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
