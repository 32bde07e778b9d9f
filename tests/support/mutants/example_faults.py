"""Faults of the example drivers, each a change of their text, and the case of the clause that it breaks.

The drivers share no code with crust and use the real kernel: a case that fails here sees a fault as in the driver of
another vendor. Each change is of one place, which an author could get wrong.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

DRIVERS = Path(__file__).parents[3] / "examples" / "drivers"


@dataclass(frozen=True)
class Fault:
    """`right` becomes `wrong` in a file of examples/drivers; the case fails for the driver `kind`."""

    case: str
    kind: str
    file: str
    right: str
    wrong: str

    def put_into(self, directory: Path) -> None:
        """Change the copy of the examples below `directory`."""
        _change(directory, self.file, self.right, self.wrong)


def copy_drivers(directory: Path) -> Path:
    """A copy of the example drivers below `directory`, with ids that CSI allows."""
    copied = directory / "examples" / "drivers"
    shutil.copytree(DRIVERS, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied.parent / "__init__.py").touch()
    # one of the traps of the driver as clouds have them: with it each case would fail
    _change(directory, "cloud.py", ".ljust(200, digest[0])", "")
    return directory


def _change(directory: Path, name: str, right: str, wrong: str) -> None:
    file = directory / "examples" / "drivers" / name
    text = file.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{name} has {right!r} {text.count(right)} times"
    file.write_text(text.replace(right, wrong), encoding="utf-8")


ALL = (
    Fault("C-001", "minimal", "minimal.py", 'Plugin(NAME, "0.1"', 'Plugin(NAME, ""'),
    Fault("C-018", "minimal", "serving.py", 'if "EXPAND_VOLUME" in self.controller:', "if True:"),
    Fault("C-101", "cloud", "cloud.py", '"Volume name not provided"', '""'),
    Fault(
        "C-103",
        "minimal",
        "minimal.py",
        "str(uuid.uuid5(uuid.NAMESPACE_URL, request.name))",
        "str(uuid.uuid4())",
    ),
    Fault("C-104", "minimal", "image_volumes.py", 'known["size"] >= wanted and', "True or"),
    Fault(
        "C-112",
        "minimal",
        "image_volumes.py",
        "self.state.volumes.get(volume_id)\n            if known is not None:\n",
        "self.state.get(volume_id)\n            if known is not None:\n",
    ),
    Fault("C-116", "minimal", "image_volumes.py", "if limit and size > limit:", "if False:"),
    Fault(
        "C-121",
        "minimal",
        "image_volumes.py",
        "self.state.get(request.volume_id)\n        answer",
        "answer",
    ),
    Fault(
        "C-125",
        "minimal",
        "minimal.py",
        "image_volumes.check_capabilities(request.volume_capabilities)\n",
        "\n",
    ),
    Fault("C-161", "cloud", "cloud.py", "if request.node_id != self._node_id:", "if False:"),
    Fault(
        "C-162",
        "cloud",
        "cloud.py",
        '{"devicePath": device}',
        '{"devicePath": device, "at": os.urandom(8).hex()}',
    ),
    Fault(
        "C-172",
        "cloud",
        "image_volumes.py",
        'max(wanted, known["size"])\n            disks',
        'known["size"]\n            disks',
    ),
    Fault(
        "C-201",
        "cloud",
        "cloud.py",
        'raise Refused(Code.INVALID_ARGUMENT, "Volume ID or staging target not provided")\n        image',
        "pass\n        image",
    ),
    Fault(
        "C-202",
        "stateful",
        "stateful.py",
        'if staging in known["staged"]:',
        'if known["staged"].index(staging) >= 0:',
    ),
    Fault("C-213", "cloud", "disks.py", "if is_blank(device):", "if True:"),
    Fault(
        "C-215",
        "stateful",
        "stateful.py",
        "if not disks.is_mounted(request.target_path):",
        "if True:",
    ),
    Fault("C-221", "cloud", "cloud.py", "os.rmdir(target)", "pass"),
    Fault(
        "C-223",
        "cloud",
        "cloud.py",
        "if request.readonly:\n                disks",
        "if False:\n                disks",
    ),
    Fault(
        "C-241",
        "cloud",
        "cloud.py",
        'raise Refused(Code.NOT_FOUND, f"path {path} does not exist")\n        answer',
        "return csi_pb2.NodeGetVolumeStatsResponse()\n        answer",
    ),
    Fault(
        "C-253",
        "stateful",
        "stateful.py",
        "disks.rescan(disks.device_of(self._image(request)))",
        "pass",
    ),
    Fault(
        "C-311",
        "stateful",
        "stateful.py",
        "shutil.copytree(self._tree(source), self._tree(volume_id), dirs_exist_ok=True)",
        "os.symlink(self._tree(source), self._tree(volume_id))",
    ),
    Fault(
        "C-312",
        "stateful",
        "stateful.py",
        'Refused(Code.OUT_OF_RANGE, f"a clone',
        'Refused(Code.INVALID_ARGUMENT, f"a clone',
    ),
    Fault(
        "C-315", "stateful", "stateful.py", 'disks.run("cp", "--sparse=always", *images)', "pass"
    ),
    Fault(
        "C-317",
        "stateful",
        "stateful.py",
        'source != made["source"]',
        'source not in ("", made["source"])',
    ),
)
