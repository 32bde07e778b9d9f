"""Work beside the calls, on a thread of its own for each kind: empty the trash, flatten deep clones; free images.

Emptying and flattening take the time of the data. The lists of work are in the pool (RBD's trash, `crust.work`), so
it goes on after a kill. The next look tries a busy image again, and a failed piece of work, which does not stop the
others.

It waits for no other change of a volume (`Namespace.turn`). Images leave the trash by their ids, which no other image
ever has, and flattening does not change the image's data; a piece of work that was put again meanwhile has another
value, so it is not removed with the first.

A node seldom has the right to blocklist, and a waiting pod has none. So the controller frees images of clients that
ended without closing them, and of nodes that are gone: a thread reads the claims of each image, and cuts the ended
ones off (`crust.blockdriver.ceph.fencing`). It cuts off nodes that were declared gone as `crust ceph fence` without
`--even-if-connected`. A claim that cannot be freed now does not stop the others.

A stop waits for the running piece of work, but not for the time of the data: undone work is in the lists, and half
done work begins again, at the next start or by the next controller.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from crust.blockdriver.ceph import claim_object, fencing, omap
from crust.blockdriver.ceph.binding import CephConnectionClosed, ignoring, load
from crust.blockdriver.engines.pool_access import pool_of
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning import copies, image_use, images, librbd_objects
from crust.core import errors, metrics, volumes

STOP_S = 10.0
"""A stop has 30 s in all, by Kubernetes' default."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RepeatedWork:
    """A thread that looks for work again and again, from `start` to `stop`, or until the connection is closed."""

    name: ClassVar[str]
    least_pause_s: ClassVar[float]
    pause_factor: ClassVar[int]
    """A pause is so many times as long as the look before it, and `least_pause_s` at least."""

    _place: Namespace
    _wake: threading.Event = field(default_factory=threading.Event, init=False)
    _ends: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _doing: str = field(default="", init=False)
    """The piece of work that takes its time now."""

    def look(self, ends: threading.Event | None = None) -> None:
        """Do all present work; `ends` ends the look."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to look, unless the thread runs. A thread that `stop` has left ends after its piece of work."""
        if self._thread is None:
            self._ends = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._ends,), name=self.name, daemon=True
            )
            self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, limit_s: float = STOP_S) -> str:
        """End after the running piece of work, or leave it after `limit_s`; returns the work that was left."""
        self._ends.set()
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is None:
            return ""
        thread.join(limit_s)
        unfinished = self._doing if thread.is_alive() else ""
        if unfinished:
            text = "background work is left to the next start, or the next controller"
            _log.warning(text, extra={"work": unfinished, "waited_s": limit_s})
        return unfinished

    def _run(self, ends: threading.Event) -> None:
        while True:
            self._wake.clear()  # before the look at `ends`: a later stop wakes the thread
            if ends.is_set():
                return
            began_s = time.monotonic()
            try:
                self.look(ends)
            except CephConnectionClosed:
                return
            except errors.CrustError as err:
                extra = {"work": self.name, "error": err}
                _log.warning("background work in the Ceph pool failed", extra=extra)
            took_s = time.monotonic() - began_s
            self._wake.wait(max(self.least_pause_s, self.pause_factor * took_s))


