"""The test vectors of specs/vectors: what a reader and writer of the handoff directory must compute, as files.

They are for implementations in other languages: a program that computes the same from the same input reads and
claims as crust does. Each file is made from the inputs below by crust's own code; the tests of crust check them by
other means. specs/vectors/README.md says how to use them.
"""

import base64
import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crust.core import errors, volumes
from crust.handoff import layout
from crust.handoff.record import Record
from crust.host.block import devices

DIRECTORY = Path("specs/vectors")
ROOT = layout.DEFAULT_ROOT
TARGETS = (
    "/a",
    "/var/lib/kubelet/pods/6f1c/volumes/kubernetes.io~csi/pvc-1/mount",
    "/var/lib/kubelet/pods/6f1c/volumes/kubernetes.io~csi/with space/mount",
    "/var/lib/kubelet/pods/ü/mount",
    "/x" * 500,
)
NUMBERS = ((7, 0), (7, 255), (8, 16), (259, 3), (4095, 1048575))
TARGET = volumes.TargetPath.parse(TARGETS[1])
MOUNT = volumes.DeferredMount(
    source=volumes.BlockSource("/dev/loop7", volumes.DeviceIdentity(7, 7, 42)),
    fs_type="ext4",
    mount_options=("noatime",),
    capacity_bytes=1 << 30,
    content_generation=5,
)
IMAGE = volumes.NetworkImage(
    cluster="11111111-2222-3333-4444-555555555555",
    pool="rbd",
    namespace="crust",
    image="vol-1",
    monitors=("v2:192.0.2.1:3300", "v2:192.0.2.2:3300"),
    user="node",
)
ACCEPTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("read-only", {"readonly": True}),
    ("with a group", {"group": volumes.GroupChange(3000, volumes.GroupPolicy.ALWAYS)}),
    ("with limits", {"io_limits": volumes.IoLimits(read_iops=100)}),
    ("created empty", {"format": volumes.GuestFormat(16384, 1)}),
    ("encrypted", {"encryption": volumes.Encryption.LUKS}),
    ("an image on the network", {"source": IMAGE}),
)


def write(into: Path) -> list[Path]:
    """Write all files below `into`; returns them, relative to it."""
    directory = into / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for name, content in _files().items():
        (directory / name).write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n")
        made.append(DIRECTORY / name)
    return made


def _files() -> dict[str, Any]:
    return {
        "digests.json": [_digest(text) for text in TARGETS],
        "locks.json": _locks(),
        "identities.json": list(_identities()),
        "records.json": [*_accepted(), *_refused()],
        "claims.json": list(_claims()),
        "blank.json": [
            {"clause": "H-47", "offset": offset, "length": length}
            for offset, length in devices.PROBE_WINDOWS
        ],
    }


def _digest(text: str) -> dict[str, str]:
    return {"clause": "H-1", "target_path": text, "digest": volumes.TargetPath.parse(text).digest}


def _locks() -> dict[str, Any]:
    paths = layout.Layout(ROOT).entry(TARGET)
    return {
        "clause": "H-21",
        "target_path": TARGET.text,
        "lock": paths.claim_lock,
        "claim": paths.claim,
        "record": paths.record,
        "open_flags": ["O_RDWR", "O_NOFOLLOW"],
        "fcntl": "F_OFD_SETLK",
        "flock": {"l_type": "F_WRLCK", "l_whence": "SEEK_SET", "l_start": 0, "l_len": 0},
        "query": "F_OFD_GETLK",
    }


def _identities() -> Iterator[dict[str, Any]]:
    """`st_rdev` is stat(2)'s number, `diskseq` the content of /sys/dev/block/<major>:<minor>/diskseq."""
    for major, minor in NUMBERS:
        yield {
            "clause": "H-23",
            "st_rdev": os.makedev(major, minor),
            "sysfs": f"/sys/dev/block/{major}:{minor}/diskseq",
            "diskseq": "42\n",
            "identity": {"major": major, "minor": minor, "disk_sequence": 42},
        }


def _record(**changes: Any) -> Record:
    key = volumes.VolumeKey(volumes.DriverName("block.csi.crust.dev"), volumes.VolumeId("vol-1"))
    mount = dataclasses.replace(MOUNT, **changes)
    made = Record.of(mount, key, TARGET, volumes.HandlerName("kata"))
    moment = datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    return made.replaced(published_at=moment)


def _accepted() -> Iterator[dict[str, Any]]:
    for name, changes in ACCEPTED:
        yield _vector(name, _record(**changes).to_bytes().decode(), "H-5")
    yield _vector("with a key of a later version", _edited(future=1), "H-5")
    both = json.loads(_record().to_bytes()) | {"Device": "/dev/sda", "FSTYPE": "vfat"}
    yield _vector("a known key in another case beside it", json.dumps(both), "H-5")


