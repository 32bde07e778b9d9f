"""The guest image: a kernel (ELF) and an initramfs, named by the digest of all their inputs.

    <cache>/packages/<file>.deb            as fetched
    <cache>/base-<digest>/                 packages unpacked, kernel extracted
    <cache>/image-<digest>/                vmlinux, initramfs, manifest.json

Both directories are built under a temporary dot name and renamed, so a directory that exists is complete even if a
builder was killed. The digest of an image covers the packages' hashes and the sources of builder and agent, so a
second build finds its result by name and does nothing. One lock serialises builders that share a cache.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.kata.guest import archive, closure, kernel, packages
from examples.kata.guest.agent import format, luks

_HERE = Path(__file__).parent
_LOADER = "lib64/ld-linux-x86-64.so.2"
_LIBRARIES = "lib/x86_64-linux-gnu"
_PYTHON = "usr/bin/python3.11"
_AGENT_MODULES = ("agent.init", "agent.main")
_KEPT_IMAGES = 6
_KEPT_BASES = 3
# For workloads that run a Python script; hashlib falls back to the interpreter's own digests.
_WORKLOAD_MODULES = (
    "encodings.ascii",
    "encodings.latin_1",
    "hashlib",
    "shutil",
    "site",
    "tempfile",
    "time",
)


@dataclass(frozen=True, slots=True)
class GuestImage:
    """A bootable pair of files, and which filesystems its kernel can mount."""

    directory: Path
    digest: str
    flavour: packages.Flavour
    filesystems: tuple[str, ...]
    opens_luks: bool
    kernel: str
    """Its release, as `uname -r` says it."""

    @property
    def vmlinux(self) -> Path:
        """The kernel as an ELF file."""
        return self.directory / "vmlinux"

    @property
    def initramfs(self) -> Path:
        """The initramfs."""
        return self.directory / "initramfs"


def build(cache: Path, flavour: packages.Flavour = "cloud") -> GuestImage:
    """Return the image for `flavour`, building it if its inputs changed. Blocks; needs apt's package lists.

    Raises PackagesUnavailable, ImageToolFailed, UnknownKernelFormat, KernelModuleMissing.
    """
    cache = cache.absolute()
    chosen = packages.resolve(flavour)
    base_digest = digest_of([f"{p.file_name} {p.sha256}".encode() for p in chosen])
    digest = digest_of([base_digest.encode(), *_sources()])
    target = cache / f"image-{digest}"
    with _locked(cache):
        if not target.exists():
            base = _base(cache, base_digest, chosen)
            with _aside(target) as directory:
                _assemble(base, directory, flavour)
            _prune(cache)
    return load(target)


def load(directory: Path) -> GuestImage:
    """Open an image that `build` made."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return GuestImage(
        directory=directory,
        digest=directory.name.removeprefix("image-"),
        flavour=manifest["flavour"],
        filesystems=tuple(manifest["filesystems"]),
        opens_luks=manifest["opens_luks"],
        kernel=manifest["kernel"],
    )


