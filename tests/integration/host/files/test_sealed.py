"""A sealed directory on real filesystems, and without the right to seal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import sealed

pytestmark = pytest.mark.root


def test_sealed_directory_takes_no_names_until_it_is_unsealed(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    assert sealed.is_offered(directory)
    assert not sealed.unseal(directory, "it")
    for _ in range(2):
        assert sealed.seal(directory, "it")
    for write in (directory.joinpath("f").touch, directory.joinpath("d").mkdir, directory.rmdir):
        with pytest.raises(PermissionError):
            write()
    assert sealed.unseal(directory, "it")
    directory.rmdir()


def test_absent_path_file_and_link_have_no_seal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("absent", "file", "link"):
        assert not sealed.unseal(f"{tmp_path}/{name}", "it")
    with pytest.raises(errors.NotFound):
        sealed.seal(f"{tmp_path}/absent", "it")


def test_filesystem_without_the_attribute_takes_no_seal() -> None:
    """As NFS: procfs has none either."""
    assert not sealed.is_offered("/proc")
    assert not sealed.seal("/proc", "it")
    assert not sealed.unseal("/proc", "it")


def test_right_to_seal_is_tried_without_a_trace(tmp_path: Path) -> None:
    program = f"""if True:
        import tempfile
        from crust.core import errors
        from crust.host.files import sealed
        tempfile.tempdir = {str(tmp_path)!r}
        for refused in (sealed.try_to_seal, lambda: sealed.seal(tempfile.tempdir, 'it')):
            try:
                refused()
                print("sealed")
            except (PermissionError, errors.CrustError) as error:
                print(error)
    """
    without = ("setpriv", "--bounding-set", "-linux_immutable")
    printed = subprocess.run(
        [*without, sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert printed.count("Operation not permitted") == 2
    assert "it needs CAP_LINUX_IMMUTABLE" in printed
    sealed.try_to_seal()
    assert os.listdir(tmp_path) == []
