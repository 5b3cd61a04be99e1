"""Stand-in for operators that return objects of a client's own class, for a torch that has none (before 2.13).

torchtitan's hybridep.py registers its functions by `torch.library.custom_op` and calls them as `torch.ops.hybridep.*`.
What is used of that without a compiler is here by `torch.autograd.Function`: the same functions, the same backward.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


class EagerOperator:
    """What `torch.library.custom_op` makes of a function, without schema, fake kernels and dispatcher."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._init_fn = function
        self._signature = inspect.signature(function)
        self._call: Callable[..., Any] = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._call(*bound.args)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep nothing: only compilers ask for shapes without values."""
        return function

    def register_kernel(self, device_type: str) -> Callable[..., Any]:
        """Keep nothing: the function is called on any device."""
        return lambda function: function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Call through a Function with this backward from now on."""
        function = self._init_fn

        class Differentiable(torch.autograd.Function):
            """The operator under autograd."""

            @staticmethod
            def forward(*args: Any) -> Any:
                return function(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                setup_context(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return backward(ctx, *grads)

        self._call = Differentiable.apply


@contextmanager
def stood_in(namespace: str) -> Iterator[None]:
    """Let the files that are imported within find such operators in `torch.library` and `torch.ops`."""
    found = SimpleNamespace()

    def custom_op(name: str, **options: Any) -> Callable[[Callable[..., Any]], EagerOperator]:
        """Return a decorator, as `torch.library.custom_op` does."""

        def decorate(function: Callable[..., Any]) -> EagerOperator:
            operator = EagerOperator(function)
            setattr(found, name.removeprefix(f"{namespace}::"), operator)
            return operator

        return decorate

    setattr(torch.ops, namespace, found)  # for good: it is looked up in each call
    opaque = importlib.import_module("torch._library.opaque_object")
    with (
        mock.patch.object(torch.library, "custom_op", custom_op),
        mock.patch.object(opaque, "register_opaque_type", return_value=None),
    ):
        yield
