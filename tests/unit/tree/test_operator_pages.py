"""The pages for operators and deploy/: settings, metrics, parameters, errors and commands are the code's."""

import importlib
import inspect
import re
import subprocess
import tomllib
from pathlib import Path

import click
import prometheus_client
import pydantic
import pytest
from pydantic_core import PydanticUndefined

from crust.blockdriver.controller import class_parameters
from crust.blockdriver.node import node_stats
from crust.blockdriver.records import health
from crust.blockdriver.settings import DriverSettings
from crust.cli import main
from crust.cli.doctor.node import CHECKS
from crust.core import deferral_keys, metrics
from crust.core.settings import loading
from crust.core.settings.program import ProgramSettings
from crust.csi_shim.settings import ShimSettings
from crust.host.filesystems import mkfs
from crust.kata.settings import KataSettings
from crust.node.settings import NodeSettings
from crust.proxy import runtime_api
from crust.proxy.settings import ProxySettings
from tests.support import chart
from tests.support.chart_forms import FORMS
from tests.support.pages import cli_output, error_table

ROOT = Path(__file__).parents[3]
PAGES = ("operations", "settings", "kubernetes", "wrapping", "monitoring")
PAGE = "\n".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
DEPLOY = ROOT / "deploy"
COMMON = ProgramSettings.model_fields
_REASON = re.compile(r'Kind\.\w+, "([A-Z]\w+)"')
REASONS = {
    reason
    for module in (health, node_stats)
    for reason in _REASON.findall(inspect.getsource(module))
} | {runtime_api.REASON}
"""The reasons that the driver and the proxy report for a bad health."""
PROGRAMS: dict[str, type[ProgramSettings]] = {
    "proxy": ProxySettings,
    "shim": ShimSettings,
    "driver": DriverSettings,
    "kata": KataSettings,
}
WITH_NODE: dict[str, type[ProgramSettings]] = {**PROGRAMS, "node": NodeSettings}


def table_after(words: str) -> dict[str, str]:
    """The first two columns of the table below a line; without the marks of code."""
    _, _, rest = PAGE.partition(f"\n{words}\n\n")
    assert rest, f"there is no line {words!r}"
    rows = [line.split(" | ") for line in rest.split("\n\n")[0].splitlines()[2:]]
    return {row[0].strip("| `"): row[1].strip("| `") for row in rows}


def test_tables_of_node_are_on_the_page() -> None:
    assert list(table_after("`crust node`:")) == [
        name for name in NodeSettings.model_fields if name not in COMMON
    ]


def documented(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """Setting to default, as the page must have it."""
    defaults = {}
    for name, field in model.model_fields.items():
        default = field.default
        if default is PydanticUndefined:
            defaults[name] = "required"
        elif isinstance(default, tuple):
            defaults[name] = ",".join(default)
        else:
            defaults[name] = str(default) or "empty"
    return defaults


def test_common_settings_and_defaults_are_on_the_page() -> None:
    assert table_after("Every daemon:") == documented(ProgramSettings)


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_and_defaults_of_program_are_on_the_page(program: str) -> None:
    wanted = documented(PROGRAMS[program])
    assert table_after(f"`crust {program}`:") == {
        name: default for name, default in wanted.items() if name not in COMMON
    }


@pytest.mark.parametrize("program", WITH_NODE)
def test_every_setting_has_a_flag(program: str) -> None:
    command = main.main.commands[program]
    help_flags = {"help", "_click_default_help"}  # its name up to click 8.2, and since
    flags = {param.name for param in command.get_params(click.Context(command))} - help_flags
    tables = {
        "kubernetes",
        "pools",
        "rbd",
        *PROGRAMS,
    }  # of settings of its own: they come from the file
    assert flags - {"config"} == set(WITH_NODE[program].model_fields) - tables


@pytest.mark.parametrize("program", WITH_NODE)
def test_example_settings_are_accepted(program: str) -> None:
    text = (DEPLOY / "crust" / f"{program}.toml").read_text(encoding="utf-8")
    given = {"node_id": "n"} if program == "driver" else {}
    loading.load(WITH_NODE[program], program, toml=text, environ={}, flags=given)


def test_example_settings_lead_from_one_program_to_next() -> None:
    files = {
        name: tomllib.loads((DEPLOY / "crust" / f"{name}.toml").read_text()) for name in PROGRAMS
    }
    (driver,) = files["proxy"]["drivers"]
    assert driver["backend"] == files["shim"]["socket"]
    assert files["shim"]["driver_socket"] == files["driver"]["socket"]
    assert all(f"`{path}`" in PAGE for path in (files["shim"]["socket"], files["driver"]["socket"]))


@pytest.mark.parametrize("program", WITH_NODE)
def test_unit_starts_its_program_and_keeps_the_hosts_mounts(program: str) -> None:
    unit = (DEPLOY / "systemd" / f"crust-{program}.service").read_text(encoding="utf-8")
    lines = [line for line in unit.splitlines() if "=" in line and not line.startswith("#")]
    keys = {line.partition("=")[0] for line in lines}
    if program == "shim":  # it mounts nothing
        keys -= {key for key in keys if key.startswith(("Private", "Protect"))}
    assert f"ExecStart=/usr/bin/crust {program} --config /etc/crust/{program}.toml" in lines
    # keepers of live machines must not end with the daemon (H-43)
    assert f"KillMode={'process' if program == 'kata' else 'mixed'}" in lines
    assert "Type=notify" in lines
    hides_mounts = {
        key for key in keys if key.startswith(("Private", "Protect", "RuntimeDirectory"))
    }
    assert hides_mounts <= {"ProtectHostname"}


@pytest.mark.parametrize("unit", sorted(path.name for path in (DEPLOY / "systemd").iterdir()))
def test_systemd_accepts_the_unit_without_a_warning(unit: str, tmp_path: Path) -> None:
    """systemd-analyze exits 0 for an unknown key, and says so."""
    text = (
        (DEPLOY / "systemd" / unit)
        .read_text(encoding="utf-8")
        .replace("/usr/bin/crust", "/bin/true")
    )
    path = tmp_path / unit.replace("@", "@x")
    path.write_text(text)
    verify = ("systemd-analyze", "--man=no", "verify", str(path))
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_metrics_of_page_are_those_of_code() -> None:
    page = set(re.findall(r"^\| `(crust_\w+|csi_operations\w+)` \|", PAGE, re.MULTILINE))
    parts = [*metrics.PROXY, *metrics.DRIVER, *metrics.FENCING, *metrics.SHARED]
    samples = [sample for part in parts for sample in part.collect()]
    counted = {
        f"{sample.name}_total" if sample.type == "counter" else sample.name
        for sample in [*prometheus_client.REGISTRY.collect(), *samples]
        if sample.name.startswith(("crust_", "csi_"))
    }
    assert page == counted
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"`(crust_\w+)`", pages)) <= counted


