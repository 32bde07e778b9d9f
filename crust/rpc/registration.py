"""Why the registration of a runtime handler is refused: by the proxy, and by the test kit for authors of runtimes."""

from crust.core import errors


class InvalidRegistration(errors.InvalidRequest):
    """A handler's RegisterRequest is malformed."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "the runtime handler cannot be registered",
            why=why,
            hint="correct the RegisterRequest: specs/proto/crust/wire/v1/handlers.proto",
        )


class HandlerNameTaken(errors.Conflict):
    """Another registered handler has the name."""

    def __init__(self, name: str, endpoint: str) -> None:
        super().__init__(
            f"runtime handler {name!r} is registered already",
            why=f"the registered one serves on {endpoint}",
            hint="stop it first, or register under another name",
        )
