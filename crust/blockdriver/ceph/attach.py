"""A runtime's calls to the cluster for one image, in a process of its own: check, take, record, give back.

A hypervisor opens an image in its main loop, and a runtime serves all its sandboxes from one event loop: an absent
monitor or a wrong key would stop either for the length of a timeout. So librados is in neither. A process per attach
or detach connects, answers a few questions, and ends. The runtime kills a process that hangs.

`asking` starts the process; the program is `python -m crust.blockdriver.ceph.attach`. Questions and answers are lines
of JSON on its standard input and output. The key goes by the input and nowhere else. The answer about an error has
its name and texts, and `ImageCalls.ask` makes it again. The process ends with its input, without a shutdown, which
could hang.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from crust.blockdriver.ceph import claims, cluster_image, connection
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.user import CephUser, Timeouts
from crust.core import errors, volumes

__all__ = ["Host", "ImageCalls", "ImageProcessFailed", "Key", "Mode", "asking"]


class ImageProcessFailed(errors.PeerUnavailable):
    def __init__(self, image: str, question: str) -> None:
        super().__init__(
            f"the Ceph cluster could not be asked about the image {image}",
            why=f"the process for that gave no answer to {question!r} in time",
        )


@dataclass(frozen=True, slots=True)
class Key:
    """An image and the key of its user, which is never shown."""

    image: volumes.NetworkImage
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImageCalls:
    """The questions about one image. Each raises the errors of `claims` and `binding.translated`."""

    _image: volumes.NetworkImage
    _process: asyncio.subprocess.Process
    _timeout_s: float

    async def take(self, mode: Mode, host: Host, sandbox: str, holder_id: str) -> None:
        """See `claims.take`; the cluster is the image's, and the image exists."""
        await self.ask(
            "take", mode=mode.value, **asdict(host), sandbox=sandbox, holder_id=holder_id
        )

    async def size_bytes(self) -> int:
        return int((await self.ask("size"))["size_bytes"])

    async def record(self, holder_id: str) -> str:
        """See `claims.record`."""
        return str((await self.ask("record", holder_id=holder_id))["address"])

    async def give_back(self, holder_id: str) -> None:
        """See `claims.give_back`."""
        await self.ask("give_back", holder_id=holder_id)

    async def ask(self, question: str, **arguments: object) -> Mapping[str, Any]:
        """One question, one answer. Raises `ImageProcessFailed`, and the answered error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"question": question, **arguments})
        try:
            async with asyncio.timeout(self._timeout_s):
                self._process.stdin.write(f"{line}\n".encode())
                await self._process.stdin.drain()
                answer = await self._process.stdout.readline()
        except (TimeoutError, OSError) as err:
            raise ImageProcessFailed(str(self._image), question) from err
        if not answer:
            raise ImageProcessFailed(str(self._image), question)
        response: dict[str, Any] = json.loads(answer)
        if "error" not in response:
            return response
        branches = {branch.__name__: branch for branch in errors.CrustError.__subclasses__()}
        branch = branches[response["branch"]]
        error = branch(response["what"], why=response["why"], hint=response["hint"])
        error.error_name = response["error"]  # by which an operator looks it up
        raise error


@contextlib.asynccontextmanager
async def asking(
    key: Key, *, timeouts: Timeouts | None = None, timeout_s: float = 30.0
) -> AsyncIterator[ImageCalls]:
    """A process that is connected to the image's cluster, while the block runs. Raises as `ImageCalls.ask`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "crust.blockdriver.ceph.attach",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        calls = ImageCalls(key.image, process, timeout_s)
        times = asdict(timeouts or Timeouts())
        await calls.ask("connect", image=asdict(key.image), key=key.key, timeouts=times)
        yield calls
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # it has answered everything, or never will
        await process.wait()


def main() -> None:
    """Answer the questions until the input ends."""
    answers = _Answers()
    for line in sys.stdin:
        try:
            question = json.loads(line)
            answer: dict[str, object] = getattr(answers, question.pop("question"))(**question) or {}
        except errors.CrustError as err:
            branch = err.answered_as or next(
                cls for cls in type(err).__mro__ if errors.CrustError in cls.__bases__
            )
            answer = {
                "error": err.error_name,
                "branch": branch.__name__,
                "what": err.what,
                "why": err.why,
                "hint": err.hint,
            }
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    os._exit(0)


class _Answers:
    """The answer to each question is the method of that name."""

    _image: volumes.NetworkImage
    _connection: connection.Connection

    def connect(self, image: dict[str, Any], key: str, timeouts: dict[str, int]) -> None:
        self._image = volumes.NetworkImage(**{**image, "monitors": tuple(image["monitors"])})
        monitors = ",".join(self._image.monitors)
        user = CephUser(monitors, self._image.user, key)
        self._connection = connection.Connection(user, Timeouts(**timeouts))
        cluster_id = self._connection.fsid()
        if cluster_id != self._image.cluster:
            raise errors.NotReady.named(
                "WrongCephCluster",
                "the Ceph cluster is another one than the volume's",
                why=f"its id is {cluster_id}, and the volume is in {self._image.cluster}",
            )

    def size(self) -> dict[str, object]:
        with self._there() as image, image.opened() as opened:
            return {"size_bytes": opened.size()}

    def take(self, mode: str, node: str, machine: str, sandbox: str, holder_id: str) -> None:
        with self._there() as image:
            claims.take(image, Mode(mode), Host(node, machine), sandbox, holder_id)

    def record(self, holder_id: str) -> dict[str, object]:
        with self._there() as image:
            return {"address": claims.record(image, holder_id)}

    def give_back(self, holder_id: str) -> None:
        with self._there() as image:
            claims.give_back(image, holder_id)

    def _there(self) -> contextlib.AbstractContextManager[cluster_image.ClusterImage]:
        image = self._image
        error_text = f"cannot use the image {image}"
        return cluster_image.reached(
            self._connection, image.pool, image.namespace, image.image, error_text
        )


if __name__ == "__main__":
    main()
