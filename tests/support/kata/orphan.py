"""The claim of a sandbox that is lost to its container engine."""

import datetime
import os

from crust.handoff import claims

SANDBOX = f"orphan-{os.getpid()}"
"""Its own: a search goes through the processes of the whole machine."""

ORPHANED = claims.Claim(
    sandbox_id=SANDBOX,
    handler="kata",
    state=claims.State.ERROR,
    error=f"[SandboxOrphaned] sandbox {SANDBOX} is lost to its container engine",
    pid=0,
    claimed_at=datetime.datetime.now(datetime.UTC),
    live=True,
)
