"""One connection to a Ceph cluster for a process and a user. Every method blocks: call it on a thread.

Rules that librados does not enforce, and that cost the process otherwise:

- A call after the cluster's shutdown is a segmentation fault. So calls are counted, `close` refuses new ones and
  waits for those that run, then closes the pools and the cluster, in this order.
- A connection does not survive a fork: it hangs in the child. A process id that has changed is refused.
- `connect(timeout=)` has no effect, only the option `client_mount_timeout`. All three timeouts are always set.

A client that was blocklisted stays so for ever: librbd of another client does that to one that slept for 30 s. Such a
connection is replaced at the next call; one that an administrator cut off by the host's address fails again. The
client of a controller is replaced only after the pool's lock has the new address (`crust.ceph.controller_lock`).
"""

import errno
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from crust.ceph import binding, failures
from crust.ceph.controller_lock import ControllerLock
from crust.ceph.failures import CephConnectionClosed, Step
from crust.ceph.user import USUAL, CephUser, Timeouts
from crust.core import errors

EXPIRY_S = 315_360_000
"""Of an entry in the blocklist, ten years: it must not end while the client's process may live."""
_CANNOT_END = "cannot end this client's calls"
CLOSE_S = 20.0
"""Two steps of the data, each with its time."""


@dataclass(slots=True)
class _Open:
    """A connection in use."""

    cluster: binding.Rados
    pools: dict[tuple[int, str], binding.Ioctx] = field(default_factory=dict)
    """By number and namespace: a pool that was deleted and made again has another number."""
    calls: int = 0
    is_blocklisted: bool = False
    is_in_doubt: bool = False
    """One of its calls ended without an answer: it may still be carried out."""
    is_left: bool = False
    """The last of its calls shuts it down."""


