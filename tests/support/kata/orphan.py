"""The claim of a sandbox that is lost to its container engine."""

import datetime

from crust.handoff import claims

SANDBOX = "sandbox-0001"

ORPHANED = claims.Claim(
    sandbox_id=SANDBOX,
    handler="kata",
    state=claims.State.ERROR,
    error="[SandboxOrphaned] sandbox sandbox-0001 is lost to its container engine",
    pid=0,
    claimed_at=datetime.datetime.now(datetime.UTC),
    live=True,
)
