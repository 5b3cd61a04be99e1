"""`BackendOptions`: the settings of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from .. import env
from ..engine.limits import MAX_RANKS, MAX_STAGING_BYTES, MIN_STAGING_BYTES
from ..errors import InvalidArgument
from ..torch_private import CBackend
from ..values import is_whole, seconds, shown
from ..view.group import check_policy


class BackendOptions(CBackend.Options):
    """Options of a group of the backend "epee"; pass it as `pg_options`.

    Args:
        active_ranks: int32 tensor `[max_group_size]` of ones and zeros that the backend keeps up to date: 1 = the rank
            takes part. A rank that died or left gets its 0 when a call of this process meets the loss, or when
            `group.active_ranks()` is asked. It must be contiguous, on the CPU or a GPU, and belong to one group. On a
            GPU it is written on the current stream of the thread whose call meets the loss, without waiting. What a
            program writes into it is not read. Ranks beyond its end are shown by `group.active_ranks()` only. None: the
            backend keeps the mask for itself.
        is_extension: this process joins a running group in the rank of a lost process, or beyond its last one.
        max_group_size: length of `active_ranks`, 1 ... 64, for groups that shall grow. None: the size at creation.
            It is no limit: a group may grow to 64 ranks.
        fault_mode: "raise": the call that loses a rank raises `RankFailedError` on all survivors, the next one runs
            without it. "mask": the call itself succeeds over the remaining ranks. With `active_ranks` it is "mask".
        on_stall: the handling of a living rank that does not come until a call's timeout. "error": the call raises
            `CommTimeoutError`, no rank leaves. "evict": it is voted out, like a dead one. "wait": the call waits on and
            a warning names the rank. None: "evict" in mode "mask", else "error".
        op_timeout: `timedelta` or seconds that a call waits for a silent peer. None: EPEE_TIMEOUT_S, else torch's
            `timeout`, which in any case is how long the ranks wait for each other while the group is made.
        staging_bytes: size of one staging buffer (two send, two hold reduced data), a multiple of 4096, at least
            64 KiB. None: `EPEE_STAGING_BYTES`, 16 MiB.

    Raises:
        InvalidArgument: a value breaks its rule; the message names it.

    Attributes:
        reports_losses: a call that a loss ends raises nothing; its `Work` reports it (`lost_ranks`, `exception`).
            This and what follows is there for other libraries' names, and False.
        counts_present: the group's size is 1 + the highest rank that takes part (or is still shown, `keeps_lost`),
            lists have so many entries, and those of excluded ranks are filled with zeros.
        joins_later: with `is_extension`: the process works alone until it calls `join`.
        shows_at_once: that tensor, the size of the group and `shown_epoch` show a loss as soon as this process knows of
            it, not with the call that meets it.
        keeps_lost: the tensor `active_ranks` keeps the 1 of a lost rank until the program removes it.
    """

    reports_losses = False
    shows_at_once = False
    keeps_lost = False
    joins_later = False
    counts_present = False

    def __init__(
        self,
        active_ranks: torch.Tensor | None = None,
        is_extension: bool = False,
        max_group_size: int | None = None,
        fault_mode: str = "raise",
        op_timeout: timedelta | float | None = None,
        staging_bytes: int | None = None,
        on_stall: str | None = None,
    ) -> None:
        timeout_s = _seconds(op_timeout)
        super().__init__("epee", timedelta(seconds=timeout_s) if timeout_s else timedelta(minutes=30))
        self.active_ranks = _mask(active_ranks)
        self.is_extension = _flag(is_extension, "is_extension")
        self.max_group_size = _size(max_group_size)
        self.fault_mode, self.on_stall = check_policy(fault_mode, on_stall, has_mask=active_ranks is not None)
        self.op_timeout_s = timeout_s
        self.staging_bytes = _staging(staging_bytes)
        if active_ranks is not None and max_group_size is not None and active_ranks.numel() != max_group_size:
            raise InvalidArgument(
                f"active_ranks must have max_group_size={max_group_size} elements, got {active_ranks.numel()}"
            )

    @property
    def mode(self) -> str:
        """`fault_mode` and `on_stall` as one word of `MODES`, on which all ranks of a group must agree."""
        return f"{self.fault_mode}/{self.on_stall}"

    def check_group(self, num_ranks: int) -> None:
        """Check the options that depend on the group's size.

        Raises:
            InvalidArgument: the group is larger than it may be, or the mask has another length.
        """
        if num_ranks > MAX_RANKS:
            raise InvalidArgument(f"a group of the backend epee has at most {MAX_RANKS} ranks, got {num_ranks}")
        if self.max_group_size is not None and num_ranks > self.max_group_size:
            raise InvalidArgument(f"max_group_size is {self.max_group_size}, the group has {num_ranks} ranks; raise it")
        limit = self.max_group_size or num_ranks
        if self.active_ranks is not None and self.active_ranks.numel() != limit:
            raise InvalidArgument(
                f"active_ranks must have one element per rank ({limit}), got {self.active_ranks.numel()}"
            )


def _seconds(value: timedelta | float | None) -> float:
    return 0.0 if value is None else seconds(value, "op_timeout")


def _mask(value: Any) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int32 or value.dim() != 1:
        told = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
        raise InvalidArgument(f"active_ranks must be an int32 tensor [max_group_size], got {told}")
    if not (value.is_cpu or value.is_cuda) or not value.is_contiguous():
        raise InvalidArgument(
            f"active_ranks must be contiguous, on the CPU or a GPU, got strides {value.stride()} on {value.device}; "
            "the backend writes to it"
        )
    if not bool(((value == 0) | (value == 1)).all()):
        raise InvalidArgument(f"active_ranks must hold zeros and ones, got {value.tolist()}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be True or False, got {shown(value)}")
    return value


def _size(value: Any) -> int | None:
    if value is None:
        return None
    if not is_whole(value, 1, MAX_RANKS):
        raise InvalidArgument(f"max_group_size must be a number from 1 to {MAX_RANKS}, got {shown(value)}")
    return int(value)


def _staging(value: Any) -> int:
    name = "staging_bytes"
    if value is None:
        name, value = "EPEE_STAGING_BYTES", env.get_int("EPEE_STAGING_BYTES")
    if not is_whole(value, MIN_STAGING_BYTES, MAX_STAGING_BYTES) or value % 4096:
        raise InvalidArgument(
            f"{name} must be a multiple of 4096 from {MIN_STAGING_BYTES} to {MAX_STAGING_BYTES}, got {shown(value)}"
        )
    return int(value)