def test_every_error_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", PAGE)) - {"FailedMount"}
    known = {name for name, _, _ in error_table.names()}
    assert len(named) > 40
    assert named - known - REASONS == set()


def test_every_symptom_is_in_the_table_above_them() -> None:
    table, *sections = PAGE.partition("\n## Symptoms\n")[2].partition("\n## ")[0].split("\n### ")
    headings = [section.splitlines()[0] for section in sections]
    assert len(headings) > 25
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert [anchor for anchor in anchors if f"(#{anchor})" not in table] == []


def test_every_reason_of_a_bad_health_is_explained() -> None:
    assert len(REASONS) > 5
    assert {
        reason for reason in REASONS if f"| `{reason}`" not in PAGE and f"`, `{reason}`" not in PAGE
    } == set()


def test_every_parameter_of_a_storage_class_is_explained() -> None:
    explained = PAGE.partition("\n## StorageClass\n")[2].partition("\n## ")[0]
    assert [key for key in class_parameters.KEYS if f"`{key}`" not in explained] == []
    (row,) = (line for line in explained.splitlines() if f"`{deferral_keys.DEFER}`" in line)
    assert [value.value for value in deferral_keys.Defer if f"`{value.value}`" not in row] == []


def test_snapshot_classes_have_no_parameters() -> None:
    kinds = ("VolumeSnapshotClass", "VolumeGroupSnapshotClass")
    classes = chart.of_kind(chart.objects(FORMS["single-node-groups"]), *kinds)
    assert {item["kind"] for item in classes} == set(kinds)
    assert not any("parameters" in item for item in classes)


def test_storage_classes_ask_for_what_the_driver_knows() -> None:
    classes = chart.of_kind(chart.objects(), "StorageClass")
    assert len(classes) == 2
    for sent in (item["parameters"] for item in classes):
        assert class_parameters.parse(sent, mkfs.SUPPORTED).kept == sent
    for key in (deferral_keys.DEFER, deferral_keys.RUNTIME_HANDLER, class_parameters.FS_TYPE):
        assert f"| `{key}` |" in PAGE


def test_volume_attributes_classes_ask_for_all_known_limits() -> None:
    classes = chart.of_kind(chart.objects(FORMS["single-node"]), "VolumeAttributesClass")
    assert len(classes) == 2
    for sent in (item["parameters"] for item in classes):
        assert set(sent) == set(class_parameters.LIMIT_KEYS)
        assert len(class_parameters.parse_mutable(sent)) == len(class_parameters.LIMIT_KEYS)
    for key in class_parameters.LIMIT_KEYS:
        assert f"`{key}`" in PAGE


COMMANDS = Path(__file__).parents[3] / "docs" / "commands.md"


