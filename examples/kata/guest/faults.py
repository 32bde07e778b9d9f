"""The errors of building a guest image."""

from pathlib import Path

from crust.core import errors


class PackagesUnavailable(errors.PeerUnavailable):
    """apt cannot find or fetch a package of the guest image."""

    def __init__(self, packages: tuple[str, ...], reason: str) -> None:
        super().__init__(
            f"cannot fetch the guest's packages ({', '.join(packages)})",
            why=reason,
            hint="run `apt-get update` and check the sources of this machine",
        )


class ImageToolFailed(errors.RuntimeFailed):
    """A program that the builder runs did not succeed."""

    def __init__(self, argv: tuple[str, ...], reason: str) -> None:
        super().__init__(
            f"{argv[0]} failed while building the guest image",
            why=reason,
            hint="install the packages of `make setup` and build again",
        )


class UnknownKernelFormat(errors.Unsupported):
    """This builder cannot open the kernel image."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path.name} is not a kernel image this builder knows",
            why=reason,
            hint="use a Debian 12 kernel package",
        )


class KernelModuleMissing(errors.NotFound):
    """The kernel package lacks a module that the guest needs."""

    def __init__(self, module: str) -> None:
        super().__init__(
            f"kernel module {module} is not in the kernel package",
            hint="choose another kernel flavour",
        )
