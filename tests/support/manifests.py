"""The objects of a directory of manifests: as the command makes it, and as kubectl renders the overlays."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from crust.cli.main import main
from tests.support.third_party import kustomize

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"

POD = """
metrics_address = "0.0.0.0:9810"
[proxy]
plugins_registry = "/var/lib/kubelet/plugins_registry"
"""

WRAPPED = (KUBERNETES / "overlays/wrapped-driver/node.toml").read_text(encoding="utf-8")
Objects = dict[tuple[str, str], dict[str, Any]]


def run(directory: Path, *flags: str) -> Result:
    """`crust driver manifest` into a directory."""
    words = ["driver", "manifest", *flags, str(directory)]
    return CliRunner().invoke(main, words, catch_exceptions=False)


def made(*flags: str) -> Objects:
    """The objects of the directory that the command writes."""
    with tempfile.TemporaryDirectory() as directory:
        result = run(Path(directory), *flags)
        assert result.exit_code == 0, result.output
        return by_name(kustomize.render(Path(directory)))


def by_name(manifests: Any) -> Objects:
    """The objects by kind and name."""
    return {(item["kind"], item["metadata"]["name"]): unordered(item) for item in manifests}


def unordered(value: Any) -> Any:
    """Lists of named things in the order of their names, and kinds that kustomize does not know without namespace."""
    if isinstance(value, dict):
        fields = {key: unordered(field) for key, field in value.items()}
        if "Class" in str(fields.get("kind")) and isinstance(fields.get("metadata"), dict):
            fields["metadata"].pop("namespace", None)
        return fields
    if isinstance(value, list) and all(isinstance(member, dict) for member in value):
        return sorted(map(unordered, value), key=lambda member: member.get("name") or str(member))
    return value


@functools.cache
def rendered(overlay: str) -> Objects:
    """The objects of an overlay of deploy/kubernetes."""
    return by_name(kustomize.render(KUBERNETES / "overlays" / overlay))


def config(tmp_path: Path, text: str) -> str:
    """Settings as a file; the flag that names it."""
    path = tmp_path / "node.toml"
    path.write_text(text)
    return f"--config={path}"