def test_page_equals_what_the_commands_print() -> None:
    assert COMMANDS.read_text(encoding="utf-8") == cli_output.page(), "run `make docs-output`"


TEXTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").rglob("*.md")]
_INLINE = re.compile(r"`(?:/opt/crust/bin/)?crust ([a-z][^`]*)`")
_BLOCK = re.compile(r"^ {4,}(?:[^#\n]*\| )?(?:/opt/crust/bin/)?crust ([a-z].*)$", re.MULTILINE)
LINES = [
    (page.name, line)
    for page in TEXTS
    for line in dict.fromkeys(
        match.replace("\n", " ")
        for pattern in (_INLINE, _BLOCK)
        for match in pattern.findall(page.read_text(encoding="utf-8"))
    )
]
TOML = [
    (page.name, text)
    for page in TEXTS
    for text in re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
]  # fmt: skip


def _unknown(line: str) -> list[str]:
    """The words of a command line, without its quoted arguments, that are no command and none of its options."""
    words = re.split(r" [|>&;]|\(", re.sub(r"'[^']*'?", "", line))[0].split()
    command: click.Command = main.main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if command is main.main:
        return words[:1]
    group = isinstance(command, click.Group) and bool(words) and not words[0].startswith("-")
    params = command.get_params(click.Context(command))
    options = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    given = [word.partition("=")[0].rstrip(",") for word in words if word.startswith("--")]
    return [word for word in given if word not in options] + words[:1] * group


def test_command_lines_of_pages_are_found() -> None:
    assert len(LINES) > 100
    assert len(TOML) >= 3


@pytest.mark.parametrize(("page", "line"), LINES)
def test_command_line_of_page_has_known_commands_and_options(page: str, line: str) -> None:
    assert _unknown(line) == [], page


@pytest.mark.parametrize("line", ["nods", "ceph fance NODE", "volumes --handlers x"])
def test_command_line_with_a_misspelt_word_is_found(line: str) -> None:
    assert len(_unknown(line)) == 1


@pytest.mark.parametrize(("page", "text"), TOML)
def test_settings_of_page_are_accepted(page: str, text: str) -> None:
    """What a fragment leaves out, as the sentence beside it says, is put in from outside."""
    tables = tomllib.loads(text)
    if "driver" in tables:
        flags: dict[str, object] = {"driver": tables["driver"]}
        node = loading.load(NodeSettings, "node", environ={}, flags=flags)
        assert len(node.driver) == len(tables["driver"])
    else:
        served = {"name": "csi.example.com", "socket": "/run/a.sock", "backend": "/run/b.sock"}
        flags = {"drivers": [served]}
        assert loading.load(ProxySettings, "proxy", toml=text, environ={}, flags=flags).kubernetes


def test_table_of_doctor_has_every_check() -> None:
    importlib.import_module("crust.cli.doctor.examine")  # registers them
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("### crust doctor\n")[2].partition("\n### ")[0]
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in first for name in re.findall(r"`([\w-]+)`", cell)} == set(CHECKS)


_BY_NAME = re.compile(
    r"\b(?:pip3?|pipx|uv) (?:tool )?install\b[^\n`]*[\s'\"]crust(?:[-_](?:csi|conformance))?(?![\w/-])(?!-\d|\.\w)"
)
"""Of a wheel's file it is the path, or a name with a version."""


def test_no_text_installs_crust_by_name_from_an_index() -> None:
    """Nobody owns the name there: whoever registered it would be root on each node that is told so."""
    kinds = {".py", ".md", ".txt", ".toml", ".tpl", ".yaml", ".service", ".1"}
    roots = ("crust", "conformance", "docs", "deploy", "examples", "specs")
    paths = [path for root in roots for path in (ROOT / root).rglob("*") if path.suffix in kinds]
    wrong = [
        f"{path}: {found}"
        for path in (*paths, *ROOT.glob("*.md"))
        if (found := _BY_NAME.search(re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))))
    ]
    assert not wrong
    for text in ("pip install crust-csi", "pip install --upgrade 'crust-csi[kubernetes]>=1'"):
        assert _BY_NAME.search(text), text
    assert not _BY_NAME.search("pip install --no-deps ./crust_csi-*.whl build/crust_csi-1.whl")


def test_upgrade_on_the_page_restarts_readers_first() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    commands = page.partition("\n## Upgrade\n\n")[2].partition("\n\n")[0]
    assert re.findall(r"systemctl (\S+ crust-\w+)", commands) == [
        "try-restart crust-kata",
        "restart crust-node",
    ]


