"""What the ranks of a V1 buffer tell each other before a fresh dispatch, in one exchange.

V1 is told per call how many tokens, experts and channels there are, and no bound for any of them. So each rank says
what it is about to do; from equal answers all ranks conclude alike: go on, make more room, or raise.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass

import torch

from epee.compat.deep_ep.shared.rooms import Need, Rooms
from epee.ep.config import DTYPE_CODES
from epee.errors import EpeeError, InvalidArgument, MismatchError, ProtocolError

_log = logging.getLogger(__name__)
_REASON_BYTES = 120
_MOST_TOKENS = 1 << 31  # DeepEP's matrices are int32
_EQUAL = ("hidden", "dtype", "num_topk", "num_experts", "num_worst_tokens")


@dataclass(frozen=True)
class Wish:
    """What one rank is about to dispatch.

    Attributes:
        hidden, num_topk, num_experts, num_tokens: sizes; `num_topk` is 0 without top-k routing.
        dtype: place of the payload's dtype in `DTYPE_CODES`.
        num_worst_tokens: rows of the result, 0 for as many as there are.
        num_sent: rows for each rank.
    """

    hidden: int
    dtype: int
    num_topk: int
    num_experts: int
    num_worst_tokens: int
    num_tokens: int
    num_sent: tuple[int, ...]


def agree(rooms: Rooms, wish: Wish) -> list[Wish]:
    """Return the wishes of all ranks. Collective.

    Raises:
        MismatchError: they do not fit together, or a rank was refused; the same text on all others.
        InvalidArgument: `num_worst_tokens` is too small for some rank; the same text on all.
    """
    num_ranks = len(wish.num_sent)
    form = _form(num_ranks)
    numbers = [getattr(wish, name) for name in (*_EQUAL, "num_tokens")]
    wishes = []
    for rank, data in enumerate(rooms.share(form.pack(0, *numbers, *wish.num_sent, b""))):
        refused, *words, reason = form.unpack(data)
        if refused:
            text = reason.rstrip(b"\0").decode("utf-8", "replace")
            raise MismatchError(f"dispatch: rank {rank} refused its call, so nobody's took place: {text}")
        hidden, dtype, num_topk, num_experts, num_worst_tokens, num_tokens, *num_sent = words
        told = Wish(hidden, dtype, num_topk, num_experts, num_worst_tokens, num_tokens, tuple(num_sent))
        if min(words) < 0 or max(told.num_sent) > told.num_tokens or told.num_tokens >= _MOST_TOKENS:
            raise ProtocolError(f"dispatch: rank {rank} says {told}, which cannot be")
        wishes.append(told)
    _judge(wishes)
    return wishes


def refuse(rooms: Rooms, num_ranks: int, error: Exception) -> None:
    """Take part in `agree` as the rank whose arguments are wrong; `error` is still what the caller raises."""
    reason = f"{type(error).__name__}: {error}".encode()[:_REASON_BYTES]
    try:
        rooms.share(_form(num_ranks).pack(1, *[0] * 6, *[0] * num_ranks, reason))
    except EpeeError as problem:
        _log.warning("could not tell the peers about a refused call: %s", problem)


def need_of(wishes: list[Wish], device: torch.device) -> Need:
    """Return the room that the call needs."""
    first = wishes[0]
    return Need(
        layout="rank",
        num_experts=first.num_experts,
        hidden=first.hidden,
        num_topk=max(1, first.num_topk),
        num_tokens=max(wish.num_tokens for wish in wishes),
        itemsize=max(2, DTYPE_CODES[first.dtype].itemsize),
        device=device,
    )


def _form(num_ranks: int) -> struct.Struct:
    return struct.Struct(f"<{7 + num_ranks}q{_REASON_BYTES}s")


def _judge(wishes: list[Wish]) -> None:
    first = wishes[0]
    for rank, wish in enumerate(wishes):
        for name in _EQUAL:
            mine, other = getattr(first, name), getattr(wish, name)
            if mine != other:
                raise MismatchError(
                    f"dispatch: ranks disagree about {name}: rank 0 has {mine}, rank {rank} has {other}; "
                    "give all ranks the same"
                )
    for rank in range(len(wishes)):
        num_recv = sum(wish.num_sent[rank] for wish in wishes)
        if 0 < first.num_worst_tokens < num_recv:
            raise InvalidArgument(
                f"dispatch: num_worst_tokens must be at least what a rank receives, got {first.num_worst_tokens}, "
                f"but rank {rank} receives {num_recv} rows"
            )
