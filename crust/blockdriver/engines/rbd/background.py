"""Work that takes the time of the data, on a thread of its own: emptying the trash, flattening deep clones.

Everything to do is in the pool (RBD's trash, `crust.work`), so it goes on after a kill, and with several controllers
whoever comes first does it: what is gone or busy is another's, and is looked at again. A piece of work that fails is
tried again at the next look and keeps nothing else from being done.
"""

import errno
import logging
import threading
from collections.abc import Callable

from crust import errors
from crust.blockdriver.engines.rbd import image_use, omap
from crust.blockdriver.engines.rbd.copies import FLATTEN, SOFT_DEPTH, WORK, RbdCopies
from crust.blockdriver.engines.rbd.place import Place, ignoring
from crust.ceph.failures import CephConnectionClosed

PERIOD_S = 60.0

_log = logging.getLogger(__name__)


class BackgroundWork:
    """The thread, from `start` to `stop`."""

    def __init__(self, place: Place, copies: RbdCopies) -> None:
        self._place = place
        self._copies = copies
        self._wake = threading.Event()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, unless it runs."""
        if self._thread is None:
            self._ends.clear()
            self._thread = threading.Thread(target=self._run, name="rbd-background", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """End after the piece of work that runs."""
        self._ends.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._ends.is_set():
            self._wake.clear()
            try:
                self.look()
            except CephConnectionClosed:
                return
            except errors.CrustError as err:
                _log.warning("background work in the Ceph pool failed", extra={"error": err})
            self._wake.wait(PERIOD_S)

    def look(self) -> None:
        """Do all that there is to do now. Raises the first error, after the rest was tried."""
        failed: list[errors.CrustError] = []
        for image_id in self._trash():
            self._try(failed, self._remove, image_id)
        for name in self._to_flatten():
            self._try(failed, self._flatten, name)
        if failed:
            raise failed[0]

    def _try(self, failed: list[errors.CrustError], work: Callable[[str], None], item: str) -> None:
        if self._ends.is_set():
            return
        try:
            work(item)
        except CephConnectionClosed:
            raise
        except errors.CrustError as err:
            failed.append(err)

    def _trash(self) -> list[str]:
        """The images in the trash; the namespace is ours alone."""
        with self._place.ioctx(f"cannot list the trash of {self._place.shown}") as ioctx:
            return [str(each["id"]) for each in self._place.images.trash_list(ioctx)]

    def _remove(self, image_id: str) -> None:
        with (
            self._place.ioctx(f"cannot remove the image {image_id} from the trash") as ioctx,
            # kept as long as clones share its data, or a client has it open
            ignoring(errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT),
        ):
            self._place.images.trash_remove(ioctx, image_id, force=True)

    def _to_flatten(self) -> list[str]:
        with (
            self._place.ioctx(f"cannot read the work of {self._place.shown}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            return [key for key, _ in omap.read(ioctx, WORK, FLATTEN)]
        return []

    def _flatten(self, name: str) -> None:
        with self._place.ioctx(f"cannot flatten {name}") as ioctx:
            if not self._place.has_image(ioctx, name):
                return  # its create has not come so far, or it is deleted (`RbdCopies.clear`)
            with ignoring(errno.ENOENT):
                if self._copies.depth(ioctx, name) > SOFT_DEPTH:
                    image_use.check_answers(self._place, ioctx, name)
                    with self._place.image(ioctx, name, read_only=False) as image:
                        image.flatten()
            omap.drop(ioctx, WORK, (FLATTEN + name,))
