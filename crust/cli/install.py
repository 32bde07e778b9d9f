"""`crust install --systemd` and `crust uninstall`: from a Python environment to a node that systemd runs.

Crust's own files are below /usr/local, and each installation replaces them: change a unit by a drop-in (`systemctl
edit`). The operator's files, /etc/crust, are written once and never touched again. All files are written beside their
names before the first one is renamed, so a full disk leaves the node as it was. The command enables and starts
nothing: its last lines say how.
"""

import itertools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from crust.blockdriver.settings import DriverSettings
from crust.cli import layouts
from crust.cli.programs import PROGRAMS, daemons
from crust.cli.shells import Shell, completion_script
from crust.core import errors, volumes
from crust.handoff import layout
from crust.host.block import loop
from crust.host.files import durable, listing
from crust.host.process import syscalls
from crust.inspection import refusals
from crust.proxy.guard import Targets
from crust.proxy.settings import ProxySettings
from crust.proxy.target import MountStack
from crust.runtime_handler import keeper

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
"""Where each shell searches by default."""
MANIFEST = Path("usr/local/share/crust/installed")
"""The files of this and earlier installations that still exist: a path in each line."""
_PLACES = frozenset({UNITS, RULES, MAN_PAGES, *(path.parent for path in COMPLETIONS.values())})
_OVERRIDES = Path("etc/systemd/system")
_NAMED = 8
_PROGRAM = "/usr/bin/crust"
"""The command's path in the units of deploy/systemd."""

NEXT_STEPS = """
next, once: edit /etc/crust/node.toml; mount the pool's disk at /var/lib/crust/block, if it has one of its own;
    crust driver init-pool --config /etc/crust/node.toml
    systemctl enable --now crust-node
then: crust status
with a process for each program: systemctl enable --now crust-driver crust-shim crust-proxy
beside Kata Containers: edit /etc/crust/kata.toml; systemctl enable --now crust-kata"""
RESTART = """
next: restart the units that run, crust-kata first"""

Report = Callable[[str], None]
Systemctl = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class NotInstallable(errors.InvalidRequest):
    """Crust cannot be installed on this machine, or removed from it, in its present state."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to be installed, by its path below the root. `is_kept`: an existing file is the operator's."""

    path: Path
    content: bytes
    is_kept: bool = False


def shipped() -> Path:
    """The directory of units and settings: the environment's, or the checkout's."""
    installed = Path(sys.prefix, "share", "crust")
    return installed if listing.exists(installed) else Path(__file__).parents[2] / "deploy"


def files(source: Path, command: str) -> Iterator[File]:
    """The files to be installed, from the shipped files, for a command at that path."""
    for unit in listing.matching(source, "systemd/*.service"):
        text = unit.read_text(encoding="utf-8").replace(f"={_PROGRAM} ", f"={command} ")
        yield File(UNITS / unit.name, text.encode())
    for rules in listing.matching(source, "host/*.rules"):
        yield File(RULES / rules.name, rules.read_bytes())
    for settings in listing.matching(source, "crust/*.toml"):
        yield File(SETTINGS / settings.name, settings.read_bytes(), is_kept=True)
    installed = source.parent / "man" / "man1"
    pages = installed if listing.exists(installed) else source.parent / "docs" / "man"
    for page in listing.matching(pages, "crust*.1"):
        yield File(MAN_PAGES / page.name, page.read_bytes())
    for shell, path in COMPLETIONS.items():
        yield File(path, f"{completion_script(shell)}\n".encode())


def command_path() -> str:
    """The `crust` of this Python environment. Raises `NotInstallable` if it has none, or not what is shipped."""
    path = Path(sys.prefix, "bin", "crust")
    for needed in (path, shipped() / "systemd"):
        if not listing.exists(needed):
            raise NotInstallable(
                "crust cannot be installed",
                why=f"{needed} does not exist: crust is not installed in this environment",
                hint="make one in /opt/crust, of the wheel that `make wheel` writes (docs/install.md)",
            )
    return str(path)


