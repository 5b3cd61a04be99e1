"""Every call of the backend on CPU tensors as a case: what it is given, how it is started, what must come out.

A case is made by a function of the rank, the number of ranks and `new`, which puts values into a tensor of the layout
under test. So a test of a property that all calls have goes through `CASES` and both layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .cases import all_gather_single, reduce_scatter_single

New = Callable[[torch.Tensor], torch.Tensor]
COUNT = 5


class Call(NamedTuple):
    """One call of one rank.

    Attributes:
        written: the tensors that it writes.
        read: those that it only reads.
        expected: what `written` holds afterwards.
        start: makes the call; with True it is asynchronous, and its works are returned.
    """

    written: list[torch.Tensor]
    read: list[torch.Tensor]
    expected: list[torch.Tensor]
    start: Callable[[bool], Sequence[Any]]


def plain(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with these values."""
    return values.clone(memory_format=torch.contiguous_format)


def strided(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these values, of which every third element of its memory belongs to it."""
    view = torch.zeros(*values.shape, 3, dtype=values.dtype)[..., 1]
    view.copy_(values)
    return view


LAYOUTS: dict[str, New] = {"contiguous": plain, "strided": strided}


def own(rank: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank contributes."""
    return (torch.arange(count) + 10 * rank + 1).to(dtype)


def total(num_ranks: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of what all contribute."""
    return sum((own(rank, count, dtype) for rank in range(1, num_ranks)), own(0, count, dtype))


def nothing(count: int = COUNT) -> torch.Tensor:
    """Return what an output holds before its call."""
    return torch.full((count,), -1.0)


def _works(work: Any) -> list[Any]:
    return [] if work is None else list(work) if isinstance(work, list) else [work]


def _all_reduce(dtype: torch.dtype, count: int = COUNT) -> Callable[[int, int, New], Call]:
    def make(rank: int, num_ranks: int, new: New) -> Call:
        x = new(own(rank, count, dtype))
        return Call([x], [], [total(num_ranks, count, dtype)], lambda later: _works(dist.all_reduce(x, async_op=later)))

    return make


def _broadcast(rank: int, num_ranks: int, new: New) -> Call:
    x = new(own(rank))
    return Call([x], [], [own(1)], lambda later: _works(dist.broadcast(x, 1, async_op=later)))


def _reduce(rank: int, num_ranks: int, new: New) -> Call:
    x = new(own(rank))
    expected = total(num_ranks) if rank == 0 else own(rank)
    return Call([x], [], [expected], lambda later: _works(dist.reduce(x, 0, async_op=later)))


def _all_gather(rank: int, num_ranks: int, new: New) -> Call:
    x, outs = new(own(rank)), [new(nothing()) for _ in range(num_ranks)]
    expected = [own(src) for src in range(num_ranks)]
    return Call(outs, [x], expected, lambda later: _works(dist.all_gather(outs, x, async_op=later)))


def _all_gather_single(rank: int, num_ranks: int, new: New) -> Call:
    x, out = new(own(rank)), new(nothing(COUNT * num_ranks))
    expected = torch.cat([own(src) for src in range(num_ranks)])
    return Call([out], [x], [expected], lambda later: _works(all_gather_single(out, x, async_op=later)))


def _gather(rank: int, num_ranks: int, new: New) -> Call:
    x = new(own(rank))
    outs = [new(nothing()) for _ in range(num_ranks)] if rank == 0 else []
    expected = [own(src) for src in range(num_ranks)] if rank == 0 else []
    return Call(outs, [x], expected, lambda later: _works(dist.gather(x, outs or None, 0, async_op=later)))


def _scatter(rank: int, num_ranks: int, new: New) -> Call:
    out = new(nothing())
    given = [new(own(dst)) for dst in range(num_ranks)] if rank == 0 else []
    return Call([out], given, [own(rank)], lambda later: _works(dist.scatter(out, given or None, 0, async_op=later)))


def _reduce_scatter(rank: int, num_ranks: int, new: New) -> Call:
    out, given = new(nothing()), [new(own(rank) + 100 * dst) for dst in range(num_ranks)]
    expected = total(num_ranks) + 100 * rank * num_ranks
    return Call([out], given, [expected], lambda later: _works(dist.reduce_scatter(out, given, async_op=later)))


def _reduce_scatter_single(rank: int, num_ranks: int, new: New) -> Call:
    out, given = new(nothing()), new(torch.cat([own(rank) + 100 * dst for dst in range(num_ranks)]))
    expected = total(num_ranks) + 100 * rank * num_ranks
    return Call([out], [given], [expected], lambda later: _works(reduce_scatter_single(out, given, async_op=later)))


def _all_to_all(rank: int, num_ranks: int, new: New) -> Call:
    outs, given = [new(nothing()) for _ in range(num_ranks)], [new(own(rank) + 100 * dst) for dst in range(num_ranks)]
    expected = [own(src) + 100 * rank for src in range(num_ranks)]
    return Call(outs, given, expected, lambda later: _works(dist.all_to_all(outs, given, async_op=later)))


def _all_to_all_single(rank: int, num_ranks: int, new: New) -> Call:
    out, given = new(nothing(num_ranks)), new(own(rank, num_ranks))
    expected = torch.cat([own(src, num_ranks)[rank : rank + 1] for src in range(num_ranks)])
    return Call([out], [given], [expected], lambda later: _works(dist.all_to_all_single(out, given, async_op=later)))


def _all_reduce_coalesced(rank: int, num_ranks: int, new: New) -> Call:
    first, second = new(own(rank)), new(own(rank, 3))

    def start(later: bool) -> list[Any]:
        with dist.distributed_c10d._coalescing_manager(async_ops=later) as manager:
            dist.all_reduce(first)
            dist.all_reduce(second)
        return [manager] if later else []

    return Call([first, second], [], [total(num_ranks), total(num_ranks, 3)], start)


def _all_gather_coalesced(rank: int, num_ranks: int, new: New) -> Call:
    given = [new(own(rank)), new(own(rank, 3))]
    outs = [new(nothing(COUNT * num_ranks)), new(nothing(3 * num_ranks))]

    def start(later: bool) -> list[Any]:
        with dist.distributed_c10d._coalescing_manager(async_ops=later) as manager:
            for out, tensor in zip(outs, given, strict=True):
                all_gather_single(out, tensor)
        return [manager] if later else []

    expected = [torch.cat([own(src, count) for src in range(num_ranks)]) for count in (COUNT, 3)]
    return Call(outs, given, expected, start)


def _all_gather_lists(rank: int, num_ranks: int, new: New) -> Call:
    given = [new(own(rank)), new(own(rank, 3))]
    outs = [[new(nothing()), new(nothing(3))] for _ in range(num_ranks)]
    expected = [own(src, count) for src in range(num_ranks) for count in (COUNT, 3)]
    return Call(
        [out for outs_of in outs for out in outs_of],
        given,
        expected,
        lambda later: _works(dist.all_gather_coalesced(outs, given, async_op=later)),
    )


def _reduce_scatter_coalesced(rank: int, num_ranks: int, new: New) -> Call:
    given = [new(torch.cat([own(rank, n) + 100 * dst for dst in range(num_ranks)])) for n in (COUNT, 3)]
    outs = [new(nothing()), new(nothing(3))]

    def start(later: bool) -> list[Any]:
        with dist.distributed_c10d._coalescing_manager(async_ops=later) as manager:
            for out, tensor in zip(outs, given, strict=True):
                reduce_scatter_single(out, tensor)
        return [manager] if later else []

    return Call(outs, given, [total(num_ranks, n) + 100 * rank * num_ranks for n in (COUNT, 3)], start)


def _messages(rank: int, num_ranks: int, new: New) -> Call:
    x, out = new(own(rank)), new(nothing())
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def start(later: bool) -> list[Any]:
        works = [dist.isend(x, after), dist.irecv(out, before)]
        for work in [] if later else works:
            work.wait()
        return works

    return Call([out], [x], [own(before)], start)


def _any_source(rank: int, num_ranks: int, new: New) -> Call:
    x, out = new(own(rank)), new(nothing())

    def start(later: bool) -> list[Any]:
        works = [dist.isend(x, (rank + 1) % num_ranks), dist.irecv(out)]
        for work in [] if later else works:
            work.wait()
        return works

    return Call([out], [x], [own((rank - 1) % num_ranks)], start)


def _batch(rank: int, num_ranks: int, new: New) -> Call:
    x, out = new(own(rank)), new(nothing())
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def start(later: bool) -> list[Any]:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)])
        for work in [] if later else works:
            work.wait()
        return works

    return Call([out], [x], [own(before)], start)


CASES: dict[str, Callable[[int, int, New], Call]] = {
    "all_reduce": _all_reduce(torch.float32),
    "all_reduce bfloat16": _all_reduce(torch.bfloat16),
    "all_reduce float16": _all_reduce(torch.float16),
    "all_reduce int64": _all_reduce(torch.int64),
    "all_reduce in rounds": _all_reduce(torch.bfloat16, 700_000),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_reduce coalesced": _all_reduce_coalesced,
    "all_gather coalesced": _all_gather_coalesced,
    "all_gather of lists": _all_gather_lists,
    "reduce_scatter coalesced": _reduce_scatter_coalesced,
    "isend and irecv": _messages,
    "irecv from any": _any_source,
    "batch_isend_irecv": _batch,
}
