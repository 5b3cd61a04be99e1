"""What becomes of a collective whose arguments are refused, or whose tensors lie on a GPU.

A call that is refused here raises its error, and its sequence number is used up all the same: the peers get a
`MismatchError` with the reason, so nobody waits for a call that does not come. A call on tensors of a GPU is made
there (`backend/cuda`), or run again on copies of them (`staging.py`); calls on CPU tensors pay nothing for that. A
profiler sees each call as a range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..arrays import real_tensors
from ..engine.engine import Engine
from ..engine.membership.judge import LOSS
from ..engine.tensors import NeedsStaging
from ..errors import (
    EpeeError,
    InvalidArgument,
    PeerError,
    RankFailedError,
    UnsupportedError,
    is_of_handler,
    is_own,
    named,
)
from ..profiling import is_profiling, range_of
from .cuda.interface import NOT_SERVED, is_on_gpu
from .staging import Staging
from .work import Ended, is_loss

if TYPE_CHECKING:
    from .cuda.half import DeviceHalf

_Method = TypeVar("_Method", bound=Callable[..., Any])


class HasCollectives(Protocol):
    """What has collectives: the process group."""

    _engine: Engine
    _staging: Staging
    _on_device: DeviceHalf | None


def collective(name: str) -> Callable[[_Method], _Method]:
    """Tell the peers when the arguments of a collective are refused."""

    def decorate(method: _Method) -> _Method:
        """Return `method` with that, and with the way of tensors on a GPU."""

        @functools.wraps(method)
        def entered(self: HasCollectives, *args: Any, **kwargs: Any) -> Any:
            """Call it, as a range of a profiler if one runs."""
            if not is_profiling():
                return call(self, args, kwargs)
            with range_of(name, (self, *args)):
                return call(self, args, kwargs)

        def call(self: HasCollectives, args: Any, kwargs: Any) -> Any:
            """Call it; not as `*args`, which costs 0.1 us for each function that passes them on."""
            seq = self._engine.seq
            if self._on_device is not None and is_on_gpu(args):
                with real_tensors():
                    done = self._on_device.run(method.__name__, args, kwargs)
                if done is not NOT_SERVED:
                    return done
            try:
                return method(self, *args, **kwargs)
            except NeedsStaging:
                pass  # below, where a further error is not one during this one
            except (InvalidArgument, UnsupportedError) as exc:
                if is_own(exc):
                    self._engine.refuse(name, exc)
                raise
            except EpeeError as exc:
                if not is_own(exc):
                    raise
                is_told = isinstance(exc, RankFailedError) and exc.op == LOSS  # instead of a call that had ended
                if isinstance(exc, RankFailedError) and self._engine.seq == seq and not is_told:  # its root is lost
                    self._engine.refuse(name, exc)  # else the call was issued: all ranks have counted it
                named(exc, self._engine.box.label.text)
                if self._engine.reports_losses and isinstance(exc, PeerError) and is_loss(exc):
                    return Ended(self._engine, exc)
                raise
            except Exception as exc:
                # numpy's or torch's own word about an argument, or no memory
                if self._engine.seq == seq and not is_of_handler(exc):
                    self._engine.refuse(name, exc)
                raise
            with real_tensors():
                return self._staging.run(name, lambda *there, **named: call(self, there, named), args, kwargs)

        return entered  # type: ignore[return-value]

    return decorate
