"""The settings of a cluster with one controller: where its store is, and how long silence may last."""

from typing import Annotated, Literal

from pydantic import Field

from crust.settings.fields import AbsolutePath, KeyPrefix, MemberAddress
from crust.settings.program import Table


class ClusterSettings(Table):
    """The store through which a central controller and the nodes' drivers speak."""

    kind: Literal["etcd"] = "etcd"
    """What the store is."""

    endpoints: Annotated[tuple[MemberAddress, ...], Field(min_length=1)]
    """The client addresses of etcd's members."""

    ca: AbsolutePath
    """The certificates, in PEM, of the authorities that signed those of etcd's members."""

    cert: AbsolutePath
    """This process's certificate, in PEM; its common name is its user in etcd."""

    key: AbsolutePath
    """The private key of `cert`, in PEM, without a passphrase."""

    prefix: KeyPrefix = "/crust/"
    """All keys of the cluster begin so."""

    lease_s: Annotated[int, Field(ge=3, le=300)] = 15
    """How long a node counts as connected, and a controller as leader, after the last renewal that reached etcd."""

    settle_s: Annotated[int, Field(ge=3, le=3600)] = 40
    """How long a controller waits, in an empty store, for all nodes to announce themselves before it creates a new
    name; never less than its `lease_s`. Longer than the longest `lease_s` of a node, and than the 30 s after which a
    node repeats its announcement."""
