"""The archive of a guest's files."""

import shutil
import subprocess
from pathlib import Path

from examples.kata.guest import archive


def test_an_archive_is_read_back_by_cpio(tmp_path: Path) -> None:
    assert shutil.which("cpio"), "cpio is missing; make setup installs it"
    packed = archive.pack(
        [
            archive.file("bin/tool", b"#!/bin/sh\n", executable=True),
            archive.symlink("bin/alias", "tool"),
            archive.character_device("dev/console", 5, 1),
        ]
    )
    listing = subprocess.run(
        ["cpio", "-itv", "--quiet"], input=packed, capture_output=True, check=True, text=False
    )
    rows = [line.split() for line in listing.stdout.decode().splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [
        ("drwxr-xr-x", "bin"),
        ("lrwxrwxrwx", "tool"),
        ("-rwxr-xr-x", "bin/tool"),
        ("drwxr-xr-x", "dev"),
        ("crw-------", "dev/console"),
    ]


def test_the_same_content_is_the_same_archive_in_any_order() -> None:
    entries = [archive.file("b", b"2"), archive.file("a/c", b"1"), archive.directory("a")]
    assert archive.pack(entries) == archive.pack(entries[::-1])
