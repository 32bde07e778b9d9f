"""A change of an image, for as long as every client that has it open answers.

A snapshot, a growth and most other changes need librbd's exclusive lock, or ask its owner for it. An owner that does
not answer is treated as dead after 30 s, its lock is broken and its client blocklisted: a virtual machine that was
only paused (suspended, migrated, stopped in a debugger) would lose its disk because of a snapshot. No option of
librbd is against that. Without the blocklisting (`rbd_blocklist_on_break_lock`) it is worse: a client that wakes up
without its lock writes beside the new owner, and about one of ten hangs for ever (librbd 16: it gives up the lock,
which waits for its flush, which waits for the new header, which waits for the flush).

So librbd is never let get that far:

    before     all clients are asked (`image_use.check_answers`), and a silent one is a refusal
    meanwhile  they are asked again, each `ASK_EVERY_S`; when one has been silent for `SILENT_S`, *our own* client is
               blocklisted, which ends the change wherever it is: the OSDs refuse its next step
    after      a change during which librbd might have broken a lock all the same, because this process slept or no
               monitor answered, is not treated as done

The silent client still has its lock and knows nothing of all this. What it was asked to do and did not do yet it may
do when it wakes up; whoever repeats the change looks first.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.provisioning import image_use
from crust.blockdriver.engines.rbd.provisioning.image_use import ClientsSeen
from crust.ceph import binding
from crust.ceph.binding import Image, Ioctx
from crust.core import errors

ASK_EVERY_S = 3.0
_AGAIN_S = 0.5
SILENT_S = 8.0
"""Two questions in a row without an answer."""
KEPT_S = 20.0
"""A client that has answered watches the image for longer than that: its watch ends 30 s after its last sign of life,
which it gives every 5 s. Until then librbd breaks no lock of it."""

_log = logging.getLogger(__name__)


@contextmanager
def changing(place: Place, ioctx: Ioctx, name: str) -> Iterator[Image]:
    """The image, open for a change that is made inside the block.

    Raises `RbdClientSilent`, `rbd.ImageNotFound`. After an error the change may have been made.
    """
    asked = image_use.check_answers(place, ioctx, name)
    with place.connection.endable() as end:
        watch = _Watch(asked, ioctx, end)
        try:
            with watch.kept(), place.image(ioctx, name, read_only=False) as image:
                yield image
        except (*binding.load().failures, errors.CrustError) as err:
            if watch.is_ended:
                raise asked.silent() from err
            raise
    if not watch.is_kept and asked.clients:
        raise asked.silent()


@dataclass(slots=True)
class _Watch:
    """Asks the clients on a thread of its own, and ends the change when one is silent."""

    asked: ClientsSeen
    ioctx: Ioctx
    end: Callable[[], str]
    """Ends the change; returns the address of the client that is blocklisted for it."""
    is_ended: bool = False
    is_kept: bool = True
    """No lock can have been broken so far."""
    _answered_s: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Ask while the block runs."""
        self._answered_s = self.asked.at_s
        thread = threading.Thread(target=self._run, name="rbd-change", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            self._look_back(image_use.now_s())

    def _run(self) -> None:
        wait_s = ASK_EVERY_S
        while not self.is_ended and not self._done.wait(wait_s):
            at_s = image_use.now_s()
            if self._is_answered():
                self._look_back(at_s)
                self._answered_s, wait_s = at_s, ASK_EVERY_S
                continue
            wait_s = _AGAIN_S
            if image_use.now_s() - self._answered_s >= SILENT_S:
                self._end()

    def _look_back(self, now_s: float) -> None:
        self.is_kept &= now_s - self._answered_s <= KEPT_S

    def _is_answered(self) -> bool:
        try:
            return image_use.answer(self.ioctx, self.asked.header)
        except binding.load().failures:
            return False

    def _end(self) -> None:
        extra: dict[str, object] = {"image": self.asked.image, "clients": self.asked.clients}
        try:
            extra["client"] = self.end()
        except errors.CrustError as err:
            text = "a client fell silent while its image was changed, and the change could not be ended yet"
            _log.warning(text, extra={**extra, "error": err})
        else:
            self.is_ended = True
            text = "a client fell silent while its image was changed: the change is ended, by a new connection"
            _log.warning(text, extra=extra)
