"""A check of a connection in a process of its own: can this user open this pool, and this image?

QEMU opens an image in its main loop: with a monitor that is away or a key that is wrong a whole virtual machine stops
for that time, its other disks included. So the question is asked first, where a hang hurts nobody. The process gets
what it needs, the key too, by its standard input, and answers with an errno and the step that it is of.

`check` is the caller's side; the program is `python -m crust.ceph.probe`.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from crust.ceph import binding, failures
from crust.ceph.user import CephUser, Timeouts
from crust.core import errors
from crust.host.process import commands

_NO_IMAGE = "image"


class CephImageMissing(errors.NotFound):
    """The Ceph pool has no image of that name."""

    answered_as = errors.NotReady

    def __init__(self, pool: str, namespace: str, image: str) -> None:
        where = f"{pool}/{namespace}" if namespace else pool
        super().__init__(
            f"there is no image {image} in {where}",
            why="it was removed, or made elsewhere",
            hint="compare with `rbd ls`",
        )
        self.image = image


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What to look at; without an `image` only the pool."""

    pool: str
    namespace: str = ""
    image: str = ""


async def check(
    who: CephUser, wanted: ProbeTarget, *, timeouts: Timeouts, timeout_s: float
) -> None:
    """Raise why the image cannot be opened by `who`; the process is killed after `timeout_s`.

    Raises `CephMonitorsUnreachable`, `CephKeyRefused`, `CephPoolMissing`, `CephImageMissing` and others of
    `crust.ceph.failures`, `CephBindingMissing`, and what `commands.run` raises but its timeout.
    """
    question = {
        "monitors": who.monitors,
        "user": who.user,
        "key": who.key,
        "timeouts": asdict(timeouts),
        "wanted": asdict(wanted),
    }
    argv = (sys.executable, "-I", "-m", "crust.ceph.probe")
    try:
        done = await commands.run(argv, timeout_s=timeout_s, input=json.dumps(question).encode())
    except commands.CommandTimedOut as err:
        raise failures.CephMonitorsUnreachable(who.monitors) from err
    answer = json.loads(done.stdout)
    if answer["step"] == "binding":
        raise binding.CephBindingMissing(answer["module"], answer["why"])
    if answer["step"] == _NO_IMAGE:
        raise CephImageMissing(wanted.pool, wanted.namespace, wanted.image)
    if answer["errno"]:
        raise failures.translated(
            answer["errno"],
            f"cannot open {wanted.image or wanted.pool}",
            step=answer["step"],
            user=who.user,
            monitors=who.monitors,
            pool=wanted.pool,
        )


def main() -> None:
    """Answer one question; the process ends without a shutdown, which could hang."""
    question = json.load(sys.stdin)
    try:
        answer = _ask(question)
    except binding.CephBindingMissing as err:
        answer = {"step": "binding", "module": err.module, "why": err.why}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    found, wanted = binding.load(), ProbeTarget(**question["wanted"])
    who = CephUser(question["monitors"], question["user"], question["key"])
    step = "connect"
    try:
        cluster = found.connection(who.user, who.options(Timeouts(**question["timeouts"])))
        cluster.connect()
        step = "pool"
        ioctx = cluster.open_ioctx(wanted.pool)
        ioctx.set_namespace(wanted.namespace)
        step = "data"
        if wanted.image:
            found.rbd.Image(ioctx, wanted.image, read_only=True)
    except found.rbd.ImageNotFound:
        return {"step": _NO_IMAGE}
    except found.failures as err:
        return {"step": step, "errno": failures.errno_of(err) or 5}
    return {"step": step, "errno": 0}


if __name__ == "__main__":
    main()