def install(root: Path, source: Path, command: str, systemctl: Systemctl, say: Report) -> bool:
    """Write the files below `root` (/ on a node), report each, and have systemd read its units.

    Returns whether there were no settings before. Raises `NotInstallable`, and `syscalls`' errors, before anything
    visible has changed.
    """
    link = root / COMMAND
    _check_ours(link)
    new_files = list(files(source, command))
    own_paths = {file.path for file in new_files if not file.is_kept}
    old_paths = {path for path in _listed(root) if listing.exists(root / path)}
    listed = "".join(f"{path}\n" for path in sorted(own_paths | old_paths))
    new_files.append(File(MANIFEST, listed.encode()))
    changed = [
        file
        for file in new_files
        if not listing.exists(path := root / file.path)
        or (not file.is_kept and path.read_bytes() != file.content)
    ]
    _write(root, changed)
    link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    aside = link.with_name(".crust.crust-new")  # so the command is never absent
    aside.unlink(missing_ok=True)
    aside.symlink_to(command)
    os.replace(aside, link)
    for line in (*_report(new_files, changed), f"/{COMMAND}: a link to {command}"):
        say(line)
    for file in new_files:
        if listing.exists(root / _OVERRIDES / file.path.name):
            say(f"warning: /{_OVERRIDES}/{file.path.name} hides the installed unit: remove it")
    _reload(systemctl, say)
    return all(file in changed for file in new_files if file.is_kept)


def check_settings(directory: Path) -> None:
    """Raise `SettingsRefused` if a daemon would not start with its file there, or not read what the node has.

    What has gone is in the log.
    """
    refused: list[str] = []
    for program, path in _settings_files(directory):
        try:
            settings = daemons.load(program, daemons.text(program, path))
            refused.extend(f"{path}: {why}" for why in layouts.unread(settings))
        except errors.InvalidRequest as error:
            refused.append(f"{path}: {error.why}")
    if refused:
        raise errors.InvalidRequest.named(
            "SettingsRefused",
            "crust is installed, and a unit that reads these settings would not serve",
            why="; ".join(refused),
        )


def _settings_files(directory: Path) -> list[tuple[str, Path]]:
    """The settings files of daemons there, each with its program; shim-<name>.toml is of a shim."""
    paths = ((path.stem.partition("-")[0], path) for path in listing.matching(directory, "*.toml"))
    return [(program, path) for program, path in paths if program in PROGRAMS]


def uninstall(root: Path, source: Path, systemctl: Systemctl, say: Report) -> None:
    """Remove the files of `install`, but no settings and no data, and unseal the kubelet's targets of an earlier
    boot. Refused while a unit runs, or a volume is in use: nobody could unpublish it any more.
    """
    paths = {file.path for file in files(source, _PROGRAM) if not file.is_kept}
    paths |= set(_listed(root))
    units = sorted(path.name for path in paths if path.parent == UNITS)
    patterns = [name.replace("@.", "@*.") for name in units]
    states = "--state=active,activating,deactivating"
    listed = systemctl(["list-units", "--plain", "--no-legend", states, *patterns])
    active = [line.split()[0] for line in listed.stdout.splitlines() if line.split()]
    targets, in_use = _in_use(root)
    if found := [f"{name} still runs" for name in active] or in_use:
        raise NotInstallable(
            "crust is not removed",
            why=", ".join(found[:_NAMED] + [f"and {len(found)} in all"][: len(found) > _NAMED]),
            hint="while the units run, delete all pods, PVCs and snapshots of crust's classes, until `crust volumes` "
            f"and `crust pool` are empty; then systemctl disable --now {' '.join(active) or 'UNIT'}",
        )
    link = root / COMMAND
    _check_ours(link)
    targets.unseal_all()
    # the list is removed last, so that a next call finds the remaining files
    for path in (*sorted(paths), MANIFEST):
        if listing.exists(root / path):
            durable.remove(root / path)
            say(f"/{path}: removed")
    shared = (root / MANIFEST).parent
    if listing.exists(shared) and not os.listdir(shared):
        shared.rmdir()
    if listing.exists(link):
        durable.remove(link)
        say(f"/{COMMAND}: removed")
    _reload(systemctl, say)
    # the control groups of keepers, unless virtual machines run
    for hierarchy in keeper.HIERARCHIES:
        group = root / f"sys/fs/cgroup{hierarchy}/system.slice/{keeper.GROUP}"
        if listing.exists(group) and not syscalls.read_whole(f"{group}/cgroup.procs"):
            group.rmdir()
    say(
        "kept: /etc/crust, /var/lib/crust (the volumes!) and /run/crust; remove them by hand if no longer needed"
    )


