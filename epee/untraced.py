"""Keep torch.compile out of calls between ranks: each is a graph break, and runs as it does without compiling.

What moves tokens reads words that other processes write, and maps memory by address; a compiler that traces into it
finds objects it does not know and fails (numpy buffers, process groups), or takes what a peer said once for a constant.
Between such calls a function is compiled as ever.

`torch.compiler.disable` does that, but imports the compiler (1.4 s, torch 2.13), and takes 0.6 us. So it is asked only
where a compiler looks at the interpreter's frames just now, which is not so in eager code, nor below another such call
(0.2 us more).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
# Who looks at new frames, None in eager code. A private word of torch's: without it the compiler is always turned off.
_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)
_ENTRIES = (__name__, "epee.profiling")  # the modules whose functions stand before methods
_BETWEEN = (*_ENTRIES, "torch._dynamo.eval_frame")


def is_compiling() -> bool:
    """Return whether a compiler would trace into what is called now; asked where `torch._dynamo` has been imported."""
    return is_dynamo_compiling() or _callback() is not None


def untraced(function: _Function) -> _Function:
    """Return `function` so that torch.compile neither traces into it nor into what it calls."""
    disabled: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call it, with the compiler off."""
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or not is_compiling():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return as_entry(function, call)


def as_entry(function: _Function, call: Any) -> _Function:
    """Return `call` under the name of `function`, before which it stands."""
    # The compiler counts how often it has compiled a code object, and warns and stops at 8: one for each function.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.update_wrapper(call, function)  # type: ignore[return-value]


def caller() -> str:
    """Return the module that called the untraced method which the function asking here belongs to.

    The frames of a call: the one that asks, its method, what is between (this module, torch's compiler), who called.
    """
    frame = sys._getframe(2).f_back  # behind the method
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def untraced_methods(cls: _Class) -> _Class:
    """Let all public methods that a class itself defines be `untraced`; returns the class.

    Those that `profiling` has made ranges are so already.
    """
    members = [(name, member) for name, member in vars(cls).items() if isinstance(member, FunctionType)]
    bare = [(name, member) for name, member in members if member.__globals__["__name__"] not in _ENTRIES]
    made = {member: untraced(member) for name, member in bare if not name.startswith("_")}
    for name, member in bare:
        if member in made:  # under all its names, torch's old ones with an underscore as well
            setattr(cls, name, made[member])
    return cls
