"""The API server as a program in a pod asks it, with the token of the pod's service account. Of Python alone."""

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


class Api:
    """One API server."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._tls = ssl.create_default_context(cafile=_ACCOUNT / "ca.crt")

    def ask(self, method: str, path: str, body: Any = None, kind: str = "json") -> Any:
        """The answer; raises `urllib.error.HTTPError`."""
        token = (_ACCOUNT / "token").read_text(encoding="ascii")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://{self._host}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls) as answer:
            return json.loads(answer.read() or b"{}")

    def items(self, path: str) -> list[Any]:
        """All objects of a kind."""
        return list(self.ask("GET", path)["items"])

    def merge(self, path: str, change: Any) -> None:
        """Change an object."""
        self.ask("PATCH", path, change, "merge-patch+json")

    def wait_for_a_change(self, path: str, within_s: int) -> None:
        """Wait until an object of the kind changes, or as long as that."""
        version = self.ask("GET", f"{path}?limit=1")["metadata"]["resourceVersion"]
        query = urllib.parse.urlencode(
            {"watch": 1, "resourceVersion": version, "timeoutSeconds": within_s}
        )
        token = (_ACCOUNT / "token").read_text(encoding="ascii")
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"https://{self._host}{path}?{query}", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls) as answer:
            answer.readline()
