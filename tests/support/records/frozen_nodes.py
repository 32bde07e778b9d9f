"""Nodes in use as tests/data/nodes has them: what the programs of earlier commits left (`freeze_node` made them).

A node has these parts, each described as a frozen pool is (`frozen_pools`):

    settings          the settings that each program knew, with their defaults
    keeper            the keeper's program, and what a runtime and it said to each other
    own               node state and handoff directory: one volume, deferred, which a sandbox has
    cloud, stateful   the private directories of one deferred volume of a wrapped driver; the first was staged with
                      a secret

The paths and digests in the files are those of a node at `ROOT`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crust.core import volumes
from crust.host.process import syscalls
from tests.support.drivers import remnants
from tests.support.nodes.places import Places
from tests.support.records import frozen_pools
from tests.support.records.frozen_pools import Frozen

DATA = Path(__file__).parents[2] / "data" / "nodes"
ROOT = "/srv"
"""A directory that each machine has; a test has another one mounted there, in its own mount namespace."""
BOOT = "00000000-0000-0000-0000-000000000000"
"""In place of the boot at which the node state was written."""
COMMITS = NO_SCHEMA, NO_REQUEST, PRESENT = "753716e1", "82e74bf9", "67e70018"
"""The commits: a node state without a schema number; records that do not name their request; the present layouts."""


@dataclass(frozen=True)
class FrozenNode:
    """The parts of a node, by name."""

    parts: dict[str, Frozen]

    @property
    def volume_id(self) -> volumes.VolumeId:
        """The id of the volume of our driver."""
        return volume_of(self.parts["own"])

    @property
    def pool_id(self) -> str:
        """The id of the pool that has it."""
        return self.volume_id.partition("-")[0]


def volume_of(own: Frozen) -> volumes.VolumeId:
    """The id of the volume of a part `own`."""
    (path,) = (Path(path) for path in own if path.startswith(f"driver/{BOOT}/"))
    return volumes.VolumeId(path.stem)


def load(commit: str) -> FrozenNode:
    """The node of a commit."""
    described = json.loads((DATA / f"{commit}.json").read_text())
    return FrozenNode({part: frozen_pools.parsed(of) for part, of in described.items()})


def places_of(part: str) -> Places:
    """The places of the node that has a part, below the root."""
    os.mkdir(f"{ROOT}/{part}")
    return Places.make(f"{ROOT}/{part}")


def staging(places: Places) -> str:
    """The staging path of the node's volume."""
    path = f"{places.kubelet}/global"
    os.makedirs(path, exist_ok=True)
    return path


def target(places: Places) -> str:
    """The target of the node's volume."""
    return places.target("one")


@contextmanager
def root_at(directory: str) -> Iterator[None]:
    """Have a directory at `ROOT` while the block runs, and nothing mounted or attached below it afterwards."""
    subprocess.run(["mount", "--bind", directory, ROOT], check=True)
    try:
        subprocess.run(["mount", "--make-shared", ROOT], check=True)
        yield
    finally:
        remnants.remove(ROOT)
        subprocess.run(["umount", ROOT], check=True)


def put(node: FrozenNode, run_dir: str, volumes_root: str, device: volumes.BlockSource) -> None:
    """Write the files of `own` over those of a node that does not run, and has the volume at `device` in use."""
    boot = syscalls.boot_id()
    for path, of in node.parts["own"].items():
        folder, _, name = path.partition("/")
        if of.text:
            root = {"driver": run_dir, "volumes": volumes_root}[folder]
            text = at_device(of.text, device) if name.endswith("mountInfo.json") else of.text
            Path(root, name.replace(BOOT, boot)).write_text(text)


def at_device(record: str, device: volumes.BlockSource) -> str:
    """The record with another device."""
    fields = json.loads(record)
    identity = device.identity
    numbers = {
        "major": identity.major,
        "minor": identity.minor,
        "disk_sequence": identity.disk_sequence,
    }
    assert fields["crust"]["identity"].keys() == numbers.keys()
    crust = fields["crust"] | {"identity": numbers}
    return f"{json.dumps(fields | {'device': device.path, 'crust': crust})}\n"