class Connection:
    """The connection of `who`, opened at the first call. Safe from any thread."""

    def __init__(self, who: CephUser, timeouts: Timeouts = USUAL) -> None:
        """Raises `CephBindingMissing`."""
        self.controller_lock: ControllerLock | None = None
        """Of a controller: what admits each new client."""
        self.who = who
        self._timeouts = timeouts
        self._binding = binding.load()
        self._guard = threading.Condition()
        self._opening = threading.Lock()
        self._open: _Open | None = None
        self._is_closed = False
        self._tries = 0
        self._failure: errors.CrustError | None = None
        """Of the last try to connect."""
        self._pid = os.getpid()

    @contextmanager
    def cluster(self, what: str) -> Iterator[binding.Rados]:
        """The cluster, for a call that begins and ends inside the block. `what` is done, as "cannot …".

        Raises `CephMonitorsUnreachable`, `CephKeyRefused`, `CephConnectionClosed`, `CephClientBlocklisted`, and what
        `failures.translated` says.
        """
        with self._used(what, "monitors") as held:
            yield held.cluster

    @contextmanager
    def pool(self, pool: str, namespace: str, what: str) -> Iterator[binding.Ioctx]:
        """A pool's namespace, for calls that begin and end inside the block; images are closed in it.

        Raises `CephPoolMissing`, CephNotAnswering and others as `cluster`. A namespace that does not exist is no
        error here: see `check_namespace`.
        """
        with self._used(what, "data") as held:
            yield self._ioctx(held, pool, namespace)

    def check_namespace(self, pool: str, namespace: str) -> None:
        """Raise CephNamespaceMissing if images cannot be made there: to RADOS a namespace is only a prefix."""
        if not namespace:
            return
        with self.pool(pool, namespace, f"cannot look for the namespace {namespace}") as ioctx:
            if not self._binding.images.namespace_exists(ioctx, namespace):
                raise errors.NotReady.named(
                    "CephNamespaceMissing",
                    f"the Ceph pool {pool!r} has no namespace {namespace!r}",
                    why="the settings or the volume name it",
                    hint="correct the name, or have an administrator make it: `rbd namespace create`",
                )

    def command(self, prefix: str, **arguments: object) -> bytes:
        """A command to the monitors, with JSON as output. Raises as `cluster`."""
        words = json.dumps({"prefix": prefix, "format": "json", **arguments})
        what = f"cannot run `ceph {prefix}`"
        with self.cluster(what) as cluster:
            number, output, _ = cluster.mon_command(words, b"")
        if number:
            raise self._translated(abs(number), what, "monitors")
        return output

    @contextmanager
    def endable(self) -> Iterator[Callable[[], str]]:
        """What ends all calls of the client that makes this thread's, wherever they are: any thread may call it while
        the block runs. The client is blocklisted, and no OSD that it asks from then on carries out a step of it; the
        next call connects again. It returns the client's address, and raises as `command` does. What fails in the
        block is not translated.
        """
        held = self._taken(_CANNOT_END)

        def end() -> str:
            try:
                address = held.cluster.get_addrs()
                self._blocklist(held, (address,))
            except self._binding.failures as err:
                raise self._translated(failures.errno_of(err), _CANNOT_END, "monitors") from err
            held.is_blocklisted = True
            return address

        try:
            yield end
        finally:
            self._given_back(held)

    def blocklist(self, addresses: Iterable[str]) -> None:
        """Cut clients off for ten years, and wait until this client has the map that says so.

        Every OSD that is asked by a client with this map, or a newer one, refuses from then on what comes from these
        addresses, also what was sent before. Raises `CephNotPermitted`, `CephMonitorsUnreachable`.
        """
        with self._used("cannot blocklist a client", "monitors") as held:
            self._blocklist(held, addresses)

    def _blocklist(self, held: _Open, addresses: Iterable[str]) -> None:
        for address in addresses:
            held.cluster.blocklist_add(address, EXPIRY_S)
        self._wait_for_map(held)

    def _wait_for_map(self, held: _Open) -> None:
        """Wait as long as for any answer of the monitors. librados has no limit for it: its call is left to a thread,
        and keeps the connection.
        """
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                held.cluster.wait_for_latest_osdmap()
                outcome.put(None)
            except BaseException as err:
                outcome.put(err)
            finally:
                self._given_back(held)

        with self._guard:
            held.calls += 1
        threading.Thread(target=wait, name="ceph-map", daemon=True).start()
        try:
            failure = outcome.get(timeout=self._timeouts.monitors_s)
        except queue.Empty:
            raise failures.CephMonitorsUnreachable(self.who.monitors) from None
        if failure is not None:
            raise failure

    def fsid(self) -> str:
        """The cluster's id."""
        with self.cluster("cannot read the cluster's id") as cluster:
            return cluster.get_fsid()

    def address(self) -> str:
        """This client's own address in the cluster, as the blocklist has it."""
        with self.cluster("cannot read the client's address") as cluster:
            return cluster.get_addrs()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Refuse new calls, wait for those that run, give the pool's lock back, and disconnect; after `limit_s` the
        last of them disconnects. The lock stays with a client of which a call may still be carried out. Idempotent;
        a forked child's is nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._opening, self._guard:  # nobody connects meanwhile
            self._is_closed = True
            held = self._open
        with self._guard:
            is_idle = self._guard.wait_for(lambda: held is None or held.calls == 0, limit_s)
            self._open = None
            if held is not None:
                held.is_left = not is_idle
        if held is not None and is_idle:
            self._give_lock_back(held)
            _shut_down(held)

    def _give_lock_back(self, held: _Open) -> None:
        """What fails is left: the next controller then cuts this client off."""
        if self.controller_lock is None or held.is_blocklisted or held.is_in_doubt:
            return
        with suppress(*self._binding.failures, errors.CrustError):
            self.controller_lock.give_back(
                self._ioctx(held, self.controller_lock.pool, self.controller_lock.namespace)
            )

    def rest(self) -> None:
        """Disconnect, unless a call runs; the next call connects again."""
        with self._opening, self._guard:
            held = self._open
            if held is None or held.calls:
                return
            self._open = None
        _shut_down(held)

    def reopen(self) -> None:
        """Take calls again after a `close`."""
        with self._guard:
            self._is_closed = False

    @contextmanager
    def _used(self, what: str, step: Step) -> Iterator[_Open]:
        held = self._taken(what)
        try:
            yield held
        except self._binding.failures as err:
            raise self._failed(held, err, what, step) from err
        finally:
            self._given_back(held)

    def _failed(
        self, held: _Open, failure: BaseException, what: str, step: Step
    ) -> errors.CrustError:
        """The error for a failed call of this client, and what it says of the client."""
        number = failures.errno_of(failure)
        if number == errno.ESHUTDOWN:
            held.is_blocklisted = True
            return failures.CephClientBlocklisted(self.who.user, held.cluster.get_addrs())
        held.is_in_doubt |= failures.is_unanswered(number)
        return self._translated(number, what, step)

    def _taken(self, what: str) -> _Open:
        if os.getpid() != self._pid:
            raise CephConnectionClosed()
        tries = self._tries
        # one thread connects, and the others share its outcome: each would wait as long
        with self._opening:
            if self._tries != tries and self._failure is not None:
                raise self._failure
            with self._guard:
                if self._is_closed:
                    raise CephConnectionClosed()
                if self._open is not None and not self._open.is_blocklisted:
                    self._open.calls += 1
                    return self._open
                old, self._open = self._open, None
                is_idle = old is not None and old.calls == 0  # in one step with taking it out
                if old is not None:
                    old.is_left = not is_idle
            if old is not None and is_idle:  # else the last of its calls shuts it down
                _shut_down(old)
            return self._first(what)

    def _first(self, what: str) -> _Open:
        """A new connection, for its first call."""
        try:
            held = self._admitted(_Open(self._connected(what), calls=1), what)
        except errors.CrustError as err:
            self._failure = err
            raise
        else:
            self._failure = None
        finally:
            self._tries += 1
        with self._guard:
            self._open = held
        return held

    def _admitted(self, held: _Open, what: str) -> _Open:
        """The client, when the pool's lock has its address. Raises `ControllerReplaced`."""
        if self.controller_lock is None:
            return held
        is_admitted = False
        try:
            ioctx = self._ioctx(held, self.controller_lock.pool, self.controller_lock.namespace)
            address = held.cluster.get_addrs()
            self.controller_lock.admit(ioctx, address, lambda dead: self._blocklist(held, (dead,)))
            is_admitted = True
        except self._binding.failures as err:
            raise self._failed(held, err, what, "data") from err
        finally:
            if not is_admitted:
                held.is_left = True  # a wait for the map may still use it
                self._given_back(held)
        return held

    def _given_back(self, held: _Open) -> None:
        with self._guard:
            held.calls -= 1
            is_last = held.calls == 0
            is_left = held.is_left
            self._guard.notify_all()
        if is_last and is_left:
            _shut_down(held)

    def _connected(self, what: str) -> binding.Rados:
        try:
            cluster = self._binding.connection(self.who.user, self.who.options(self._timeouts))
            try:
                cluster.connect()
            except BaseException:
                with suppress(*self._binding.failures):
                    cluster.shutdown()
                raise
        except self._binding.failures as err:
            raise self._translated(failures.errno_of(err), what, "connect") from err
        return cluster

    def _ioctx(self, held: _Open, pool: str, namespace: str) -> binding.Ioctx:
        try:
            number = held.cluster.pool_lookup(pool)
            if number is None:
                raise self._translated(errno.ENOENT, f"cannot open the pool {pool}", "pool", pool)
            with self._guard:
                found = held.pools.get((number, namespace))
            if found is not None:
                return found
            made = held.cluster.open_ioctx2(number)
        except self._binding.failures as err:
            raise self._translated(
                failures.errno_of(err), f"cannot open the pool {pool}", "pool", pool
            ) from err
        made.set_namespace(namespace)
        # Deletes must work on a full pool, and others fail with its quota instead of waiting for it.
        made.set_osdmap_full_try()
        with self._guard:
            found = held.pools.setdefault((number, namespace), made)
        if found is not made:
            made.close()
        return found

    def _translated(self, number: int, what: str, step: Step, pool: str = "") -> errors.CrustError:
        who = self.who
        return failures.translated(
            number, what, step=step, user=who.user, monitors=who.monitors, pool=pool
        )


def _shut_down(held: _Open) -> None:
    """Pools first: a call on one after the cluster's shutdown is a segmentation fault."""
    for pool in held.pools.values():
        pool.close()
    held.pools.clear()
    held.cluster.shutdown()
