"""A guest's console: kept output, new output, and a slow reader."""

import asyncio
import os
from pathlib import Path

import pytest

from examples.kata.vm import console


async def test_console_gives_kept_then_new_output_until_closed(
    tmp_path: Path,
) -> None:
    console.prepare(tmp_path)
    vm_console = console.Console(tmp_path)
    guest = os.open(tmp_path / "console.out", os.O_WRONLY)
    try:
        os.write(guest, b"one ")
        pieces = vm_console.pieces(follow=True)
        async with asyncio.timeout(60):
            assert await anext(pieces) == b"one "
            os.write(guest, b"two")
            assert await anext(pieces) == b"two"
            assert [piece async for piece in vm_console.pieces(follow=False)] == [b"one two"]
            vm_console.close()
            assert [piece async for piece in pieces] == []
    finally:
        vm_console.close()
        os.close(guest)


async def test_slow_reader_of_a_console_loses_the_oldest_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "TAIL", 4)
    console.prepare(tmp_path)
    vm_console = console.Console(tmp_path)
    guest = os.open(tmp_path / "console.out", os.O_WRONLY)
    try:
        os.write(guest, b"a")
        pieces = vm_console.pieces(follow=True)
        async with asyncio.timeout(60):
            assert await anext(pieces) == b"a"
            os.write(guest, b"0123456789")
            assert vm_console.text() == "6789"
            assert await anext(pieces) == b"6789"
    finally:
        vm_console.close()
        os.close(guest)


async def test_console_keeps_only_the_last_output(tmp_path: Path) -> None:
    console.prepare(tmp_path)
    watched = console.Console(tmp_path)
    line = b"x" * 1023 + b"\n"
    with (tmp_path / "console.out").open("wb", buffering=0) as guest:
        for _ in range(2 * console.TAIL // len(line)):
            guest.write(line)
            watched.text()
        guest.write(b"the end \x1b[31m\n")
    assert len(watched.text()) == console.TAIL
    assert watched.tail().endswith("the end  [31m")
    watched.close()
    watched.close()