def _refused() -> Iterator[dict[str, Any]]:
    yield _vector("not JSON", "{", "H-5")
    text = _record().to_bytes().decode()
    for key in ("crust", "device", "fstype", "readonly", "identity"):
        yield _vector(f"{key} in capitals", text.replace(f'"{key}"', f'"{key.upper()}"'), "H-5")
    yield _vector("a second object", text + "{}", "H-5")
    yield _vector("a byte order mark", "\ufeff" + text, "H-5")
    data = text.encode().replace(b"noatime", b"no\xfftime")
    yield {
        "name": "a byte that is not UTF-8", "clause": "H-5", "entry": TARGET.digest,
        "base64": base64.b64encode(data).decode(), "accepted": False,
    }  # fmt: skip
    yield _vector("a newer schema", _edited(schema=2), "H-6")
    yield _vector("a required key that is unknown", _edited(future=1, required=["future"]), "H-5")
    yield _vector("for another target than its entry's", _edited(target_path="/other"), "H-7")
    yield _vector("read-only without the option ro", _edited(readonly=True), "H-8")
    yield _vector("no identity", _edited(identity=None), "H-23")
    image = dataclasses.asdict(IMAGE)
    yield _vector("a device and an image", _edited(image=image, required=["image"]), "H-50")
    for option in ("password=x", "pass=x", "KeyFile=/x", "cred=x", "src=nfs://user:x@host/"):
        credential = json.loads(_record().to_bytes()) | {"options": [option]}
        yield _vector(f"an option like a credential: {option}", json.dumps(credential), "H-9")
    metadata = json.loads(_record().to_bytes()) | {"metadata": {"token": "x"}}
    yield _vector("metadata that is not known", json.dumps(metadata), "H-9")


def _edited(**changes: Any) -> str:
    plain = json.loads(_record().to_bytes())
    plain["crust"] |= changes
    return json.dumps(plain)


def _vector(name: str, text: str, clause: str) -> dict[str, Any]:
    """What a reader makes of `text` as mountInfo.json of the entry `entry`."""
    vector = {"name": name, "clause": clause, "entry": TARGET.digest, "text": text}
    try:
        found = Record.parse(text.encode(), digest=TARGET.digest)
    except errors.CrustError:
        return {**vector, "accepted": False}
    return {**vector, "accepted": True, "value": _value(found)}


def _value(record: Record) -> dict[str, Any]:
    mount = record.mount
    return {
        "handler": record.handler,
        **_source(mount.source),
        "fs_type": mount.fs_type,
        "options": list(mount.mount_options),
        "readonly": record.readonly,
        "group": mount.group.gid if mount.group else None,
        "group_policy": mount.group.policy.value if mount.group else None,
        "limits": dataclasses.asdict(mount.io_limits),
        "format": dataclasses.asdict(mount.format) if mount.format else None,
        "encryption": mount.encryption.value if mount.encryption else None,
        "capacity_bytes": mount.capacity_bytes,
    }


def _source(source: volumes.BlockSource | volumes.NetworkImage) -> dict[str, Any]:
    if isinstance(source, volumes.NetworkImage):
        return {"image": {**dataclasses.asdict(source), "monitors": list(source.monitors)}}
    return {"device": source.path, "identity": dataclasses.asdict(source.identity)}


def _claims() -> Iterator[dict[str, Any]]:
    good = {
        "schema": 1,
        "sandbox_id": "sandbox-1",
        "handler": "kata",
        "state": "mounted",
        "error": "",
        "pid": 4711,
        "claimed_at": "2026-02-03T04:05:06+00:00",
    }
    yield _claim("mounted", good, accepted=True)
    silent = {key: value for key, value in good.items() if key != "error"}
    yield _claim("without an error", silent, accepted=True)
    failed = {**good, "state": "error", "error": "no xfs"}
    yield _claim("an error for people", failed, accepted=True)
    yield _claim("with a key of a later version", {**good, "future": 1}, accepted=True)
    process = {"pid": 4711, "started": 224753}
    yield _claim("with its hypervisor's process", {**good, "process": process}, accepted=True)
    for name, broken in (
        ("a process without its start", {"pid": 4711}),
        ("a process without a number", {**process, "pid": 0}),
        ("a process by its number alone", 4711),
    ):
        yield _claim(name, {**good, "process": broken}, accepted=False)
    yield _claim("a state that is not known", {**good, "state": "ready"}, accepted=False)
    capitals = {key.upper(): value for key, value in good.items()}
    yield _claim("keys in capitals", capitals, accepted=False)
    yield _claim("no sandbox", {**good, "sandbox_id": ""}, accepted=False)
    for key in ("sandbox_id", "handler"):
        odd = {**good, key: "one\ntwo"}
        yield _claim(f"a control character in {key}", odd, accepted=False)
    yield _claim("a newer schema", {**good, "schema": 2}, accepted=False)
    yield _claim(
        "a time without a zone", {**good, "claimed_at": "2026-02-03T04:05:06"}, accepted=False
    )
    yield _claim("an error that is too long", {**good, "error": "x" * 2001}, accepted=False)


def _claim(name: str, content: dict[str, Any], *, accepted: bool) -> dict[str, Any]:
    text = json.dumps(content, separators=(",", ":"))
    return {"name": name, "clause": "H-24", "text": text, "accepted": accepted}
