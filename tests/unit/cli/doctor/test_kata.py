"""`crust doctor` on a node with `crust kata`: its runtimes, and what containerd refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

import crust
from crust.cli.doctor import examine
from crust.cli.doctor.node import Finding, Level, Node
from crust.core import errors
from crust.inspection import views
from crust.inspection.views import ProxyAnswer

KATA = '[[runtimes]]\nname = "kata"\nconfiguration = "/opt/kata/configuration.toml"\n'
FIT = "[hypervisor.clh]\ndisable_block_device_use = false\nblock_device_driver = 'virtio-blk'\n"
UNIT = "etc/systemd/system/multi-user.target.wants/crust-kata.service"
NRI = '[plugins."io.containerd.nri.v1.nri"'
REQUIRED = f'{NRI}.default_validator]\nenable = true\nrequired_plugins = ["crust"]\n'


def _handlers(*names: str) -> ProxyAnswer:
    handlers = tuple(views.HandlerRow(name, "1", "/h", (), (), 0, None) for name in names)  # type: ignore[arg-type]
    return ProxyAnswer(crust.__version__, (), handlers, ())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node on which everything holds."""
    _write(tmp_path, "etc/crust/kata.toml", KATA)
    _write(tmp_path, "opt/kata/configuration.toml", FIT)
    _write(tmp_path, UNIT)
    _write(tmp_path, "etc/containerd/config.toml", REQUIRED)
    return _with_containerd(Node(root=tmp_path, proxy=_handlers("kata")), "v2.4.2")


def _write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def _with_containerd(node: Node, version: str) -> Node:
    version_line = f"containerd github.com/containerd/containerd/v2 {version} 7c2f3a9\n"
    return replace(node, version_of=lambda command: version_line if "containerd" in command else "")


def _found(node: Node, name: str) -> tuple[Finding, ...]:
    return examine.findings(node, (name,))


def _levels(node: Node, name: str) -> list[str]:
    return [finding.level.value for finding in _found(node, name)]


def test_node_with_all_layers_has_no_warning(node: Node) -> None:
    assert _levels(node, "kata") == ["ok"]
    assert _levels(node, "kata-engine") == ["ok", "ok", "ok"]


def test_node_without_crust_kata_is_not_looked_at(node: Node) -> None:
    (node.root / UNIT).unlink()
    (node.root / "opt/kata/configuration.toml").unlink()
    for name in ("kata", "kata-engine"):
        (finding,) = _found(node, name)
        assert (finding.level, "does not run here" in finding.what) == (Level.OK, True)


def test_containerd_that_cannot_be_run_is_not_absent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(node.root, "bin/containerd")
    monkeypatch.setenv("PATH", f"{node.root}/bin")
    (finding,) = _found(replace(node, version_of=Node().version_of), "kata-engine")
    assert (finding.level, "Permission denied" in finding.why) == (Level.ERROR, True)


def test_runtime_failing_preflight_is_named_with_file_key_and_value(node: Node) -> None:
    _write(node.root, "opt/kata/configuration.toml", "[hypervisor.clh]\n")
    (finding,) = _found(node, "kata")
    assert finding.level is Level.ERROR
    assert finding.what.startswith("runtime kata gets no volumes: [KataUnfit]")
    assert "/opt/kata/configuration.toml" in finding.what
    assert finding.todo == "set disable_block_device_use = false in [hypervisor.clh]"


def test_configuration_that_drops_flushes_of_guests_is_a_warning(node: Node) -> None:
    keys = "block_device_cache_set = true\nblock_device_cache_noflush = true\n"
    _write(node.root, "opt/kata/configuration.toml", FIT + keys)
    findings = _found(node, "kata")
    assert [finding.level.value for finding in findings] == ["warning", "ok"]
    assert "can lose what its guests have synced" in findings[0].what
    assert findings[0].todo == "set block_device_cache_noflush = false"


def test_runtime_that_is_not_registered_is_an_error(node: Node) -> None:
    (finding,) = _found(replace(node, proxy=_handlers("box")), "kata")
    assert (finding.level, "is not registered" in finding.what) == (Level.ERROR, True)
    away = errors.PeerUnavailable("the proxy is away")  # another check says that
    assert _levels(replace(node, proxy=away), "kata") == ["ok"]


@pytest.mark.parametrize(
    ("version", "levels", "says"),
    [
        ("1.6.20~ds1", ["error"], "has no NRI"),
        ("v1.7.30", ["error"], "takes no plugins"),
        ("v2.1.9", ["ok", "warning"], "skips a plugin"),
        ("v2.2.0", ["ok", "ok", "ok"], "no container starts"),
    ],
)
def test_layers_are_those_of_containerds_version(
    node: Node, version: str, levels: list[str], says: str
) -> None:
    findings = _found(_with_containerd(node, version), "kata-engine")
    assert [finding.level.value for finding in findings] == levels
    assert says in findings[-1].what


def test_disabled_nri_is_error_with_the_lines_to_add(node: Node) -> None:
    for line in ("disable = true", "disable_connections = true"):
        _write(node.root, "etc/containerd/config.toml", f"{NRI}]\n{line}\n")
        (finding,) = _found(node, "kata-engine")
        assert finding.level is Level.ERROR
        assert finding.todo.endswith("config.toml: disable = false, disable_connections = false")
    _write(node.root, "etc/containerd/config.toml", f"{NRI}]\ndisable = false\n")
    assert _levels(_with_containerd(node, "v1.7.30"), "kata-engine")[0] == "ok"


def test_missing_validator_is_a_warning_with_the_lines(node: Node) -> None:
    for text in ("", REQUIRED.replace("true", "false"), REQUIRED.replace('"crust"', '"other"')):
        _write(node.root, "etc/containerd/config.toml", text)
        finding = _found(node, "kata-engine")[-1]
        assert finding.level is Level.WARNING
        assert 'enable = true, required_plugins = ["crust"]' in finding.todo


def test_configuration_that_containerd_imports_is_read(node: Node) -> None:
    _write(node.root, "etc/containerd/config.toml", 'imports = ["conf.d/*.toml"]\n')
    _write(node.root, "etc/containerd/conf.d/crust.toml", REQUIRED)
    assert _levels(node, "kata-engine") == ["ok", "ok", "ok"]


def test_node_without_containerd_is_a_warning(node: Node) -> None:
    (finding,) = _found(replace(node, version_of=lambda _: ""), "kata-engine")
    assert (finding.level, "CRI-O" in finding.why) == (Level.WARNING, True)
