"""The SDK for runtimes: resolve a container's mounts, claim volumes for sandboxes, serve the proxy's questions.

    resolve       which volume, and what of it, does a mount source of the OCI bundle mean?
    claim         take it for a sandbox: lock, check, fence; tell how it goes; let go
    service       serve RuntimeHandler on a socket of one's own          (imports grpc)
    registration  register with the proxy, and stay registered           (imports grpc)

Nothing here knows a hypervisor. What this module exports needs no grpc, so that a runtime's short-lived processes
start fast; the other two are imported by name.
"""

from crust.runtime_handler.claim import (
    Claim,
    ClaimLost,
    DeviceChanged,
    WrongHandler,
    adopt_volume,
    claim_volume,
)
from crust.runtime_handler.resolve import (
    GuardWithoutEntry,
    NotDeferred,
    Resolved,
    resolve_source,
)

__all__ = [
    "Claim",
    "ClaimLost",
    "DeviceChanged",
    "GuardWithoutEntry",
    "NotDeferred",
    "Resolved",
    "WrongHandler",
    "adopt_volume",
    "claim_volume",
    "resolve_source",
]
