"""Connections to a real cluster: what fails, how it is named, and that it never takes the process with it."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from crust.blockdriver.ceph import binding
from crust.blockdriver.ceph import connection as connection_module
from crust.blockdriver.ceph.binding import (
    CephConnectionClosed,
    CephKeyRefused,
    CephMonitorsUnreachable,
)
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.integration.ceph.conftest import QUICK
from tests.support.raised import raised


def _write(connection: Connection, namespace: str, data: bytes = b"x") -> None:
    with connection.pool(POOL, namespace, "cannot write") as ioctx:
        ioctx.write_full("object", data)


def _other_key(key: str) -> str:
    middle = len(key) // 2
    return key[:middle] + ("A" if key[middle] != "A" else "B") + key[middle + 1 :]


@pytest.mark.parametrize("is_key", [True, False])
def test_wrong_key_and_malformed_key_are_refused_at_once(
    controller: CephUser, namespace: str, *, is_key: bool
) -> None:
    wrong = _other_key(controller.key) if is_key else "no key"
    user = CephUser(controller.monitors, controller.user, wrong)
    with pytest.raises(CephKeyRefused) as caught:
        _write(Connection(user, QUICK), namespace)
    assert wrong not in str(caught.value)


def test_key_is_not_shown(controller: CephUser) -> None:
    assert controller.key not in repr(controller)


@pytest.mark.parametrize("monitors", ["127.0.0.1:6789", "", "v3:127.0.0.1:1", "[v2:h:1", "v2:h"])
def test_monitors_without_protocol_are_refused(monitors: str) -> None:
    with raised("MonitorsInvalid"):
        CephUser(monitors, "user", "key")


def test_monitors_frozen_before_first_call_are_unreachable_for_all_callers(
    ceph: CephCluster, controller: CephUser, namespace: str
) -> None:
    """All waiters share one try: each after the other would take a minute, and a thread each."""
    connection = Connection(controller, QUICK)
    tries: list[int] = []
    original = connection._connected

    def counted(failure: str) -> object:
        tries.append(1)
        return original(failure)

    connection._connected = counted  # type: ignore[method-assign, assignment]
    with ceph.mon.frozen(), ThreadPoolExecutor(8) as threads:
        writes = [threads.submit(_write, connection, namespace) for _ in range(8)]
        for write in writes:
            assert isinstance(write.exception(), CephMonitorsUnreachable)
    assert len(tries) < 8
    _write(connection, namespace)
    connection.close()


def test_monitors_that_freeze_later_fail_only_what_asks_them(
    ceph: CephCluster, connection: Connection, namespace: str
) -> None:
    _write(connection, namespace)
    with ceph.mon.frozen():
        _write(connection, namespace)
        with pytest.raises(CephMonitorsUnreachable):
            connection.command("osd dump")
    connection.command("osd dump")


class Watched:
    """librados, whose calls are noted; `blocks` keeps the wait for the map from ending."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.called: list[str] = []
        self.blocks: threading.Event | None = None

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.inner, name)

    def wait_for_latest_osdmap(self) -> None:
        self.called.append("wait_for_latest_osdmap")
        if self.blocks is not None:
            self.blocks.wait()
        self.inner.wait_for_latest_osdmap()


@pytest.fixture
def watched(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = connection._binding.connection(
        connection.ceph_user.user, connection.ceph_user.options(QUICK)
    )
    observed = Watched(made)
    monkeypatch.setattr(binding.Binding, "connection", lambda *_: observed)
    return observed


def test_wait_for_map_has_monitors_time_and_connection_outlives_it(
    connection: Connection, watched: Watched, namespace: str
) -> None:
    """Nothing is shut down below a call that librados does not end."""
    watched.blocks = threading.Event()
    with pytest.raises(CephMonitorsUnreachable):
        connection.blocklist(["192.0.2.1:0/7"])
    connection.close(0)
    assert "shutdown" not in watched.called
    watched.blocks.set()
    connection.close()
    while "shutdown" not in watched.called:
        pass


def test_blocklisted_connection_is_shut_down_once_after_its_last_call(
    monkeypatch: pytest.MonkeyPatch, controller: CephUser
) -> None:
    """A second shutdown is a segmentation fault."""
    shut: list[str] = []
    connection = Connection(controller, QUICK)

    class Cluster:
        def __init__(self, name: str) -> None:
            self._name = name

        def shutdown(self) -> None:
            shut.append(self._name)

    made: Any = Cluster("old")
    old = connection_module._Client(made, calls=1, is_blocklisted=True)
    connection._client = old

    class Overtaken(threading.Condition):
        """The last call of `old` ends as soon as it was taken out."""

        def __exit__(self, *why: Any) -> None:
            super().__exit__(*why)
            if connection._client is None and old.calls:
                connection._given_back(old)

    monkeypatch.setattr(connection, "_guard", Overtaken())
    monkeypatch.setattr(connection, "_connected", lambda _what: Cluster("new"))
    connection._taken("test")
    assert shut == ["old"]


def test_close_waits_for_running_calls_alone(connection: Connection, namespace: str) -> None:
    entered, leave = threading.Event(), threading.Event()

    def held() -> int:
        with connection.pool(POOL, namespace, "cannot write") as ioctx:
            entered.set()
            leave.wait()
            ioctx.write_full("late", b"written")
            return ioctx.stat("late")[0]

    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(held)
        entered.wait()
        closing = threads.submit(connection.close)
        while not connection._is_closed:
            os.sched_yield()
        with pytest.raises(CephConnectionClosed):
            _write(connection, namespace)
        assert not closing.done()
        leave.set()
        assert running.result() == len(b"written")
        closing.result()
    connection.reopen()
    _write(connection, namespace)


def test_forked_child_connects_for_itself(connection: Connection, namespace: str) -> None:
    _write(connection, namespace)
    connection._pid += 1
    try:
        with pytest.raises(CephConnectionClosed):
            _write(connection, namespace)
    finally:
        connection._pid -= 1
