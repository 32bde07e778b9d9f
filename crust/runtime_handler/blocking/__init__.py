"""The calls of the SDK that block: for a runtime with threads, or a process that ends soon.

    resolve     find the volume, and the path in it, that the source of a bind mount names
    take_claim  claim a volume for a sandbox, after a check of the volume and of the runtime's features
    claim       hold it, report its state, release it
    keepers     start the process that holds the claims of a hypervisor that takes no descriptors
    kept_vm     when that process was killed: claim again for the same sandbox, or kill its hypervisor

A file that hangs holds its caller, as any system call does: no coroutine calls a function of this package.
`crust.runtime_handler` has coroutines.
"""

from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.host.process.processes import Process
from crust.runtime_handler.blocking.claim import (
    Claim,
    ClaimedSince,
    ClaimLost,
    NotHandedOver,
    hand_over_claims,
    process_of,
    publish_context,
)
from crust.runtime_handler.blocking.resolve import NotDeferred, Resolved, resolve_source
from crust.runtime_handler.blocking.take_claim import (
    adopt_volume,
    adopt_volumes,
    claim_volume,
    claim_volumes,
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
    "adopt_volumes",
    "claim_volume",
    "claim_volumes",
    "hand_over_claims",
    "process_of",
    "publish_context",
    "reclaim_volume",
    "resolve_source",
]
