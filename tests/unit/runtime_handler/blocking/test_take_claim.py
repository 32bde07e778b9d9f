"""The features that a runtime must offer, and whose claim may be taken again."""

import os
from dataclasses import replace
from typing import Any

import pytest

from crust.core import volumes
from crust.handoff import claims
from crust.handoff.store import Store
from crust.runtime_handler.blocking import ClaimedSince, process_of, reclaim_volume, take_claim
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record

HandlerFeature = volumes.HandlerFeature


@pytest.mark.parametrize(
    ("mount", "feature"),
    [
        ({"readonly": True}, HandlerFeature.READ_ONLY),
        ({"group": volumes.GroupChange(7)}, HandlerFeature.GROUP),
        ({"io_limits": volumes.IoLimits(read_iops=1)}, HandlerFeature.IO_LIMITS),
        ({"format": volumes.GuestFormat()}, HandlerFeature.FORMAT),
        ({"encryption": volumes.Encryption.LUKS}, HandlerFeature.LUKS),
    ],
)
@pytest.mark.spec("H-36", "H-38")
def test_missing_feature_refuses_the_volume(mount: dict[str, Any], feature: HandlerFeature) -> None:
    plain = a_record()
    record = plain.replaced(replace(plain.mount, group=None, readonly=False))
    take_claim.check_offered(record, frozenset())
    record = record.replaced(replace(record.mount, **mount))
    with raised("UnsupportedByHandler", match=f"does not offer {feature.name}"):
        take_claim.check_offered(record, frozenset(HandlerFeature) - {feature})
    take_claim.check_offered(record, {feature})


def test_group_of_read_only_volume_needs_no_feature_group() -> None:
    plain = a_record()
    mount = replace(plain.mount, group=volumes.GroupChange(7), readonly=True)
    take_claim.check_offered(plain.replaced(mount), {HandlerFeature.READ_ONLY})


@pytest.mark.spec("H-46")
def test_claim_of_another_handlers_sandbox_is_not_reclaimed(store: Store) -> None:
    """Two runtimes may give their sandboxes the same id."""
    record, paths = a_record(), store.layout.entry(TARGET)
    dead = claims.Claim(
        "sandbox-1", "other", claims.State.MOUNTED, "", 1, record.crust.published_at, live=False
    )
    claims.write(paths, dead)
    with pytest.raises(ClaimedSince, match="sandbox-1"):
        reclaim_volume(
            store.root,
            TARGET,
            volumes.SandboxId("sandbox-1"),
            record.handler,
            process_of(os.getpid()),
        )
    assert claims.read(paths) == dead
