"""Calls of librados and librbd that a test counts, delays, notes or cuts short."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from crust.blockdriver.ceph import binding
from crust.blockdriver.engines.rbd.namespace import Namespace

Act = Callable[[str], object]


class Intercepted:
    """An object of the binding; `act` gets the name of each of its methods right before the call."""

    def __init__(self, real: Any, act: Act) -> None:
        self._real, self._act = real, act

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self._act(name)
            return method(*arguments, **named)

        return call


@contextmanager
def before_calls(patch: pytest.MonkeyPatch, act: Act) -> Iterator[None]:
    """`act` gets the name of each call of rbd.RBD and of an image; "open" is that of the image itself."""
    images, opened = vars(binding.Binding)["images"].fget, Namespace.image

    @contextmanager
    def image(*arguments: Any, **named: Any) -> Iterator[Any]:
        act("open")
        with opened(*arguments, **named) as real:
            yield Intercepted(real, act)

    with patch.context() as patching:
        intercepted = property(lambda self: Intercepted(images(self), act))
        patching.setattr(binding.Binding, "images", intercepted)
        patching.setattr(Namespace, "image", image)
        yield
