"""`crust install --systemd` and `crust uninstall`: from a Python environment to a node that systemd runs.

What belongs to crust is written below /usr/local, and is replaced by each installation: change a unit by a drop-in
(`systemctl edit`). What belongs to the operator, /etc/crust, is written once and never touched again. All files are
written beside their names before the first one is renamed, so a full disk leaves the node as it was. Nothing is
enabled or started: the last lines say how.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from crust.cli.inspecting.operator_commands import Shell, completion_script
from crust.core import errors
from crust.host.files import durable
from crust.host.process import syscalls

UNITS = Path("usr/local/lib/systemd/system")
RULES = Path("usr/local/lib/udev/rules.d")
COMMAND = Path("usr/local/bin/crust")
SETTINGS = Path("etc/crust")
MAN_PAGES = Path("usr/local/share/man/man1")
COMPLETIONS: Mapping[Shell, Path] = {
    "bash": Path("usr/local/share/bash-completion/completions/crust"),
    "zsh": Path("usr/local/share/zsh/site-functions/_crust"),
    "fish": Path("usr/local/share/fish/vendor_completions.d/crust.fish"),
}
"""Where each shell looks by itself."""
MANIFEST = Path("usr/local/share/crust/installed")
"""The files that installations wrote, of earlier versions, too, and nobody has removed: a path in each line."""
_PLACES = frozenset({UNITS, RULES, MAN_PAGES, *(path.parent for path in COMPLETIONS.values())})
_OVERRIDES = Path("etc/systemd/system")
_NAMED = 8
_PROGRAM = "/usr/bin/crust"
"""As the units in deploy/systemd name it."""

NEXT_STEPS = """
next, once: edit /etc/crust/node.toml; mount the pool's disk at /var/lib/crust/block, if it has one of its own;
    crust driver init-pool --config /etc/crust/node.toml
    systemctl enable --now crust-node
then: crust status
with a process for each part: systemctl enable --now crust-driver crust-shim crust-proxy
beside Kata Containers: edit /etc/crust/kata.toml; systemctl enable --now crust-kata"""

Report = Callable[[str], None]
Systemctl = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class NotInstallable(errors.InvalidRequest):
    """Crust cannot be installed, or removed, as things are on this machine."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to be installed, by its path below the root. `is_kept`: one that is there is the operator's."""

    path: Path
    content: bytes
    is_kept: bool = False


def shipped() -> Path:
    """The directory of units, settings and manifests: the environment's, or the checkout's."""
    installed = Path(sys.prefix, "share", "crust")
    found = installed if installed.is_dir() else Path(__file__).parents[2] / "deploy"
    if not (found / "systemd").is_dir():
        raise NotInstallable(
            "crust cannot be installed",
            why=f"neither {installed} nor {found} has the units",
            hint="install the wheel: pip install crust-csi",
        )
    return found


def files(source: Path, command: str) -> Iterator[File]:
    """What is installed, from the shipped files, for a command at that path."""
    for unit in sorted((source / "systemd").glob("*.service")):
        text = unit.read_text(encoding="utf-8").replace(f"={_PROGRAM} ", f"={command} ")
        yield File(UNITS / unit.name, text.encode())
    for rules in sorted((source / "host").glob("*.rules")):
        yield File(RULES / rules.name, rules.read_bytes())
    for settings in sorted((source / "crust").glob("*.toml")):
        yield File(SETTINGS / settings.name, settings.read_bytes(), is_kept=True)
    for page in sorted(_man_pages(source).glob("crust*.1")):
        yield File(MAN_PAGES / page.name, page.read_bytes())
    for shell, path in COMPLETIONS.items():
        yield File(path, f"{completion_script(shell)}\n".encode())


def _man_pages(source: Path) -> Path:
    """Where the man pages of the shipped files are: the environment's own, or the checkout's."""
    installed = source.parent / "man" / "man1"
    return installed if installed.is_dir() else source.parent / "docs" / "man"


def command_path() -> str:
    """The `crust` of this Python environment; raises `NotInstallable` where there is none."""
    path = Path(sys.prefix, "bin", "crust")
    if not os.access(path, os.X_OK):
        raise NotInstallable(
            "crust cannot be installed",
            why=f"{path} does not exist: this is no environment that crust is installed in",
            hint="make one: python3 -m venv /opt/crust, then /opt/crust/bin/pip install of the wheel",
        )
    return str(path)


def install(root: Path, source: Path, command: str, systemctl: Systemctl, say: Report) -> None:
    """Write the files below `root` (/ on a node), report each, and have systemd read its units.

    Raises `NotInstallable`, and `syscalls`' errors, before anything visible has changed.
    """
    link = root / COMMAND
    _check_ours(link)
    wanted = list(files(source, command))
    wanted.append(_manifest(root, wanted))
    changed = [each for each in wanted if _differs(root, each)]
    _write(root, changed)
    _link(link, command)
    for line in _report(wanted, changed):
        say(line)
    say(f"/{COMMAND}: a link to {command}")
    for each in wanted:
        if (root / _OVERRIDES / each.path.name).exists():
            say(
                f"warning: /{_OVERRIDES}/{each.path.name} hides the unit that was installed: remove it"
            )
    _reload(systemctl, say)


