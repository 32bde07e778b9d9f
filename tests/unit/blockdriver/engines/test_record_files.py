"""Records as files keep to the contract of all stores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.images import Images
from crust.blockdriver.engines.files.provisioning import FileProvisioning
from tests.support.records import record_store_contract
from tests.support.records.stored_records import file_records

MIB = 1024 * 1024


@pytest.mark.parametrize("check", record_store_contract.CHECKS)
def test_record_files_keep_to_the_contract_of_stores(
    tmp_path: Path, check: Callable[[record_store_contract.Maker], None]
) -> None:
    check(lambda: file_records(tmp_path / "records"))


def test_files_spare_a_hundredth_of_the_pool_and_at_least_64_mib(tmp_path: Path) -> None:
    images = Images(tmp_path, lambda _: True)
    space = FileProvisioning(images, FileAccess(images)).space()
    assert space.spare_bytes == max(space.size_bytes // 100, 64 * MIB)
