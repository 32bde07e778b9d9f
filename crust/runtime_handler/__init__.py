"""The SDK for runtimes: resolve a container's mounts, claim volumes for sandboxes, answer the proxy's calls.

    claims        find the volume that a mount source of the OCI bundle names, claim it for a sandbox, hold it, report
                  its state, release it
    threads       on which these coroutines reach files: a file that hangs stops neither the loop nor the process
    blocking      the same as functions that block, and the keepers of hypervisors that take no descriptors
    service       serve RuntimeHandler on the handler's own socket       (imports grpc)
    registration  register with the proxy, and stay registered           (imports grpc)

Nothing here depends on a hypervisor. All functions of this module are coroutines. The names that it exports need no
grpc, so that a runtime's short-lived processes start fast; import the other modules by name.
"""

from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.host.process.processes import Process
from crust.runtime_handler.blocking.claim import (
    ClaimedSince,
    ClaimLost,
    NotHandedOver,
    publish_context,
)
from crust.runtime_handler.blocking.resolve import NotDeferred, Resolved
from crust.runtime_handler.claims import (
    Claim,
    adopt_volume,
    claim_volume,
    process_of,
    reclaim_volume,
    resolve_source,
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
    "process_of",
    "publish_context",
    "reclaim_volume",
    "resolve_source",
]
