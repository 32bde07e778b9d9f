"""docs/commands.md: what the commands for operators print, on a node that is made up. `make docs-output` writes it.

.venv/bin/python -m tests.support.pages.cli_output > docs/commands.md
"""

import dataclasses
import datetime
import sys
from collections.abc import Iterator
from unittest import mock

from crust.blockdriver.commands import pool_volumes
from crust.cli import orphan
from crust.cli.doctor import examine as doctor
from crust.cli.doctor.node import Finding, Level
from crust.cli.gc import collect as gc
from crust.cli.gc.forgotten import ForgottenPublish
from crust.cli.gc.proof import ProofCheck
from crust.core.volumes import HandlerFeature
from crust.inspection import output, show, views
from crust.kata import keeper_watch

_AWAY = (
    "[DaemonNotResponding] the shim of driver csi.example.com does not answer on /run/crust/shim/csi.sock: "
    "the socket does not exist; start crust-shim, or correct `backend`"
)
NOW = datetime.datetime(2026, 1, 2, 12, 0, tzinfo=datetime.UTC)
_POD_NAME = "shop/db-0"
_POD = "1d0bd0f6-2b50-4b0e-8b43-6d1f3a2a9c11"
_KUBELET = "/var/lib/kubelet"
_RAW = f"{_KUBELET}/plugins/kubernetes.io/csi/volumeDevices"


def page() -> str:
    """The whole page; ages are counted to NOW."""
    with mock.patch.object(views, "now", return_value=NOW):
        return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# What the commands print\n"
    yield "Made by `make docs-output` from a node that is made up; a test compares it with the code.\n"
    for command, text in _outputs().items():
        yield f"## {command}\n"
        yield f"```\n$ {command}\n{text}\n```\n"


def _outputs() -> dict[str, str]:
    volumes = (_volume("mounted", "web-0"), _volume("published", ""))
    ready = (_driver(),)
    away = (_driver(_AWAY),)
    return {
        "crust status": _plain(
            show.of_node(views.ProxyAnswer("", ready, _handlers(), (), volumes))
        ),
        "crust status  # the shim is away": _plain(
            show.of_node(views.ProxyAnswer("", away, (), ()))
        ),
        "crust drivers -o wide": output.table(views.DRIVERS, ready, wide=True).plain,
        "crust pool": _plain(pool_volumes.shown(ready, list(_pool_volumes()))),
        "crust volumes -o wide": output.table(views.VOLUMES, volumes, wide=True).plain,
        "crust describe pvc-1": show.described(volumes[0], "/run/crust").plain,
        "crust volumes  # Kata's shim was killed": output.table(
            views.VOLUMES, (_orphaned(),), wide=False
        ).plain,
        "crust end-orphan pvc-1": "\n".join(
            (
                f"{orphan.question(_orphaned(), 'cloud-hypervisor')} [y/N]: y",
                orphan.ended(_orphaned()),
            )
        ),
        "crust doctor": _plain(doctor.shown(_findings())),
        "crust gc --dry-run": _plain(gc.shown((_forgotten(),), _KUBELET)),
    }


def _plain(shown: show.Shown) -> str:
    return shown.rendered("table").plain


def _driver(message: str = "") -> views.DriverRow:
    return views.DriverRow(
        name="csi.example.com",
        socket=f"{_KUBELET}/plugins/csi.example.com/csi.sock",
        backend="/run/crust/shim/csi.sock",
        state="not-ready" if message else "ready",
        version="1.0",
        registration="registered",
        deferred_volumes=0 if message else 2,
        message=message,
        shim_version="" if message else "0.1.0",
        pool=None if message else views.Pool(100 << 30, 12 << 30, 30 << 30, 70 << 30, 10 << 30),
        error_name="DaemonNotResponding" if message else "",
    )


def _handlers() -> tuple[views.HandlerRow, ...]:
    since = NOW - datetime.timedelta(hours=3)
    offered = (HandlerFeature.GROUP, HandlerFeature.ONLINE_EXPAND, HandlerFeature.STATS)
    features = tuple(feature.name for feature in offered)
    return (views.HandlerRow("kata", "0.1.0", "/run/h.sock", ("ext4", "xfs"), features, 0, since),)


def _volume(state: str, sandbox: str) -> views.VolumeRow:
    name = "pvc-1" if sandbox else "pvc-2"
    return views.VolumeRow(
        volume_id=name,
        driver="csi.example.com",
        target_path=f"{_KUBELET}/pods/{_POD}/volumes/kubernetes.io~csi/{name}/mount",
        pod_uid=_POD,
        pv=name,
        handler="kata",
        device="/dev/loop3" if sandbox else "/dev/loop6",
        fs_type="ext4",
        readonly=False,
        capacity_bytes=10 << 30,
        state=state,
        sandbox_id=sandbox,
        claimed_by_pid=4711 if sandbox else 0,
        claimed_at=NOW - datetime.timedelta(minutes=119) if sandbox else None,
        published_at=NOW - datetime.timedelta(hours=2),
        decided_by="the volume context, crust.dev/defer=always",
        entry="3f" * 32,
        message="",
        request_id="5ff31c2a9d07" if sandbox else "a41b09f2c6de",
        pod=_POD_NAME if sandbox else "shop/db-1",
    )


def _orphaned() -> views.VolumeRow:
    message = keeper_watch.orphaned("web-0", 4711).shown()
    return dataclasses.replace(_volume("error", "web-0"), message=message)


def _pool_volumes() -> Iterator[pool_volumes.PoolVolume]:
    for name, pods, state in (("pvc-1", (_POD_NAME,), "mounted"), ("pvc-9", (), "unused")):
        yield pool_volumes.PoolVolume(
            name,
            pods,
            state,
            10 << 30,
            (),
            f"{name}-id",
            "csi.example.com",
            thick=False,
            message="",
            pool="default",
        )


def _findings() -> tuple[Finding, ...]:
    return (
        Finding(Level.OK, "Linux 6.12.9", check="kernel"),
        Finding(
            Level.WARNING,
            "udev has no rule 59-crust.rules",
            "it reads the data of pods on their volumes, and LVM or md may take a volume",
            "copy /opt/crust/share/crust/host/59-crust.rules to /etc/udev/rules.d; udevadm control --reload",
            "udev",
        ),
    )


def _forgotten() -> gc.Result:
    target, mapped = f"{_RAW}/publish/pvc-3/{_POD}", f"{_RAW}/pvc-3/dev/{_POD}"
    publish = ForgottenPublish(
        "raw volume", "csi.example.com", "vol-3", _POD, f"{_KUBELET}/pods", target, mapped
    )
    seen = (
        ProofCheck("pod-directory", proven=True, text=f"{publish.pod_directory} does not exist"),
        ProofCheck(
            "device",
            proven=True,
            text="/dev/loop4, /dev/loop5: not open, not mounted, and no device is built upon it",
        ),
    )  # fmt: skip
    steps = (
        "detach the kubelet's loop device /dev/loop5",
        f"unmount the kubelet's bind {mapped}",
        f"NodeUnpublishVolume vol-3 {target}",
        f"NodeUnstageVolume vol-3 {_RAW}/staging/pvc-3",
    )
    return gc.Result(publish, seen, steps, "proven", "")


if __name__ == "__main__":
    sys.stdout.write(page())
