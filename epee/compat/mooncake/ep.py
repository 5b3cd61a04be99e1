"""`mooncake.ep`: re-exports `pg`, as Mooncake does. Its `Buffer` stands on GPU kernels that do not exist here yet."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError
from . import pg
from .pg import *  # noqa: F403

__all__ = [*pg.__all__, "Buffer"]


class Buffer:
    """Mooncake's GPU buffer. Not available: use `epee.Buffer`, whose `dispatch` and `combine` run on the CPU too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError("mooncake.ep.Buffer does not exist in this version; use epee.Buffer")
