"""A start finds files that nobody can remove, and directories that nobody can list."""

import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.process import syscalls
from tests.support.drivers import driver_state
from tests.support.records import pool_layout

OTHER_BOOT = "11111111-2222-3333-4444-555555555555"
DIRECTORIES = (*(f"state/{folder}" for folder in pool_layout.FOLDERS), "run/freezes")


async def test_start_leaves_crash_remains_that_cannot_be_removed(tmp_path: Path) -> None:
    state = driver_state.opened(tmp_path)
    made = await state.controller.provisioner.create(driver_state.create())
    run = tmp_path / "run"
    for directory in (run / syscalls.boot_id(), *(tmp_path / folder for folder in DIRECTORIES)):
        (directory / ".name.0123.crust-tmp" / "in it").mkdir(parents=True)
    (run / OTHER_BOOT / "directory" / "in it").mkdir(parents=True)
    state.stores.pool.let_go()
    again = driver_state.opened(tmp_path)
    assert again.stores.volume_records.index.page() == (made.volume_id,)
    assert (run / OTHER_BOOT / "directory").is_dir()


@pytest.mark.parametrize("name", pool_layout.FOLDERS)
async def test_start_with_directory_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    state = driver_state.opened(tmp_path)
    listed = (tmp_path / "state" / name).stat()
    real, looks = os.listdir, 0

    def failing(path: str) -> list[str]:
        nonlocal looks
        if os.path.samestat(os.stat(path), listed):
            looks += 1
            if looks > 1:  # the first look is for temporary files
                raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(errors.RuntimeFailed, match="cannot list"):
        state.open()
    assert looks == 2
