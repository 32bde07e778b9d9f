"""A Kubernetes API server that knows pods and RuntimeClasses: get, list with a field selector, watch.

It answers over real HTTP, from a thread, as the real one does: objects have UIDs and resource versions, a list has
the version that a watch continues from, a watch from a version that is compacted away gets an ERROR event with 410,
and an object that is not there is a Status with 404. `faults` decides how it fails.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from crust.settings.proxy import KubernetesSettings

NODE = "node-a"
TOKEN = "fake-token-of-the-tests"


@dataclasses.dataclass
class ServerFaults:
    """How the server fails."""

    status: int = 0
    """Every request gets this HTTP status; 0: none."""
    hangs: threading.Event | None = None
    """No request is answered before it is set."""
    lagging: bool = False
    """Gets answer from an old state: what was created since is not there."""


@dataclasses.dataclass
class _Event:
    version: int
    kind: str
    pod: dict[str, Any]


class FakeKubernetes:
    """The server's state. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.faults = ServerFaults()
        self.requests: list[str] = []
        self.watches = threading.Semaphore(0)
        """Released once for each watch that begins."""
        self.arrivals = threading.Semaphore(0)
        """Released once for each request."""
        self._changed = threading.Condition()
        self._version = 100
        self._compacted = 0
        self._pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._old: dict[tuple[str, str], dict[str, Any]] = {}
        self._objects: dict[str, dict[str, dict[str, Any]]] = {}
        self._classes: dict[str, dict[str, Any]] = {}
        self._events: list[_Event] = []
        self._closed = False
        self._generation = 0

    def note(self, path: str) -> None:
        """A request has arrived."""
        self.requests.append(path)
        self.arrivals.release()

    def add_class(self, name: str, handler: str) -> None:
        """Create a RuntimeClass."""
        self._classes[name] = {"metadata": {"name": name}, "handler": handler}

    def add_pod(self, name: str, uid: str, runtime_class: str = "", *, node: str = NODE) -> None:
        """Create a pod, or replace one of the same name."""
        spec: dict[str, Any] = {"nodeName": node, "containers": []}
        if runtime_class:
            spec["runtimeClassName"] = runtime_class
        with self._changed:
            if not self.faults.lagging:
                self._old = dict(self._pods)
            self._version += 1
            metadata = {
                "name": name,
                "namespace": "default",
                "uid": uid,
                "resourceVersion": str(self._version),
            }
            pod = {"kind": "Pod", "metadata": metadata, "spec": spec}
            self._pods["default", name] = pod
            self._events.append(_Event(self._version, "ADDED", pod))
            self._changed.notify_all()

    def add_object(self, collection: str, name: str, **content: Any) -> None:
        """Create or replace an object of another kind; `collection` is its plural, e.g. "csinodes"."""
        objects = self._objects.setdefault(collection, {})
        objects[name] = {"metadata": {"name": name, "resourceVersion": "1"}, **content}

    def remove_object(self, collection: str, name: str) -> None:
        """Delete it."""
        del self._objects[collection][name]

    def remove_pod(self, name: str) -> None:
        """Delete a pod."""
        with self._changed:
            self._version += 1
            pod = self._pods.pop(("default", name))
            self._events.append(_Event(self._version, "DELETED", pod))
            self._changed.notify_all()

    def compact(self) -> None:
        """Forget the events so far, and end the watches: they continue from a version that is gone."""
        with self._changed:
            self._version += 1
            self._compacted = self._version
            self._events.clear()
            self._generation += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the watches."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """The status and body of a get or list."""
        parts = path.strip("/").split("/")
        with self._changed:
            pods = self._old if self.faults.lagging else self._pods
            if parts[:2] == ["api", "v1"] and parts[-1] == "pods":
                wanted = query.get("fieldSelector", [""])[0].removeprefix("spec.nodeName=")
                items = [each for each in self._pods.values() if each["spec"]["nodeName"] == wanted]
                metadata = {"resourceVersion": str(self._version)}
                return 200, {"kind": "PodList", "metadata": metadata, "items": items}
            if parts[:3] == ["api", "v1", "namespaces"] and parts[4] == "pods":
                return _found(pods.get((parts[3], parts[5])), f"pods {parts[5]!r}")
            if parts[-1] == "runtimeclasses":
                listed = list(self._classes.values())
                return 200, {"metadata": {"resourceVersion": "1"}, "items": listed}
            if parts[-1] in self._objects:
                listed = list(self._objects[parts[-1]].values())
                return 200, {"metadata": {"resourceVersion": "1"}, "items": listed}
            if parts[-2] in self._objects:
                return _found(self._objects[parts[-2]].get(parts[-1]), parts[-1])
            if parts[0] == "apis" and parts[-2] == "runtimeclasses":
                return _found(self._classes.get(parts[-1]), f"runtimeclasses {parts[-1]!r}")
        return _found(None, path)

    def events(self, since: int) -> Iterator[dict[str, Any]]:
        """The events of a watch, until it ends."""
        with self._changed:
            generation = self._generation
            if since < self._compacted:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                yield {"type": "ERROR", "object": status}
                return
        self.watches.release()
        while True:
            fresh = self._after(since, generation)
            if not fresh:
                return
            for event in fresh:
                since = event.version
                yield {"type": event.kind, "object": event.pod}

    def _after(self, since: int, generation: int) -> list[_Event]:
        """The next events, waited for; none if the watch ends."""
        with self._changed:
            while not self._closed and generation == self._generation:
                fresh = [event for event in self._events if event.version > since]
                if fresh:
                    return fresh
                self._changed.wait()
        return []


def _found(what: dict[str, Any] | None, name: str) -> tuple[int, dict[str, Any]]:
    if what is None:
        return 404, {"kind": "Status", "code": 404, "message": f"{name} not found"}
    return 200, what


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeKubernetes

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        url = urlparse(self.path)
        faults = self.api.faults
        self.api.note(url.path)
        if faults.hangs is not None:
            faults.hangs.wait()
        if faults.status or self.headers["Authorization"] != f"Bearer {TOKEN}":
            code = faults.status or 401
            self._send(code, {"kind": "Status", "code": code, "message": "not now"})
            return
        query = parse_qs(url.query)
        if "watch" in query:
            self._stream(int(query["resourceVersion"][0]))
        else:
            self._send(*self.api.answer(url.path, query))

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        with contextlib.suppress(OSError):  # the client has gone
            self.end_headers()
            self.wfile.write(data)

    def _stream(self, since: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            for event in self.api.events(since):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def serving(api: FakeKubernetes, directory: Path) -> Iterator[str]:
    """Serve while the block runs; gives the path of a kubeconfig with a token."""
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield _kubeconfig(directory, f"http://127.0.0.1:{server.server_port}")
    finally:
        api.close()
        server.shutdown()
        server.server_close()
        thread.join()


def with_a_microvm() -> FakeKubernetes:
    """A server with the pod `vm`, whose RuntimeClass has the handler kata, and the pod `plain`, which has none."""
    api = FakeKubernetes()
    api.add_class("microvm", "kata")
    api.add_pod("vm", "uid-vm", "microvm")
    api.add_pod("plain", "uid-plain")
    return api


@contextlib.contextmanager
def asked_by_a_proxy(api: FakeKubernetes, directory: Path) -> Iterator[KubernetesSettings]:
    """Serve while the block runs; gives the settings of the node's proxy."""
    with serving(api, directory) as kubeconfig:
        yield KubernetesSettings(runtime_handlers=("kata",), kubeconfig=kubeconfig, node_name=NODE)


def _kubeconfig(directory: Path, address: str) -> str:
    path = directory / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": address}}],
        "users": [{"name": "it", "user": {"token": TOKEN}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }
    path.write_text(json.dumps(config))
    return str(path)
