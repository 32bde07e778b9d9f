"""The kernel's driver for RBD as a directory: what is written to it appears in its devices, as in sysfs.

`tests/e2e/test_krbd.py` is the same on a real kernel.
"""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

FSID = "11111111-2222-3333-4444-555555555555"


@dataclass
class FakeSysfs:
    """`bus` is a directory of the test. The images that are open cannot be unmapped."""

    bus: Path
    features: int = 0x3D
    fails: int = 0
    """The errno of the next map."""
    lines: list[str] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)

    def load(self) -> None:
        (self.bus / "devices").mkdir(parents=True)
        for name in ("add_single_major", "remove_single_major"):
            (self.bus / name).touch()
        (self.bus / "supported_features").write_text(f"{self.features:#x}\n")

    def write(self, path: str, data: bytes) -> None:
        """What the kernel does with a write to an attribute."""
        name, text = os.path.basename(path), data.decode()
        if name == "add_single_major":
            self._add(text)
        elif name == "remove_single_major":
            self._remove(int(text))
        else:
            assert name == "refresh", path
            (Path(path).parent / "size").write_text("2048\n")

    def add_foreign(self, number: int, image: str) -> None:
        """Somebody's `rbd map`."""
        self._make(number, f"192.0.2.1:6789 name=admin,key=client.admin rbd {image} -", "", image)

    def _add(self, line: str) -> None:
        self.lines.append(line)
        if self.fails:
            number, self.fails = self.fails, 0
            raise OSError(number, os.strerror(number))
        _, options, _, image, _ = line.split(" ")
        spaces = [option for option in options.split(",") if option.startswith("_pool_ns=")]
        number = len(list((self.bus / "devices").iterdir()))
        self._make(number, line, spaces[0].removeprefix("_pool_ns=") if spaces else "", image)

    def _make(self, number: int, line: str, namespace: str, image: str) -> None:
        directory = self.bus / "devices" / str(number)
        directory.mkdir()
        attributes = {
            "name": image, "current_snap": "-", "config_info": line, "cluster_fsid": FSID, "pool": line.split(" ")[2],
            "pool_ns": namespace, "client_addr": f"192.0.2.9:0/{number}", "major": "251", "minor": str(16 * number),
            "size": "1024",
        }  # fmt: skip
        for name, value in attributes.items():
            (directory / name).write_text(value + "\n")

    def _remove(self, number: int) -> None:
        directory = self.bus / "devices" / str(number)
        if not directory.exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if number in self.opened:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        for attribute in directory.iterdir():
            attribute.unlink()
        directory.rmdir()
