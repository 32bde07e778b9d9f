"""The host that claims an image."""

from pathlib import Path

import pytest

from crust.blockdriver.ceph import claims
from crust.core import errors
from tests.support.faults import lies


def test_machine_id_that_is_not_seen_is_not_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "machine-id").write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    monkeypatch.setattr(claims, "MACHINE_ID", f"{tmp_path}/machine-id")
    concerns = lies.Concerns(frozenset({claims.MACHINE_ID}), ())
    for asked in lies.failures(claims.Host.this, concerns, errnos_of=lies.all_errnos):
        assert isinstance(asked.error, errors.CrustError), str(asked.failure)
