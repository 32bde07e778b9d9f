"""A Kubernetes API server: get, list with a field selector and pages, and watch, of objects of any kind.

It answers over real HTTP, from a thread, in the shapes that the real one has (tests/data/kubernetes): objects have
UIDs and resource versions, an empty list is null, a list has the version that a watch continues from, a watch from a
version that is compacted away gets an ERROR event with 410, and an object that is not there is a Status with 404 and
its name. `faults` decides how it fails.
"""

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from crust.proxy.settings import KubernetesSettings

NODE = "node-a"
TOKEN = "fake-token-of-the-tests"
_RECORDED = Path(__file__).parents[2] / "data" / "kubernetes"


@dataclasses.dataclass
class ServerFaults:
    """How the server fails."""

    status: int = 0
    """Every request gets this HTTP status; 0: none."""
    hangs: threading.Event | None = None
    """No request is answered before it is set."""
    lagging: bool = False
    """Gets of pods answer from an old state: what was created since is not there."""


@dataclasses.dataclass
class _Event:
    version: int
    collection: str
    kind: str
    item: dict[str, Any]


class FakeKubernetes:
    """The server's state. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.faults = ServerFaults()
        self.requests: list[str] = []
        self.listed: dict[str, str] = {}
        """The resourceVersion that the last list of a collection asked for; empty: the newest state."""
        self.verbs: set[tuple[str, str, str]] = set()
        """What a role must allow: group, resource and verb of each request."""
        self.watches = threading.Semaphore(0)
        """Released once for each watch of pods that begins."""
        self.arrivals = threading.Semaphore(0)
        """Released once for each request."""
        self._changed = threading.Condition()
        self._version = 100
        self._compacted = 0
        self._objects: dict[str, dict[str, dict[str, Any]]] = {}
        self._old: dict[str, dict[str, dict[str, Any]]] = {}
        self._events: list[_Event] = []
        self._watched: dict[str, int] = {}
        self._closed = False
        self._generation = 0

    def note(self, path: str, query: dict[str, list[str]]) -> None:
        self.requests.append(path)
        collection, _, name = _parsed(path)
        parts = path.strip("/").split("/")
        verb = "get" if name else "watch" if "watch" in query else "list"
        if verb == "list":
            self.listed[collection] = query.get("resourceVersion", [""])[0]
        self.verbs.add(("" if parts[0] == "api" else parts[1], collection, verb))
        self.arrivals.release()

    def add_class(self, name: str, handler: str) -> None:
        self.add_object("runtimeclasses", name, handler=handler)

    def add_pod(self, name: str, uid: str, runtime_class: str = "", **fields: Any) -> None:
        """Create a pod, or replace one of the same name."""
        spec: dict[str, Any] = {"nodeName": NODE, "containers": [], **fields}
        if runtime_class:
            spec["runtimeClassName"] = runtime_class
        self.add({"kind": "Pod", "metadata": _pod_metadata(name, uid), "spec": spec}, "pods")

    def add_object(self, collection: str, name: str, **content: Any) -> None:
        """Create or replace an object of another kind; `collection` is its plural, e.g. "csinodes"."""
        self.add({"metadata": {"name": name}, **content}, collection)

    def add(self, item: dict[str, Any], collection: str) -> None:
        """Create or replace an object; it gets the next version."""
        with self._changed:
            if not self.faults.lagging and collection == "pods":
                self._old = {kind: dict(objects) for kind, objects in self._objects.items()}
            self._version += 1
            metadata = {**item["metadata"], "resourceVersion": str(self._version)}
            item = {**item, "metadata": metadata}
            self._objects.setdefault(collection, {})[_key(metadata)] = item
            self._note_change("ADDED", collection, item)

    def remove_object(self, collection: str, name: str) -> None:
        with self._changed:
            self._version += 1
            item = self._objects[collection].pop(_key({"name": name}))
            self._note_change("DELETED", collection, item)

    def _note_change(self, kind: str, collection: str, item: dict[str, Any]) -> None:
        self._events.append(_Event(self._version, collection, kind, item))
        self._changed.notify_all()

    def compact(self) -> None:
        """Forget the events so far, and end the watches: they continue from a version that is gone."""
        with self._changed:
            self._version += 1
            self._compacted = self._version
            self._events.clear()
            self._generation += 1
            self._changed.notify_all()

    def wait_for_watch(self, collection: str) -> None:
        """Until a watch of the collection is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched.get(collection, 0) > 0)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """The status and body of a get or list. A kind that has no objects is an empty list."""
        collection, namespace, name = _parsed(path)
        with self._changed:
            if name:
                lags = self.faults.lagging and collection == "pods"
                objects = self._old if lags else self._objects
                key = _key({"name": name, "namespace": namespace})
                return _found(objects.get(collection, {}).get(key), collection, name)
            selector = query.get("fieldSelector", [""])[0]
            items = [
                item
                for item in self._objects.get(collection, {}).values()
                if _is_selected(item, selector)
            ]
            begin = int(query.get("continue", ["0"])[0])
            end = begin + int(query.get("limit", ["500"])[0])
            metadata = {"resourceVersion": str(self._version)}
            if end < len(items):
                metadata["continue"] = str(end)
            return 200, {"metadata": metadata, "items": items[begin:end] or None}

    def events(self, path: str, since: int) -> Iterator[dict[str, Any]]:
        """The events of a watch, until it ends."""
        collection, _, _ = _parsed(path)
        with self._changed:
            generation = self._generation
            if since < self._compacted:
                yield {"type": "ERROR", "object": recorded("status-gone")}
                return
            self._watched[collection] = self._watched.get(collection, 0) + 1
            self._changed.notify_all()
        if collection == "pods":
            self.watches.release()
        yield recorded("watch-bookmark")
        while True:
            fresh = self._after(since, generation)
            if not fresh:
                break
            for event in fresh:
                since = event.version
                if event.collection == collection:
                    yield {"type": event.kind, "object": event.item}
        with self._changed:
            self._watched[collection] -= 1

    def _after(self, since: int, generation: int) -> list[_Event]:
        """The next events, waited for; none if the watch ends."""
        with self._changed:
            while not self._closed and generation == self._generation:
                fresh = [event for event in self._events if event.version > since]
                if fresh:
                    return fresh
                self._changed.wait()
        return []


