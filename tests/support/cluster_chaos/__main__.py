"""`python -m tests.support.cluster_chaos`: five minutes of faults, and a count by the checker; 0 if nothing is wrong.

Run it as root in a private mount namespace: `make cluster-chaos`. Two flags break a rule, to show that the checker
finds what comes of it: with `--without-placements` the controllers do not record where a name is, with
`--without-claims` whoever wants to write an image only opens it.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from examples.cluster import ceph_cluster, etcd, network
from tests.support.cluster_chaos import found
from tests.support.cluster_chaos.cluster import NODES, Cluster
from tests.support.cluster_chaos.co import Co
from tests.support.cluster_chaos.faults import Faults
from tests.support.cluster_chaos.journal import Journal
from tests.support.cluster_chaos.sessions import Sessions

_BREAKING = "tests.support.cluster_chaos.without_placements"
_SETTLES_S = 600.0
"""How long the CO may go on after the faults; only what never ends reaches it."""
_TIDIED_S = 150.0
"""How long etcd may still have answers that nobody has read, and Ceph images in the trash."""
_SHARE_OF_CEPH = 5
"""Every fifth volume is an image of Ceph."""


def main(arguments: list[str]) -> int:
    """Make the network, and run the rest in the network of the services."""
    given = _parser().parse_args(arguments)
    if given.network:
        return asyncio.run(_until_told(network.Network.of(given.network, NODES), given))
    if os.geteuid() != 0:
        sys.stderr.write("it makes network namespaces and mounts: run it as root\n")
        return 2
    with network.running(*NODES) as hosts:
        mark = hosts.services.namespace.removesuffix("-services")
        inner = (sys.executable, "-m", "tests.support.cluster_chaos", *arguments)
        command = hosts.services.command(*inner, f"--network={mark}")
        with subprocess.Popen(command) as running:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda got, _frame: running.send_signal(got))
            return running.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster_chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--volumes", type=int, default=300)
    parser.add_argument("--images", type=int, default=4, help="images that are written on nodes")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--without-placements", action="store_true")
    parser.add_argument("--without-claims", action="store_true")
    parser.add_argument("--without-ceph", action="store_true", help="the local pools alone")
    parser.add_argument(
        "--each-fault", action="store_true", help="each fault once, and not at random for --seconds"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory")
    parser.add_argument("--network", help=argparse.SUPPRESS)
    return parser


async def _until_told(hosts: network.Network, given: argparse.Namespace) -> int:
    """Ctrl-C and SIGTERM end it early, with all that it has started."""
    running = asyncio.ensure_future(_run(hosts, given))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await running
    return 1


async def _run(hosts: network.Network, given: argparse.Namespace) -> int:
    _say(f"seed {given.seed}, {given.volumes} volumes, {given.seconds:g} s of faults")
    with _directory(keep=given.keep) as base, contextlib.ExitStack() as stack:
        for each in ("etcd", "sessions"):
            (base / each).mkdir()
        address = hosts.services.address
        members = stack.enter_context(etcd.running(base / "etcd", 3, NODES, host=address))
        ceph = None
        if not given.without_ceph:
            started = ceph_cluster.running(
                base / "ceph", store="bluestore", host=address, with_mgr=True
            )
            ceph = stack.enter_context(started)
        module = _BREAKING if given.without_placements else "crust"
        cluster = Cluster(hosts, base, members, ceph, module)
        journal = Journal(base / "journal.jsonl")
        try:
            await cluster.start()
            await _chaos(cluster, journal, given)
            await _note_places(cluster)
            return await asyncio.to_thread(_check, base)
        finally:
            journal.close()
            await cluster.close()


async def _chaos(cluster: Cluster, journal: Journal, given: argparse.Namespace) -> None:
    co = Co(cluster, journal)
    faults = Faults(cluster, given.seed)
    try:
        await co.ready()
        images = [
            await co.create("rbd", f"image-{number}", random.Random(number))
            for number in range(given.images if cluster.ceph else 0)
        ]
        until = asyncio.get_running_loop().time() + given.seconds
        sessions = [
            Sessions(
                cluster,
                each.volume_id,
                f"{given.seed}-{each.volume_id}",
                with_claims=not given.without_claims,
            )
            for each in images
        ]
        begun = [asyncio.create_task(each.run(until)) for each in sessions]
        begun += [asyncio.create_task(_life(co, number, given)) for number in range(given.volumes)]
        async with faults.supervising():
            await (faults.run_each() if given.each_fault else faults.run(given.seconds))
            _say("the faults have ended")
            done, late = await asyncio.wait(begun, timeout=_SETTLES_S)
        for each in late:
            each.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for each in done:
            if error := each.exception():
                _say(f"a task failed: {error!r}")
        _print(faults, co, sessions, len(late))
    finally:
        await co.close()


async def _life(co: Co, number: int, given: argparse.Namespace) -> None:
    """A life begins at some time before the last fault ends."""
    rng = random.Random(f"{given.seed}-{number}")
    await asyncio.sleep(rng.uniform(0, given.seconds * 0.85))
    engine = co.engines[-1] if number % _SHARE_OF_CEPH == 0 else "local"
    await co.live(engine, f"volume-{number}", f"{given.seed}-{number}-life")


def _print(faults: Faults, co: Co, sessions: list[Sessions], late: int) -> None:
    for what, number in sorted(faults.counts.items()):
        _say(f"{number:7}  {what}")
    for code, number in sorted(co.answers.items()):
        _say(f"{number:7}  answers {code}")
    _say(f"{sum(each.fenced for each in sessions):7}  fences")
    _say(f"{sum(each.written_on for each in sessions):7}  fenced while they wrote on")
    _say(f"{late:7}  tasks that did not end\n")


async def _note_places(cluster: Cluster) -> None:
    """Where the checker looks; of etcd what its own client prints.

    Answers that nobody waits for are kept for a minute, for the caller's retry, and as often a controller looks for
    what is in Ceph's trash; what is left later is left for good.
    """
    keys, trash = await _open_in(cluster), await _trash_of(cluster)
    end = asyncio.get_running_loop().time() + _TIDIED_S
    while (keys or trash) and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(2)
        keys, trash = await _open_in(cluster), await _trash_of(cluster)
    listed = await asyncio.to_thread(cluster.etcd.ctl, "get", "--prefix", "/crust/placements/")
    lines = [line for line in listed.splitlines() if line]
    placements = {
        key.rpartition("/")[2]: value for key, value in zip(lines[::2], lines[1::2], strict=True)
    }
    places = {
        "pools": {node: str(cluster.pool(node)) for node in cluster.nodes},
        "placements": {
            key: value
            for key, value in placements.items()
            if key.startswith(("volume-", "snapshot-", "group-"))
        },
        "requests": keys,
    }
    if cluster.ceph is not None:
        there = dataclasses.asdict(cluster.ceph_place)
        places |= {f"ceph.{name}": value for name, value in there.items()}
    (cluster.base / "places.json").write_text(json.dumps(places))


async def _open_in(cluster: Cluster) -> list[str]:
    """The keys of requests and answers."""
    keys = await asyncio.to_thread(cluster.etcd.keys)
    return [key for key in keys if "/requests/" in key or "/answers/" in key]


async def _trash_of(cluster: Cluster) -> list[str]:
    return await asyncio.to_thread(found.trash, cluster.ceph_place) if cluster.ceph else []


def _check(base: Path) -> int:
    """The checker is a process of its own."""
    command = (sys.executable, "-m", "tests.support.cluster_chaos.checker", str(base))
    return subprocess.run(command, check=False).returncode


@contextlib.contextmanager
def _directory(*, keep: bool) -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="crust-chaos-"))
    try:
        yield base
    finally:
        if keep:
            _say(f"kept: {base}")
        else:
            shutil.rmtree(base)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
