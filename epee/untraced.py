"""Exclusion of calls between ranks from torch.compile: each is a graph break, and runs as it does without compiling.

The code that moves tokens reads words that other processes write, and maps memory by address; a compiler that traces
into it finds objects it does not know and fails (numpy buffers, process groups), or takes a value that a peer wrote
once for a constant. Between such calls a function is compiled as usual.

`torch.compiler.disable` does that, but imports the compiler (1.4 s, torch 2.13), and takes 0.6 us a call. A function is
therefore marked like one that it has made (`torch_private.py`), which costs nothing per call. Where torch does not know
such marks, a function is wrapped, and the compiler turned off once it has been imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from .torch_private import exclude_from_compiler

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_WHY = "a call between ranks"


def untraced(function: _Function) -> _Function:
    """Return `function` so that torch.compile neither traces into it nor into what it calls."""
    if not exclude_from_compiler(function, _WHY):
        return _wrapped(function)
    return function


def _wrapped(function: _Function) -> _Function:
    """Return a function that turns the compiler off, once there is one, and calls `function`."""
    disabled: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call it, with the compiler off."""
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function, reason=_WHY)
        return disabled(*args, **kwargs)

    # The compiler counts how often it has compiled a code object, and warns and stops at 8: one for each function.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)  # type: ignore[return-value]


def untraced_methods(cls: _Class) -> _Class:
    """Let all public methods that a class itself defines be `untraced`; returns the class."""
    members = [(name, member) for name, member in vars(cls).items() if isinstance(member, FunctionType)]
    made = {member: untraced(member) for name, member in members if not name.startswith("_")}
    for name, member in members:
        if member in made:  # under all its names, including torch's old ones with an underscore
            setattr(cls, name, made[member])
    return cls
