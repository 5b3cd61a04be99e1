"""Stand-ins of tests for code of epee: what they raise counts as raised by epee itself.

Whether an exception interrupts a call or is its outcome is told by where it was raised (`epee.errors.is_own`), so a
stand-in has to look as if it lay in epee's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import epee

_Function = TypeVar("_Function", bound=Callable[..., Any])


def stand_in(function: _Function) -> _Function:
    """Let a function, not those defined inside it, look as if it were one of epee's."""
    code: Any = function
    code.__code__ = code.__code__.replace(co_filename=str(Path(epee.__file__).parent / "stand_in.py"))
    return function