def digest_of(parts: Sequence[bytes]) -> str:
    """Digest of a sequence; no concatenation of other parts has the same."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:20]


def _sources() -> list[bytes]:
    files = sorted(_HERE.rglob("*.py"))
    return [part for f in files for part in (str(f.relative_to(_HERE)).encode(), f.read_bytes())]


def _base(cache: Path, digest: str, chosen: tuple[packages.Package, ...]) -> Path:
    base = cache / f"base-{digest}"
    if not base.exists():
        archives = packages.fetch(chosen, cache / "packages")
        with _aside(base) as directory:
            packages.unpack(archives, directory / "tree")
            image = next((directory / "tree" / "boot").glob("vmlinuz-*"))
            (directory / "vmlinux").write_bytes(kernel.extract_vmlinux(image))
    return base


def _assemble(base: Path, directory: Path, flavour: packages.Flavour) -> None:
    tree = base / "tree"
    modules = kernel.ModuleTree(tree / "lib" / "modules")
    filesystems = modules.filesystems()
    entries = [
        *_skeleton(),
        *_modules(modules, filesystems),
        *_userland(tree, directory),
    ]
    # Not compressed: an emulated processor takes 0.5 s to inflate an archive that QEMU copies in milliseconds.
    (directory / "initramfs").write_bytes(archive.pack(entries))
    os.link(base / "vmlinux", directory / "vmlinux")
    manifest = {
        "flavour": flavour,
        "filesystems": sorted(filesystems),
        "opens_luks": bool(modules.encryption()),
        "kernel": next((tree / "boot").glob("vmlinuz-*")).name.removeprefix("vmlinuz-"),
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))


def _skeleton() -> list[archive.Entry]:
    start = (
        f"#!/{_PYTHON} -ISB\n"
        f"import sys\nsys.path.insert(0, '{closure.AGENT_HOME}')\n"
        "from agent import init\ninit.main()\n"
    )
    mount_points = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "var")
    return [
        archive.file("init", start.encode(), executable=True),
        # The kernel opens it for PID 1 before anything is mounted.
        archive.character_device("dev/console", 5, 1),
        archive.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
        archive.file("etc/group", b"root:x:0:\n"),
        *(archive.directory(path) for path in mount_points),
    ]


def _modules(modules: kernel.ModuleTree, filesystems: dict[str, list[str]]) -> list[archive.Entry]:
    boot, encryption = modules.boot_order(), modules.encryption()
    plan = {"boot": boot, "filesystems": filesystems, "encryption": encryption}
    needed = {name for names in (boot, encryption, *filesystems.values()) for name in names}
    files = [archive.file(f"lib/modules/{n}.ko", modules.path(n).read_bytes()) for n in needed]
    listing = json.dumps(plan, sort_keys=True).encode()
    return [*files, archive.file("lib/modules/plan.json", listing)]


def _userland(tree: Path, scratch: Path) -> list[archive.Entry]:
    with tempfile.TemporaryDirectory(dir=scratch) as output:
        files = _imported(tree, Path(output))
        content = {place: Path(source).read_bytes() for place, source in files.items()}
    extensions = [Path(source) for source in files.values() if source.endswith(".so")]
    tools = [tree / "sbin" / name for name in (*format.PROGRAMS, luks.CRYPTSETUP)]
    libraries = _libraries(tree, [tree / _PYTHON, *tools, *extensions])
    busybox = (tree / "bin/busybox").read_bytes()
    applets = packages.run((str(tree / "bin/busybox"), "--list")).decode().split()
    return [
        *(archive.file(place.lstrip("/"), data) for place, data in content.items()),
        *(
            archive.file(f"{_LIBRARIES}/{p.name}", p.read_bytes(), executable=True)
            for p in libraries
        ),
        archive.file(
            _LOADER, (tree / _LIBRARIES / Path(_LOADER).name).read_bytes(), executable=True
        ),
        archive.file(_PYTHON, (tree / _PYTHON).read_bytes(), executable=True),
        archive.symlink("usr/bin/python3", "python3.11"),
        *(
            archive.file(f"usr/sbin/{tool.name}", tool.read_bytes(), executable=True)
            for tool in tools
        ),
        archive.file("bin/busybox", busybox, executable=True),
        *(archive.symlink(f"bin/{name}", "busybox") for name in applets if name != "busybox"),
    ]


def _imported(tree: Path, output: Path) -> dict[str, str]:
    argv = (
        *_interpreter(tree),
        # A module's byte code depends on earlier reads: no byte code of this checkout is read.
        *(str(tree / _PYTHON), "-ISB", "-X", f"pycache_prefix={output}/none"),
        str(_HERE / "closure.py"),
        *(str(_HERE), str(tree), str(output)),
        *_AGENT_MODULES,
        *_WORKLOAD_MODULES,
    )
    files: dict[str, str] = json.loads(packages.run(argv))
    return files


def _libraries(tree: Path, binaries: list[Path]) -> list[Path]:
    """Shared libraries of `binaries`, resolved by the guest's own loader and nothing of this machine."""
    libraries = set()
    for binary in binaries:
        listing = packages.run((*_interpreter(tree), "--list", str(binary))).decode()
        paths = (word for line in listing.splitlines() for word in line.split() if word[0] == "/")
        libraries |= {Path(p) for p in paths if Path(p).name != Path(_LOADER).name}
    return sorted(libraries)


def _interpreter(tree: Path) -> tuple[str, ...]:
    search = f"{tree / _LIBRARIES}:{tree / 'usr' / _LIBRARIES}"
    return (str(tree / _LIBRARIES / Path(_LOADER).name), "--library-path", search)


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unfinished in cache.glob(".building-*"):
            shutil.rmtree(unfinished)
        yield


def _prune(cache: Path) -> None:
    """Remove images of earlier sources except for the newest few, from which a VM may be starting."""
    for pattern, kept in (("image-*", _KEPT_IMAGES), ("base-*", _KEPT_BASES)):
        oldest_first = sorted(cache.glob(pattern), key=lambda path: path.stat().st_mtime)
        for outdated in oldest_first[:-kept]:
            shutil.rmtree(outdated)


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A directory that becomes `target` when the block succeeds, and nothing when it does not."""
    building = target.with_name(f".building-{target.name}")
    building.mkdir()
    try:
        yield building
        # A directory with this name must be complete even after a power cut; once per build, sync(2) is affordable.
        os.sync()
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
