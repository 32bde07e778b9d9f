"""A registry on the loopback interface, from which containerd pulls the images of an OCI layout.

It answers for each name of `tags`, whatever registry the name is of: containerd is told to ask it instead of all
others. OCI Distribution Specification 1.1, "Pull": manifests by tag or digest, blobs by digest.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_TAG = "org.opencontainers.image.ref.name"
_TYPES = {
    "manifests": "application/vnd.oci.image.manifest.v1+json",
    "blobs": "application/octet-stream",
}


@contextmanager
def serving(layout: Path, tags: Mapping[str, str]) -> Iterator[str]:
    """Its URL while the block runs. `tags`: by `repository:tag` without the registry, the tag in the layout."""
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    digests = {item["annotations"][_TAG]: item["digest"] for item in index["manifests"]}
    manifests = {name: digests[tag] for name, tag in tags.items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

        def _answer(self, *, with_body: bool) -> None:
            name, _, reference = self.path.partition("?")[0].removeprefix("/v2/").rpartition("/")
            repository, _, kind = name.rpartition("/")
            digest = manifests.get(f"{repository}:{reference}", reference)
            blob = layout / "blobs" / digest.replace(":", "/", 1)
            if not digest.startswith("sha256:") or not blob.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Type", _TYPES[kind])
            self.send_header("Content-Length", str(blob.stat().st_size))
            self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if with_body:
                with blob.open("rb") as file:
                    self.wfile.write(file.read())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
