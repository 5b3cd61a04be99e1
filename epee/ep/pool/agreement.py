"""The messages between ranks before a dispatch without a known bound, in one exchange.

Each rank sends what it is about to do, or that its call is refused; from equal answers all ranks conclude alike:
continue, make more room, or raise. `BufferPool.agree` and `BufferPool.refuse_wish` send these records;
`BufferPool.most` sends numbers, or a refusal, in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...errors import InvalidArgument, MismatchError, ProtocolError
from ...gpu.payload import DTYPE_CODES
from .needs import Wish

_REASON_BYTES = 120
_MOST_TOKENS = 1 << 31  # the matrices that follow from the numbers are int32
_EQUAL = ("hidden", "dtype", "num_topk", "num_experts", "num_worst_tokens")
_NUM_WORDS = 7  # before the rows for each rank: refused, then the wish


def pack_wish(wish: Wish) -> bytes:
    """Return the record of a rank that continues; its length depends on the number of ranks only."""
    words = (
        wish.hidden,
        DTYPE_CODES.index(wish.dtype),
        wish.num_topk,
        wish.num_experts,
        wish.num_worst_tokens,
        wish.num_tokens,
    )
    return _form(len(wish.num_sent)).pack(0, *words, *wish.num_sent, b"")


def pack_refusal(num_ranks: int, error: Exception) -> bytes:
    """Return the record of a rank whose arguments are wrong, as long as that of a wish."""
    return _form(num_ranks).pack(1, *[0] * (_NUM_WORDS - 1), *[0] * num_ranks, _reason(error))


def pack_numbers(numbers: Sequence[int], refusal: Exception | None) -> bytes:
    """Return the record of numbers (64 bits, not negative); with a refusal they are not read."""
    reason = b"" if refusal is None else _reason(refusal)
    return _form_of_numbers(len(numbers)).pack(refusal is not None, *numbers, reason)


def most_of(records: Sequence[bytes], count: int) -> list[int]:
    """Return, position by position, the largest of `count` numbers from the records of all ranks.

    Raises:
        MismatchError: a rank was refused; the same text on all others.
    """
    found = []
    for rank, data in enumerate(records):
        refused, *numbers, reason = _form_of_numbers(count).unpack(data)
        if refused:
            raise _refused(rank, reason)
        found.append(numbers)
    return [max(each) for each in zip(*found, strict=True)]


def conclude(records: Sequence[bytes]) -> list[Wish]:
    """Return the wishes of all ranks from their records, in rank order; all ranks conclude alike.

    Raises:
        MismatchError: they do not fit together, or a rank was refused; the same text on all others.
        InvalidArgument: `num_worst_tokens` is too small for some rank; the same text on all.
        ProtocolError: a record holds what no rank can mean.
    """
    wishes = [_unpack(rank, data, len(records)) for rank, data in enumerate(records)]
    _check_equal(wishes)
    _check_worst(wishes)
    return wishes


def _form(num_ranks: int) -> struct.Struct:
    return struct.Struct(f"<{_NUM_WORDS + num_ranks}q{_REASON_BYTES}s")


def _form_of_numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<?{count}Q{_REASON_BYTES}s")


def _reason(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".encode()[:_REASON_BYTES]


def _refused(rank: int, reason: bytes) -> MismatchError:
    text = reason.rstrip(b"\0").decode("utf-8", "replace")
    return MismatchError(f"dispatch: rank {rank} refused its call, so no rank made it: {text}")


def _unpack(rank: int, data: bytes, num_ranks: int) -> Wish:
    refused, *words, reason = _form(num_ranks).unpack(data)
    if refused:
        raise _refused(rank, reason)
    hidden, dtype, num_topk, num_experts, num_worst_tokens, num_tokens, *num_sent = words
    can_be = min(words) >= 0 and dtype < len(DTYPE_CODES) and max(num_sent) <= num_tokens < _MOST_TOKENS
    if not can_be:
        raise ProtocolError(f"dispatch: rank {rank} says {words} of its call, which cannot be")
    return Wish(hidden, DTYPE_CODES[dtype], num_topk, num_experts, num_worst_tokens, num_tokens, tuple(num_sent))


def _check_equal(wishes: list[Wish]) -> None:
    first = wishes[0]
    for rank, wish in enumerate(wishes):
        for name in _EQUAL:
            mine, other = getattr(first, name), getattr(wish, name)
            if mine != other:
                raise MismatchError(
                    f"dispatch: ranks disagree about {name}: rank 0 has {mine}, rank {rank} has {other}; "
                    "give all ranks the same"
                )


def _check_worst(wishes: list[Wish]) -> None:
    worst = wishes[0].num_worst_tokens
    for rank in range(len(wishes)):
        num_recv = sum(wish.num_sent[rank] for wish in wishes)
        if 0 < worst < num_recv:
            raise InvalidArgument(
                f"dispatch: num_worst_tokens must be at least what a rank receives, got {worst}, "
                f"but rank {rank} receives {num_recv} rows"
            )
