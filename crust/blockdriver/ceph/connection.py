"""One connection to a Ceph cluster for a process and a user. Every method blocks: call it on a thread.

Rules that librados does not enforce, and that cost the process otherwise:

- A call after the cluster's shutdown is a segmentation fault. So `close` refuses new calls and waits for the running
  ones, which are counted, then closes the pools and the cluster, in this order.
- A connection does not survive a fork: it hangs in the child. After a change of the process id all calls are refused.
- `connect(timeout=)` has no effect, only the option `client_mount_timeout`. All three timeouts are always set.

A blocklisted client stays so for ever: librbd of another client blocklists a client that slept for 30 s. The next
call replaces it; if an administrator cut off the host's address, the new client fails again. A controller's new
client serves only after the pool's lock has its address (`crust.blockdriver.ceph.controller_lock`).
"""

import errno
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from crust.blockdriver.ceph import binding
from crust.blockdriver.ceph.controller_lock import ControllerLock
from crust.blockdriver.ceph.user import CephUser, Timeouts
from crust.core import errors

_log = logging.getLogger(__name__)

EXPIRY_S = 315_360_000
"""The expiry of an entry in the blocklist, ten years: it must not end while the client's process may live."""
_CANNOT_END = "cannot end this client's calls"
CLOSE_S = 20.0
"""Two steps of the data, each with its timeout."""


@dataclass(slots=True)
class _Client:
    cluster: binding.Rados
    pools: dict[tuple[int, str], binding.Ioctx] = field(default_factory=dict)
    """By number and namespace: a new pool of the same name has another number."""
    calls: int = 0
    is_blocklisted: bool = False
    is_in_doubt: bool = False
    """One of its calls ended without an answer: it may still be carried out."""
    is_left: bool = False
    """The last of its calls shuts it down."""