def uninstall(root: Path, source: Path, systemctl: Systemctl, say: Report) -> None:
    """Remove what `install` wrote, but no settings and no data; refused while a unit runs."""
    written = {file.path for file in files(source, _PROGRAM) if not file.is_kept}
    written |= set(_listed(root))
    units = sorted(each.name for each in written if each.parent == UNITS)
    active = _running(units, systemctl)
    if active:
        raise NotInstallable(
            "crust is not removed",
            why=f"{', '.join(active)} still runs",
            hint=f"delete the pods with deferred volumes, then systemctl disable --now {' '.join(active)}",
        )
    link = root / COMMAND
    _check_ours(link)
    # the list goes last: what is left is removed by the next call
    for path in (
        *sorted(written),
        MANIFEST,
    ):
        if (root / path).exists():
            durable.remove(root / path)
            say(f"/{path}: removed")
    with contextlib.suppress(OSError):  # it has something else
        (root / MANIFEST).parent.rmdir()
    if link.is_symlink():
        durable.remove(link)
        say(f"/{COMMAND}: removed")
    _reload(systemctl, say)
    say(
        "kept: /etc/crust, /var/lib/crust (the volumes!) and /run/crust; remove them by hand if nobody needs them"
    )


def run_install() -> None:
    """The command; exits 1 with a sentence."""
    with _reported("crust install"):
        install(Path("/"), shipped(), command_path(), run_systemctl, click.echo)
        click.echo(NEXT_STEPS)


def run_uninstall() -> None:
    """The command; exits 1 with a sentence."""
    with _reported("crust uninstall"):
        uninstall(Path("/"), shipped(), run_systemctl, click.echo)


@contextmanager
def _reported(command: str) -> Iterator[None]:
    try:
        if os.geteuid():
            raise NotInstallable(
                f"{command} failed", why="it is not run by root", hint="run it as root"
            )
        os.umask(0o022)  # others may read what is installed
        with syscalls.translating(f"{command} failed"):
            yield
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        sys.exit(1)


def _manifest(root: Path, wanted: Sequence[File]) -> File:
    """The list with what is installed now, and what is left of earlier versions."""
    own = {each.path for each in wanted if not each.is_kept}
    left = {path for path in _listed(root) if (root / path).exists()}
    return File(MANIFEST, "".join(f"{path}\n" for path in sorted(own | left)).encode())


def _listed(root: Path) -> Iterator[Path]:
    """The paths of the list. One that leads elsewhere than installations write is not crust's, whoever wrote it."""
    with contextlib.suppress(FileNotFoundError):
        for line in (root / MANIFEST).read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if path.parent in _PLACES and "crust" in path.name:
                yield path


def _differs(root: Path, wanted: File) -> bool:
    path = root / wanted.path
    if not path.exists():
        return True
    return not wanted.is_kept and path.read_bytes() != wanted.content


def _write(root: Path, wanted: Sequence[File]) -> None:
    staged: list[tuple[Path, Path]] = []
    try:
        for each in wanted:
            path = root / each.path
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.crust-new")
            aside.unlink(missing_ok=True)
            staged.append((aside, path))
            durable.write_staged(aside, each.content, mode=0o644)
        for aside, path in staged:
            os.replace(aside, path)
        for directory in {path.parent for _, path in staged}:
            durable.sync_directory(directory)
    finally:
        for aside, _ in staged:
            aside.unlink(missing_ok=True)


def _report(wanted: Sequence[File], changed: Sequence[File]) -> Iterator[str]:
    """A line for each directory, with the files that are new, or were kept because they are the operator's."""
    for directory in dict.fromkeys(each.path.parent for each in wanted):
        files_there = [each for each in wanted if each.path.parent == directory]
        written = [each.path.name for each in files_there if each in changed]
        kept = [each.path.name for each in files_there if each.is_kept and each not in changed]
        parts = [f"{len(files_there)} files" if len(files_there) > 1 else files_there[0].path.name]
        if written:
            parts.append(
                f"written: {', '.join(written) if len(written) <= _NAMED else len(written)}"
            )
        if kept:
            parts.append(f"kept, they are yours: {', '.join(kept)}")
        yield f"/{directory}: {'; '.join(parts)}" if written or kept else f"/{directory}: unchanged"


def _check_ours(link: Path) -> None:
    if link.is_symlink() or not link.exists():
        return
    raise NotInstallable(
        f"{link} is in the way", why="it is a file and no link of crust", hint="remove it first"
    )


def _link(link: Path, command: str) -> None:
    link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    aside = link.with_name(".crust.crust-new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(command)
    os.replace(aside, link)


def run_systemctl(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Call systemctl; returns its exit code and output. 127 where there is none."""
    program = shutil.which("systemctl")
    if program is None or not Path("/run/systemd/system").is_dir():
        return subprocess.CompletedProcess(arguments, 127, "", "systemd does not run here")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def _running(units: Sequence[str], systemctl: Systemctl) -> list[str]:
    patterns = [name.replace("@.", "@*.") for name in units]
    listed = systemctl(
        [
            "list-units",
            "--plain",
            "--no-legend",
            "--state=active,activating,deactivating",
            *patterns,
        ]
    )
    return [line.split()[0] for line in listed.stdout.splitlines() if line.split()]


def _reload(systemctl: Systemctl, say: Report) -> None:
    done = systemctl(["daemon-reload"])
    if done.returncode:
        say(
            f"warning: systemd has not read its units again ({done.stderr.strip()}): systemctl daemon-reload"
        )
