"""The SDK for runtimes: resolve a container's mounts, claim volumes for sandboxes, answer the proxy's calls.

    resolve       find the volume, and the path in it, that a mount source of the OCI bundle names
    take_claim    claim a volume for a sandbox, after a check of the volume and of the runtime's features
                  (`claim_volume(features=…)`); `claim`: hold it, report its state, release it
    keepers       start the process that holds the claims of a hypervisor that takes no descriptors
    kept_vm       when that process was killed: claim again for the same sandbox, or kill its hypervisor
    service       serve RuntimeHandler on the handler's own socket       (imports grpc)
    registration  register with the proxy, and stay registered           (imports grpc)

Nothing here depends on a hypervisor. The names that this module exports need no grpc, so that a runtime's short-lived
processes start fast; import the other modules by name.
"""

from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.host.process.processes import Process
from crust.runtime_handler.claim import (
    Claim,
    ClaimedSince,
    ClaimLost,
    NotHandedOver,
    of_publish,
    process_of,
)
from crust.runtime_handler.resolve import NotDeferred, Resolved, resolve_source
from crust.runtime_handler.take_claim import (
    adopt_volume,
    claim_volume,
    reclaim_volume,
)

__all__ = [
    "Claim",
    "ClaimLost",
    "ClaimedSince",
    "NotDeferred",
    "NotHandedOver",
    "Process",
    "Record",
    "Resolved",
    "State",
    "adopt_volume",
    "claim_volume",
    "of_publish",
    "process_of",
    "reclaim_volume",
    "resolve_source",
]