def recorded(name: str) -> dict[str, Any]:
    """An object as Go's types write it, from tests/data/kubernetes."""
    item: dict[str, Any] = json.loads(_text(name))
    return item


@functools.cache
def _text(name: str) -> str:
    return (_RECORDED / f"{name}.json").read_text()


def _pod_metadata(name: str, uid: str) -> dict[str, str]:
    return {"name": name, "namespace": "default", "uid": uid}


def _key(metadata: dict[str, Any]) -> str:
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def _parsed(path: str) -> tuple[str, str, str]:
    """The plural, the namespace and the name in the path of a request."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = parts[1] if parts[0] == "namespaces" else ""
    if namespace:
        parts = parts[2:]
    return parts[0], namespace, parts[1] if len(parts) > 1 else ""


def _is_selected(item: dict[str, Any], selector: str) -> bool:
    if not selector:
        return True
    return bool(item["spec"]["nodeName"] == selector.removeprefix("spec.nodeName="))


def _found(item: dict[str, Any] | None, collection: str, name: str) -> tuple[int, dict[str, Any]]:
    if item is not None:
        return 200, item
    message = f'{collection} "{name}" not found'
    return 404, _refusal(404, "NotFound", message, {"name": name, "kind": collection})


def _refusal(code: int, reason: str, message: str, details: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "details": details,
        "code": code,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: FakeKubernetes

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        url = urlparse(self.path)
        faults = self.api.faults
        query = parse_qs(url.query)
        self.api.note(url.path, query)
        if faults.hangs is not None:
            faults.hangs.wait()
        if faults.status or self.headers["Authorization"] != f"Bearer {TOKEN}":
            code = faults.status or 401
            self._send(code, _refusal(code, "", "not now", {}))
            return
        if "watch" in query:
            self._stream(url.path, int(query["resourceVersion"][0]))
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

    def _stream(self, path: str, since: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            for event in self.api.events(path, since):
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