def _in_use(root: Path) -> tuple[Targets, list[str]]:
    """The kubelet's targets, and what is in use without a daemon. Raises an error of crust for what is not seen."""
    base, roots, found = str(root).rstrip("/"), set[str](), list[str]()
    files = [daemons.load("node", "")]  # the defaults, where no file is left
    for program, path in _settings_files(root / SETTINGS):
        files.append(daemons.load(program, daemons.text(program, path)))
    parts = [(one, getattr(one, "proxy", None), *getattr(one, "driver", ())) for one in files]
    for part in itertools.chain(*parts):
        if isinstance(part, ProxySettings):
            roots.update(base + place for place in part.target_roots)
            entries = listing.names(base + part.volumes_root)
            found += [f"the entry {name}" for name in entries if not layout.is_hidden(name)]
        for pool in part.by_pool().values() if isinstance(part, DriverSettings) else ():
            staged = listing.matching(base + pool.run_dir, f"{syscalls.boot_id()}/*.json")
            images = listing.matching(base + pool.state_dir, "volumes/*/*.img")
            found += [f"the staged volume {path.stem}" for path in staged]
            found += [f"{at.path} with {image}" for image in images for at in loop.find(image)]
    targets = Targets(sorted(roots))
    for target, stack in targets.stacks().items():
        if stack is not MountStack.FOREIGN or volumes.is_private(target):
            found.append(f"the mount on {target}")
    return targets, list(dict.fromkeys(found))


def run_install() -> None:
    """The command; exits 1 with a sentence."""
    with _reported("crust install"):
        is_first = install(Path("/"), shipped(), command_path(), run_systemctl, _say)
        check_settings(Path("/", SETTINGS))
        _say(NEXT_STEPS if is_first else RESTART)


def run_uninstall() -> None:
    """The command; exits 1 with a sentence."""
    with _reported("crust uninstall"):
        uninstall(Path("/"), shipped(), run_systemctl, _say)


def _say(line: str) -> None:
    """Print a line. The work goes on without a reader that has ended (`| head`)."""
    try:
        click.echo(line)
    except BrokenPipeError:
        sys.stdout = None  # a flush at exit must not fail again


@contextmanager
def _reported(command: str) -> Iterator[None]:
    try:
        if os.geteuid():
            raise NotInstallable(
                f"{command} failed", why="it is not run by root", hint="run it as root"
            )
        os.umask(0o022)  # all users may read the installed files
        with syscalls.translating(f"{command} failed"):
            yield
    except errors.CrustError as error:
        refusals.tell(error)
        sys.exit(1)


def _listed(root: Path) -> Iterator[Path]:
    """The paths of the list. A path outside of the directories that installations write is ignored."""
    with suppress(FileNotFoundError):
        for line in (root / MANIFEST).read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if path.parent in _PLACES and "crust" in path.name:
                yield path


def _write(root: Path, changed: Sequence[File]) -> None:
    staged: list[tuple[Path, Path]] = []
    try:
        for file in changed:
            path = root / file.path
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.crust-new")
            aside.unlink(missing_ok=True)
            staged.append((aside, path))
            durable.write_staged(aside, file.content, mode=0o644)
        for aside, path in staged:
            os.replace(aside, path)
        for directory in {path.parent for _, path in staged}:
            durable.sync_directory(directory)
    finally:
        for aside, _ in staged:
            aside.unlink(missing_ok=True)


def _report(new_files: Sequence[File], changed: Sequence[File]) -> Iterator[str]:
    """A line for each directory, with the files that are new, or were kept because they are the operator's."""
    for directory in dict.fromkeys(file.path.parent for file in new_files):
        files_there = [file for file in new_files if file.path.parent == directory]
        written = [file.path.name for file in files_there if file in changed]
        kept = [file.path.name for file in files_there if file.is_kept and file not in changed]
        if len(written) > _NAMED:
            written = [str(len(written))]
        said = {"written": written, "kept, they are yours": kept}
        parts = [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
        yield f"/{directory}: {'; '.join(parts) or 'unchanged'}"


def _check_ours(link: Path) -> None:
    if listing.exists(link) and not stat.S_ISLNK(link.lstat().st_mode):
        raise NotInstallable(
            f"{link} is in the way", why="it is a file and no link of crust", hint="remove it first"
        )


def run_systemctl(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Call systemctl; returns its exit code and output, 127 without systemd."""
    program = shutil.which("systemctl")
    if program is None or not listing.exists("/run/systemd/system"):
        return subprocess.CompletedProcess(arguments, 127, "", "systemd does not run here")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def _reload(systemctl: Systemctl, say: Report) -> None:
    done = systemctl(["daemon-reload"])
    if done.returncode:
        say(f"warning: systemctl daemon-reload failed: {done.stderr.strip()}; repeat it")
