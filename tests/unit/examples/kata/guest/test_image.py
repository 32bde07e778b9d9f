"""The parts of the image builder that need no package: archive, module order, digests, atomic directories."""

import lzma
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from examples.kata.guest import archive, faults, image, kernel, packages


def _module(depends: str = "", soft: str = "") -> bytes:
    fields = [b"name=x", f"depends={depends}".encode()]
    if soft:
        fields.insert(0, f"softdep=pre: {soft}".encode())
    return b"\x7fELF" + b"\0" + b"\0".join(fields) + b"\0vermagic=6.1\0"


def _tree(root: Path, modules: dict[str, bytes], builtin: str = "") -> kernel.ModuleTree:
    directory = root / "6.1" / "kernel"
    directory.mkdir(parents=True)
    for name, data in modules.items():
        (directory / f"{name}.ko").write_bytes(data)
    (root / "6.1" / "modules.builtin").write_text(builtin)
    return kernel.ModuleTree(root)


def test_module_order_puts_dependencies_first(tmp_path: Path) -> None:
    modules = {
        "top": _module("middle-one,low"),
        "middle-one": _module("low"),
        "low": _module(),
        "unrelated": _module(),
    }
    assert _tree(tmp_path, modules).order(["top", "low"]) == ["low", "middle_one", "top"]


def test_builtin_modules_are_not_loaded(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"top": _module("ring")}, "kernel/drivers/virtio/ring.ko\n")
    assert tree.order(["top", "ring"]) == ["top"]


def test_soft_dependency_is_loaded_first_if_present(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"top": _module(soft="helper absent"), "helper": _module()})
    assert tree.order(["top"]) == ["helper", "top"]


def test_modules_that_need_each_other_do_not_loop(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"a": _module(soft="b"), "b": _module(soft="a")})
    assert set(tree.order(["a"])) == {"a", "b"}


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(faults.KernelModuleMissing, match="ghost"):
        _tree(tmp_path, {"top": _module("ghost")}).order(["top"])


def test_filesystems_lists_only_what_the_kernel_has(tmp_path: Path) -> None:
    modules = {"xfs": _module("libcrc32c"), "libcrc32c": _module(), "crc32c_generic": _module()}
    tree = _tree(tmp_path, modules, "kernel/fs/ext4/ext4.ko\n")
    assert tree.filesystems() == {
        "ext4": ["crc32c_generic"],
        "xfs": ["crc32c_generic", "libcrc32c", "xfs"],
    }


def _bzimage(payload: bytes, path: Path) -> Path:
    head = bytearray(0x400)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    head[0x206:0x208] = (0x20F).to_bytes(2, "little")
    struct.pack_into("<II", head, 0x248, 16, len(payload) + 4)
    path.write_bytes(bytes(head) + b"\0" * 16 + payload + b"size" + b"trailing")
    return path


def _gzip(data: bytes) -> bytes:
    squeezer = zlib.compressobj(wbits=31)
    return squeezer.compress(data) + squeezer.flush()


@pytest.mark.parametrize("squeeze", [_gzip, lzma.compress])
def test_the_elf_inside_a_bzimage_is_found(tmp_path: Path, squeeze: "type[bytes]") -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 100
    assert kernel.extract_vmlinux(_bzimage(squeeze(elf), tmp_path / "vmlinuz")) == elf


@pytest.mark.parametrize("payload", [b"unknown payload", lzma.compress(b"not an ELF file")])
def test_unknown_kernel_format_is_an_error(tmp_path: Path, payload: bytes) -> None:
    with pytest.raises(faults.UnknownKernelFormat):
        kernel.extract_vmlinux(_bzimage(payload, tmp_path / "vmlinuz"))
    (tmp_path / "short").write_bytes(b"MZ")
    with pytest.raises(faults.UnknownKernelFormat):
        kernel.extract_vmlinux(tmp_path / "short")


def test_an_archive_is_read_back_by_cpio(tmp_path: Path) -> None:
    assert shutil.which("cpio"), "cpio is missing; make setup installs it"
    packed = archive.pack(
        [
            archive.file("bin/tool", b"#!/bin/sh\n", executable=True),
            archive.symlink("bin/alias", "tool"),
            archive.character_device("dev/console", 5, 1),
        ]
    )
    listing = subprocess.run(
        ["cpio", "-itv", "--quiet"], input=packed, capture_output=True, check=True, text=False
    )
    rows = [line.split() for line in listing.stdout.decode().splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [
        ("drwxr-xr-x", "bin"),
        ("lrwxrwxrwx", "tool"),
        ("-rwxr-xr-x", "bin/tool"),
        ("drwxr-xr-x", "dev"),
        ("crw-------", "dev/console"),
    ]


def test_the_same_content_is_the_same_archive_in_any_order() -> None:
    entries = [archive.file("b", b"2"), archive.file("a/c", b"1"), archive.directory("a")]
    assert archive.pack(entries) == archive.pack(entries[::-1])


def test_digest_depends_on_part_boundaries() -> None:
    assert image.digest_of([b"ab", b"c"]) != image.digest_of([b"a", b"bc"])
    assert image.digest_of([b"ab", b"c"]) == image.digest_of([b"ab", b"c"])


def test_a_build_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    target = tmp_path / "image-x"

    def build() -> None:
        with image._aside(target) as directory:
            (directory / "half").write_text("done")
            raise faults.KernelModuleMissing("x")

    with pytest.raises(faults.KernelModuleMissing):
        build()
    assert list(tmp_path.iterdir()) == []


def test_lock_removes_directories_of_a_killed_build(tmp_path: Path) -> None:
    (tmp_path / ".building-image-x" / "tree").mkdir(parents=True)
    with image._locked(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_a_package_is_fetched_by_its_version_epoch_included() -> None:
    package = packages.Package("zlib1g_1%3a1.2.13.dfsg-1_amd64.deb", "0" * 64)
    assert packages._spec(package) == "zlib1g=1:1.2.13.dfsg-1"