class BackgroundWork(RepeatedWork):
    name = "rbd-background"
    least_pause_s = 60.0
    pause_factor = 0

    def look(self, ends: threading.Event | None = None) -> None:
        """Do all present work. Raises the first error, after a try of the rest."""
        failed: list[errors.CrustError] = []
        with self._place.ioctx(f"cannot list the trash of {self._place.shown}") as ioctx:
            entries = load().images.trash_list(ioctx)
            trash = [(str(entry["id"]), str(entry["name"])) for entry in entries]
        work: list[tuple[str, Callable[[], None]]] = [
            (f"removing the image {image_id} from the trash", partial(self._remove, image_id, name))
            for image_id, name in trash
            if pool_of(images.volume_of(name))  # others are not crust's
        ]
        to_flatten: list[tuple[str, bytes]] = []
        with (
            self._place.ioctx(f"cannot read the work of {self._place.shown}") as ioctx,
            ignoring(errno.ENOENT),
        ):
            to_flatten = list(omap.read(ioctx, copies.WORK, copies.FLATTEN))
        for name, value in to_flatten:
            work.append((f"flattening {name}", partial(self._flatten, name, value)))
        for self._doing, do in work:
            if ends is not None and ends.is_set():
                break
            try:
                do()
            except CephConnectionClosed:
                raise
            except errors.CrustError as err:
                failed.append(err)
        self._doing = ""
        if failed:
            raise failed[0]

    def _remove(self, image_id: str, name: str) -> None:
        with (
            self._place.ioctx(f"cannot remove the image {image_id} from the trash") as ioctx,
            # RBD keeps it while clones share its data, a client has it open, or its time in the trash has not ended
            ignoring(errno.ENOTEMPTY, errno.EBUSY, errno.ENOENT, errno.EPERM),
        ):
            with ignoring(errno.EUCLEAN):
                load().images.trash_remove(ioctx, image_id, force=False)
                return
            if librbd_objects.note_arrived(ioctx, image_id, name):
                load().images.trash_remove(ioctx, image_id, force=False)

    def _flatten(self, name: str, value: bytes) -> None:
        object_map = images.features(images.OBJECT_MAP)
        with self._place.ioctx(f"cannot flatten {name}") as ioctx:
            if not self._place.has_image(ioctx, name):
                return  # its create has not come so far, or it is deleted (`copies.clear`)
            with ignoring(errno.ENOENT):
                with self._place.image(ioctx, name) as image:
                    # a create finishes an image without the mark, and knows a begun copy by its parent
                    if not images.is_marked(image, images.volume_of(name)):
                        return
                if copies.depth(self._place, ioctx, name) > copies.SOFT_DEPTH:
                    with image_use.changing(self._place, ioctx, name) as image:
                        # A client notes an object in the object map before it copies the parent's data to it, and
                        # flattening skips noted objects: if the client was killed in between, their data would be
                        # lost. So it goes without the map, which is made again after it below.
                        if image.features() & object_map:
                            image.update_features(object_map, False)  # noqa: FBT003 - the binding's
                        image.flatten()
                # also after a stop since it was flattened
                with self._place.image(ioctx, name) as image:
                    has_object_map = image.features() & object_map == object_map
                if not has_object_map:
                    with image_use.changing(self._place, ioctx, name) as image:
                        image.update_features(object_map, True)  # noqa: FBT003 - the binding's
                        image.rebuild_object_map()
            key = copies.FLATTEN + name
            # unless the name is another image's now, or it is put again
            omap.swap(ioctx, copies.WORK, {key: value.decode()}, {key: None})


@dataclass(eq=False)
class Freeing(RepeatedWork):
    """Frees the images of `place`, as a user that may blocklist."""

    name = "rbd-freeing"
    least_pause_s = 1.0
    pause_factor = 10
    """Looks cost a tenth of a thread's time at most."""

    _told: set[str] = field(default_factory=set, init=False)
    """Images that could not be freed and are in the log."""

    def look(self, ends: threading.Event | None = None) -> None:
        """Free every image whose holders have ended. Raises the errors of the list of images."""
        with self._place.ioctx(f"cannot list {self._place.shown}") as ioctx:
            names = claim_object.images(ioctx)
        self._told &= set(names)
        for name in names:
            if ends is not None and ends.is_set():
                return
            extra: dict[str, object] = {"image": name}
            try:
                with self._place.ioctx(f"cannot free the image {name}") as ioctx:
                    has_ended = bool(claim_object.read(ioctx, name).claims.ended)
                    if has_ended:
                        extra["clients"] = fencing.cut_off(self._place.claimed(ioctx, name))
                self._told.discard(name)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                if name not in self._told:
                    text = "an image whose client has ended is not free yet"
                    _log.warning(text, extra={**extra, "error": err})
                self._told.add(name)
                continue
            if has_ended:
                text = "clients that ended without closing an image are cut off"
                _log.warning(text, extra=extra)

    def fence(
        self, volume_ids: Iterable[volumes.VolumeId], nodes: frozenset[str]
    ) -> frozenset[str]:
        """Cut these nodes off from these volumes; returns the nodes whose claims are left.

        A node that cannot be cut off now, such as one with a connected client, does not stop the others. Raises
        `errors.PeerUnavailable` as soon as the cluster does not answer.
        """
        still_claimed = set[str]()
        for volume_id in volume_ids:
            with self._place.ioctx(f"cannot read the claims on {volume_id}") as ioctx:
                try:
                    claims = claim_object.read(ioctx, volume_id).claims
                except claim_object.UnreadableImageClaim as err:
                    _log.warning("the claims on an image are not looked at", extra={"error": err})
                    continue
            for node in sorted(claims.nodes & nodes):
                extra: dict[str, object] = {"volume": volume_id, "node": node}
                try:
                    with self._place.ioctx(f"cannot cut {node} off from {volume_id}") as ioctx:
                        cut = fencing.fence(self._place.claimed(ioctx, volume_id), node)
                except errors.PeerUnavailable:
                    raise
                except errors.CrustError as err:
                    still_claimed.add(node)
                    text = "an image of a node that is gone is not free yet"
                    _log.warning(text, extra={**extra, "error": err})
                    continue
                metrics.claims_fenced.inc()
                extra["addresses"] = cut
                _log.warning("a node that is gone was cut off from an image", extra=extra)
        return frozenset(still_claimed)
