"""The guest's kernel: the order of its modules, and the ELF in its file."""

import lzma
import struct
import zlib
from pathlib import Path

import pytest

from examples.kata.guest import faults, kernel


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