OPERATORS = (
    *("README.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/ceph.md", "docs/commands.md", "docs/errors.md", "docs/install.md", "docs/kata.md"),
    *("docs/kata-transcript.md", "docs/kubernetes.md", "docs/monitoring.md", "docs/multi-node.md"),
    *("docs/operations.md", "docs/pool-disk.md", "docs/security.md", "docs/settings.md"),
    "docs/wrapping.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs/man").iterdir())),
)
INNER = re.compile(
    r"\b(keeper|placeholder|settle|residue|spare|standby|join|successor)(s|d|ed|ing)?\b"
    r"|\bparts?\b(?![ -]of| before)",
    re.I,
)
"""The words of crust's inside; "part" for a component, and not for a share of a whole."""


@pytest.mark.parametrize("page", OPERATORS)
def test_page_for_operators_has_no_word_of_the_inside(page: str) -> None:
    """The command `crust keeper`, and names of errors and files, are code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    inner = INNER.findall(re.sub(r"`[^`\n]*`|\\*-keeper\b|crust keeper|\.TH .*", "", text))
    assert not inner


@pytest.mark.parametrize(
    "sentence", ["Keepers hold it.", "the driver's controller part", "each part that is not ready"]
)
def test_word_of_the_inside_is_found(sentence: str) -> None:
    assert INNER.search(sentence)


PUBLIC = (
    r"handoff directory",
    r"(?:sandbox(?:'s)?|volume's) claims?",
    r"guard mounts?",
    r"(?<!Kata's )entr(?:y|ies)(?! without)",
)
"""The public words, as they are used first: a page for operators says what each of them is."""
EXPLAINED = re.compile(
    r"\]|\W{0,3}(?: of a target| of a volume)?(?:\(| is |, (?:a|the|in which|which)\b)"
)
WITH_PUBLIC_WORDS = (
    "errors",
    "kata",
    "kubernetes",
    "monitoring",
    "operations",
    "security",
    "settings",
)


@pytest.mark.parametrize("page", WITH_PUBLIC_WORDS)
def test_page_for_operators_explains_public_words_at_first_use(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"^#.*$|`[^`\n]*`(?! \()|(?<=\])\([^)]*\)", "", text, flags=re.M)
    first = [re.search(rf"\b{word}\b", text) for word in PUBLIC]
    riddles = [use[0] for use in first if use and not EXPLAINED.match(text, use.end())]
    assert not riddles


OWNED = re.compile(
    r"\bbinds? (?:a|the) claim\b|\bclaims? (?:is|are|that (?:is|are)(?: not)?) bound\b(?! to)"
    r"|\bclaims? (?:stays? )?Pending\b|\bclaims? of (?:that|a) class\b"
    r"|\bclaim's (?:condition|deletion|namespace|StorageClass)\b"
    r"|\bpods?(?:,| and) (?:a |the )?claims?\b|\bclaims? and (?:a pod|pods|PersistentVolumes)\b"
    r"|\b(?:sandbox|machine)\b[^.]{0,50}\b(?:its|whose) shim (?:has ended|was killed)\b"
    r"|\bsandbox's shim\b|(?<!Kata's )\bshim of (?:a sandbox|runtime-rs)\b"
)
"""Kubernetes' claim, which is a PVC, and Kata's shim, without their owner: alone both words are crust's."""
BARE_SHIM = re.compile(r"(?<!Kata's )(?<!Kata's Go )(?<!crust's )\bshims?\b")
_CHART = [path for path in (DEPLOY / "helm").rglob("*") if path.suffix in {".yaml", ".tpl", ".txt"}]
PROSE = [*ROOT.glob("*.md"), *TEXTS[1:], *_CHART]


def _prose(path: Path) -> str:
    """Without code; a sentence or a comment in one line."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"\s+(?:# )?", " ", text)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_or_chart_names_owner_of_claim_and_shim(page: Path) -> None:
    wrong = OWNED.findall(text := _prose(page))
    kata = BARE_SHIM.findall(text) if page.stem in {"kata", "kata-transcript"} else []
    assert (wrong, kata) == ([], [])


@pytest.mark.parametrize(
    "sentence",
    [
        "A test creates a volume, binds a claim to it, and gives a pod its node.",
        "a claim is bound, a pod has it on the host",
        "A claim stays Pending: a volume is not made",
        "The pod has a runtime class and a claim of that class.",
        "Secrets of the claim's namespace and of crust's",
        "Delete all pods, claims and snapshots of crust's classes.",
        "A claim and a pod.",
        "A virtual machine that goes on after its shim was killed is named.",
        "the sandbox's shim has ended, its virtual machine has not",
        "the shim of runtime-rs ends after 111 s",
    ],
)
def test_sentence_without_owner_of_claim_or_shim_is_found(sentence: str) -> None:
    assert OWNED.search(sentence)


def test_bare_shim_on_a_page_about_kata_is_found() -> None:
    assert BARE_SHIM.findall("The shim ends.") == ["shim"]
    assert BARE_SHIM.findall("Kata's shim, Kata's Go shim and crust's shim end.") == []