@dataclass(eq=False)
class Connection:
    """The connection of one user, opened at the first call. Safe from any thread. Raises `CephBindingMissing`."""

    ceph_user: CephUser
    _timeouts: Timeouts = field(default_factory=Timeouts)
    controller_lock: ControllerLock | None = field(default=None, init=False)
    """A controller's lock, which admits each new client."""
    _binding: binding.Binding = field(default_factory=binding.load, init=False)
    _guard: threading.Condition = field(default_factory=threading.Condition, init=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False)
    _client: _Client | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)
    _tries: int = field(default=0, init=False)
    _failure: errors.CrustError | None = field(default=None, init=False)
    """The error of the last try to connect."""
    _pid: int = field(default_factory=os.getpid, init=False)

    @contextmanager
    def cluster(self, error_text: str) -> Iterator[binding.Rados]:
        """The cluster, for a call inside the block. `error_text`, "cannot …", begins the error's text.

        Raises `CephMonitorsUnreachable`, `CephKeyRefused`, `CephConnectionClosed`, `CephClientBlocklisted`, and the
        errors of `binding.translated`.
        """
        with self._used(error_text, "monitors") as client:
            yield client.cluster

    @contextmanager
    def pool(self, pool: str, namespace: str, error_text: str) -> Iterator[binding.Ioctx]:
        """A pool's namespace, for calls that begin and end inside the block; images are closed in it.

        Raises `CephPoolMissing`, CephNotAnswering and others as `cluster`. A namespace that does not exist is no
        error here: see `check_namespace`.
        """
        with self._used(error_text, "data") as client:
            yield self._ioctx(client, pool, namespace)

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
                )

    def command(self, prefix: str, **arguments: object) -> bytes:
        """A command to the monitors, with JSON as output. Raises as `cluster`."""
        words = json.dumps({"prefix": prefix, "format": "json", **arguments})
        error_text = f"cannot run `ceph {prefix}`"
        with self.cluster(error_text) as cluster:
            number, output, _ = cluster.mon_command(words, b"")
        if number:
            raise self._translated(abs(number), error_text, "monitors")
        return output

    @contextmanager
    def endable(self) -> Iterator[Callable[[], str]]:
        """A function that ends all calls of this thread's client: any thread may call it while the block runs.

        It blocklists the client, so no OSD carries out a further step of it; the next call connects again. It returns
        the client's address, and raises as `command`. Errors in the block are not translated.
        """
        client = self._taken(_CANNOT_END)

        def end() -> str:
            try:
                address = client.cluster.get_addrs()
                self._blocklist(client, (address,))
            except self._binding.failures as err:
                raise self._translated(binding.errno_of(err), _CANNOT_END, "monitors") from err
            client.is_blocklisted = True
            return address

        try:
            yield end
        finally:
            self._given_back(client)

    def blocklist(self, addresses: Iterable[str]) -> None:
        """Cut clients off for ten years, and wait until this client has the map with their addresses.

        After a call of a client with this map, or a newer one, an OSD refuses all requests from these addresses, even
        older ones. Raises `CephNotPermitted`, `CephMonitorsUnreachable`.
        """
        with self._used("cannot blocklist a client", "monitors") as client:
            self._blocklist(client, addresses)

    def _blocklist(self, client: _Client, addresses: Iterable[str]) -> None:
        for address in addresses:
            client.cluster.blocklist_add(address, EXPIRY_S)
        # librados has no limit for the wait: a thread makes the call, and keeps the connection
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def wait() -> None:
            try:
                client.cluster.wait_for_latest_osdmap()
                outcome.put(None)
            except BaseException as err:
                outcome.put(err)
            finally:
                self._given_back(client)

        with self._guard:
            client.calls += 1
        threading.Thread(target=wait, name="ceph-map", daemon=True).start()
        try:
            failure = outcome.get(timeout=self._timeouts.monitors_s)
        except queue.Empty:
            raise binding.CephMonitorsUnreachable(self.ceph_user.monitors) from None
        if failure is not None:
            raise failure

    def fsid(self) -> str:
        with self.cluster("cannot read the cluster's id") as cluster:
            return cluster.get_fsid()

    def address(self) -> str:
        """This client's own address in the cluster, in the form of the blocklist."""
        with self.cluster("cannot read the client's address") as cluster:
            return cluster.get_addrs()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Refuse new calls, wait for running ones, give the pool's lock back, and disconnect.

        After `limit_s` the last call disconnects. The lock stays while a call may still be carried out. Idempotent;
        without effect in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._opening, self._guard:  # nobody connects meanwhile
            self._is_closed = True
            client = self._client
        with self._guard:
            is_idle = self._guard.wait_for(lambda: client is None or client.calls == 0, limit_s)
            self._client = None
            if client is not None:
                client.is_left = not is_idle
        if client is None or not is_idle:
            return
        lock = self.controller_lock
        if lock is not None and not client.is_blocklisted and not client.is_in_doubt:
            try:
                lock.give_back(self._ioctx(client, lock.pool, lock.namespace))
            except (*self._binding.failures, errors.CrustError) as err:
                # the next controller cuts this client off
                _log.warning("the pool's lock is not given back", extra={"error": err})
        _shut_down(client)

    def rest(self) -> None:
        """Disconnect, unless a call runs; the next call connects again."""
        with self._opening, self._guard:
            client = self._client
            if client is None or client.calls:
                return
            self._client = None
        _shut_down(client)

    def reopen(self) -> None:
        """Take calls again after a `close`."""
        with self._guard:
            self._is_closed = False

    @contextmanager
    def _used(self, error_text: str, step: binding.Step) -> Iterator[_Client]:
        client = self._taken(error_text)
        try:
            yield client
        except self._binding.failures as err:
            raise self._failed(client, err, error_text, step) from err
        finally:
            self._given_back(client)

    def _failed(
        self, client: _Client, failure: BaseException, error_text: str, step: binding.Step
    ) -> errors.CrustError:
        """The error for a failed call, after a note of its meaning for the client."""
        number = binding.errno_of(failure)
        if number == errno.ESHUTDOWN:
            client.is_blocklisted = True
            return binding.CephClientBlocklisted(self.ceph_user.user, client.cluster.get_addrs())
        client.is_in_doubt |= number in binding.UNANSWERED
        return self._translated(number, error_text, step)

    def _taken(self, error_text: str) -> _Client:
        if os.getpid() != self._pid:
            raise binding.CephConnectionClosed()
        tries = self._tries
        # one thread connects, and the others share its outcome: each would wait as long
        with self._opening:
            if self._tries != tries and self._failure is not None:
                raise self._failure
            with self._guard:
                if self._is_closed:
                    raise binding.CephConnectionClosed()
                if self._client is not None and not self._client.is_blocklisted:
                    self._client.calls += 1
                    return self._client
                old, self._client = self._client, None
                is_idle = old is not None and old.calls == 0  # in one step with taking it out
                if old is not None:
                    old.is_left = not is_idle
            if old is not None and is_idle:  # else the last of its calls shuts it down
                _shut_down(old)
            return self._first(error_text)

    def _first(self, error_text: str) -> _Client:
        try:
            client = self._admitted(_Client(self._connected(error_text), calls=1), error_text)
        except errors.CrustError as err:
            self._failure = err
            raise
        else:
            self._failure = None
        finally:
            self._tries += 1
        with self._guard:
            self._client = client
        return client

    def _admitted(self, client: _Client, error_text: str) -> _Client:
        """The client, after the pool's lock has its address. Raises `ControllerReplaced`."""
        if self.controller_lock is None:
            return client
        is_admitted = False
        try:
            ioctx = self._ioctx(client, self.controller_lock.pool, self.controller_lock.namespace)
            address = client.cluster.get_addrs()
            self.controller_lock.admit(ioctx, address, lambda old: self._blocklist(client, (old,)))
            is_admitted = True
        except self._binding.failures as err:
            raise self._failed(client, err, error_text, "data") from err
        finally:
            if not is_admitted:
                client.is_left = True  # a wait for the map may still use it
                self._given_back(client)
        return client

    def _given_back(self, client: _Client) -> None:
        with self._guard:
            client.calls -= 1
            is_last = client.calls == 0
            is_left = client.is_left
            self._guard.notify_all()
        if is_last and is_left:
            _shut_down(client)

    def _connected(self, error_text: str) -> binding.Rados:
        try:
            options = self.ceph_user.options(self._timeouts)
            cluster = self._binding.connection(self.ceph_user.user, options)
            try:
                cluster.connect()
            except BaseException:
                with suppress(*self._binding.failures):
                    cluster.shutdown()
                raise
        except self._binding.failures as err:
            raise self._translated(binding.errno_of(err), error_text, "connect") from err
        return cluster

    def _ioctx(self, client: _Client, pool: str, namespace: str) -> binding.Ioctx:
        error_text = f"cannot open the pool {pool}"
        try:
            number = client.cluster.pool_lookup(pool)
            if number is None:
                raise self._translated(errno.ENOENT, error_text, "pool", pool)
            with self._guard:
                present = client.pools.get((number, namespace))
            if present is not None:
                return present
            ioctx = client.cluster.open_ioctx2(number)
        except self._binding.failures as err:
            raise self._translated(binding.errno_of(err), error_text, "pool", pool) from err
        ioctx.set_namespace(namespace)
        # Deletes must work on a full pool, and others fail with its quota instead of waiting for it.
        ioctx.set_osdmap_full_try()
        with self._guard:
            present = client.pools.setdefault((number, namespace), ioctx)
        if present is not ioctx:
            ioctx.close()
        return present

    def _translated(
        self, number: int, error_text: str, step: binding.Step, pool: str = ""
    ) -> errors.CrustError:
        user = self.ceph_user
        return binding.translated(
            number, error_text, step=step, user=user.user, monitors=user.monitors, pool=pool
        )


def _shut_down(client: _Client) -> None:
    """Close the pools first: a call on a pool after the cluster's shutdown is a segmentation fault."""
    for pool in client.pools.values():
        pool.close()
    client.pools.clear()
    client.cluster.shutdown()
