"""What only a GPU buffer has, run on any platform: results of full capacity, events, late errors, places in memory.

Every function runs on one rank, with `epee.Buffer` on the emulated GPU or a real one (`tests/csrc/emulated_buffer.py`,
`tests/gpu/test_buffer_gpu.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee.gpu.event import Event
from tests.ep.buffer_cases import same_bits

HIDDEN, NUM_TOPK, NUM_LOCAL = 32, 3, 2


def make(num_ranks: int, **changes: Any) -> epee.Buffer:
    """A poisoned buffer for these cases."""
    os.environ["EPEE_POISON"] = "1"
    options = {
        "num_experts": NUM_LOCAL * num_ranks, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": 16,
        "timeout": 20.0, "max_recv_rows": 16 * num_ranks * NUM_TOPK,
    }  # fmt: skip
    return epee.Buffer(dist.group.WORLD, **{**options, **changes})


def tokens(buffer: epee.Buffer, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers, so that every sum is exact; routing with gaps; weights that are powers of two."""
    generator = torch.Generator().manual_seed(100 * seed + buffer.rank)
    shape = (num_tokens, NUM_TOPK)
    x = torch.randint(-8, 9, (num_tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    idx = torch.randint(-1, NUM_LOCAL * buffer.num_ranks, shape, generator=generator)
    weights = 2.0 ** torch.randint(-1, 2, shape, generator=generator)
    return tuple(value.to(buffer.config.device) for value in (x, idx, weights))  # type: ignore[return-value]


def times_sent(idx: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """`[num_tokens, 1]`: to how many ranks each token goes."""
    there = [((idx // NUM_LOCAL == rank) & (idx >= 0)).any(1) for rank in range(num_ranks)]
    return torch.stack(there).sum(0)[:, None]


def full_capacity(rank: int, num_ranks: int, layout: str) -> None:
    """sync=False: the rows, what tells them from the rest, and a combine of all of them."""
    with make(num_ranks) as buffer:
        for step, num_tokens in enumerate((16, 3, 0, 11)):
            x, idx, weights = tokens(buffer, num_tokens, step)
            want = buffer.dispatch(x, idx, weights, layout=layout, expert_alignment=4)
            got = buffer.dispatch(x, idx, weights, layout=layout, expert_alignment=4, sync=False)
            num_recv = want.handle.num_recv
            capacity = 16 * num_ranks if layout == "rank" else buffer.config.capacity(layout, 4)
            assert got.handle.num_recv == capacity == len(got.x)
            assert got.num_tokens_per_expert == []
            assert got.handle.recv_counts.tolist() == [num_recv, *want.num_tokens_per_expert]
            assert isinstance(got.x, torch.Tensor)
            assert isinstance(want.x, torch.Tensor)
            same_bits(got.x[:num_recv].cpu(), want.x.cpu(), "rows")
            for name in ("src_rank", "src_token"):
                value = getattr(got.handle, name)
                same_bits(value[:num_recv].cpu(), getattr(want.handle, name).cpu(), name)
                assert bool((value[num_recv:] == -1).all()), name
            if layout == "rank":
                assert got.topk_idx is not None
                assert want.topk_idx is not None
                same_bits(got.topk_idx[:num_recv].cpu(), want.topk_idx.cpu(), "topk_idx")
                assert bool((got.topk_idx[num_recv:] == -1).all())
            assert got.handle.num_received == want.handle.num_received
            assert got.handle.num_sent == want.handle.num_sent
            y = torch.full_like(got.x, torch.nan)  # rows that nobody received must not be read
            y[:num_recv] = want.x
            same_bits(buffer.combine(y, got.handle).x, buffer.combine(want.x, want.handle).x, "combine")
            again = buffer.dispatch(x + 1, handle=got.handle)
            assert len(again.x) == capacity
            assert isinstance(again.x, torch.Tensor)
            real = (want.handle.src_rank >= 0).cpu()
            same_bits(again.x[:num_recv].cpu()[real], want.x.cpu()[real] + 1, "cached")


def two_places(rank: int, num_ranks: int, layout: str) -> None:
    """Two micro-batches whose outputs are both in lent memory, if there is room, before either is combined."""
    with make(num_ranks, num_slots=4) as buffer:
        steps = [tokens(buffer, count, seed) for seed, count in enumerate((9, 16, 5))]
        received = [buffer.dispatch(x, idx, layout=layout) for x, idx, _ in steps]
        places = []
        for d in received:
            place = buffer.combine_input(d.handle)
            place.copy_(d.x)
            places.append(place)
        handles = [d.handle for d in received]
        del received, d
        plain = torch.stack(
            [torch.zeros(HIDDEN, dtype=torch.bfloat16, device=steps[0][0].device)] * handles[1].num_recv
        )
        assert not bool(buffer.combine(plain, handles[1]).x.any())  # from ordinary memory, in between
        for (x, idx, _), place, handle in zip(steps, places, handles, strict=True):
            count = times_sent(idx, num_ranks) if layout == "rank" else (idx >= 0).sum(1)[:, None]
            same_bits(buffer.combine(place, handle).x, x * count + 0.0, "combined in place")


def events(rank: int, num_ranks: int) -> None:
    """async_op, previous_event and events; on the emulated GPU everything is done at once."""
    with make(num_ranks) as buffer:
        x, idx, weights = tokens(buffer, 12)
        want = buffer.dispatch(x, idx, weights)
        d = buffer.dispatch(x, idx, weights, async_op=True, num_sms=1)
        assert isinstance(d.event, Event)
        d.event.wait()
        assert isinstance(d.x, torch.Tensor)
        assert isinstance(want.x, torch.Tensor)
        same_bits(d.x, want.x, "async rows")
        c = buffer.combine(d.x, d.handle, async_op=True, previous_event=d.event)
        last = buffer.combine(d.x, d.handle, previous_event=c.event, num_sms=2)
        last.event.synchronize()
        assert c.event.query()
        same_bits(c.x, x * times_sent(idx, num_ranks) + 0.0, "async sums")
        same_bits(last.x, c.x, "sums")


def late_errors(rank: int, num_ranks: int) -> list[str]:
    """A bad expert id in a call without CPU sync: raised by the next look, on every rank, and the buffer works on."""
    seen = []
    with make(num_ranks) as buffer:
        x, idx, _ = tokens(buffer, 6)
        bad = idx.clone()
        if rank == 0:
            bad[4, 2] = 1 << 40
        try:
            buffer.dispatch(x, bad, sync=False)
            _synchronize(buffer)
            buffer.check()
        except epee.EpeeError as error:
            seen.append(f"{type(error).__name__}: {error}")
        buffer.check()  # once only
        d = buffer.dispatch(x, idx)
        same_bits(buffer.combine(d.x, d.handle).x, x * times_sent(idx, num_ranks) + 0.0, "afterwards")
    return seen


def one_sided(rank: int, num_ranks: int) -> list[str]:
    """A barrier that times out on rank 0 and ends well on the last rank: nothing is paired before they have synced."""
    store, said = dist.distributed_c10d._get_default_store(), []

    def tried(what: Callable[[], object]) -> None:
        try:
            what()
            _synchronize(buffer)
            buffer.check()
            said.append("well")
        except epee.EpeeError as error:
            said.append(f"{type(error).__name__}: {error}")

    with make(num_ranks) as buffer:
        x, idx, weights = tokens(buffer, 6)
        handle = buffer.dispatch(x, idx, weights).handle
        rows = torch.zeros(handle.num_recv, HIDDEN, dtype=x.dtype, device=x.device)
        if rank == num_ranks - 1:
            store.wait(["timed out"])
        tried(lambda: buffer.barrier(timeout=0.3 if rank == 0 else 20.0))
        store.set("timed out", "")
        tried(buffer.barrier)
        tried(lambda: buffer.dispatch(x, idx, weights))
        tried(lambda: buffer.dispatch(x, idx, weights, sync=False))
        tried(lambda: buffer.dispatch(x, handle=handle))
        tried(lambda: buffer.combine(rows, handle))
        buffer.sync(timeout=20.0)
        tried(lambda: buffer.dispatch(x, idx, weights))
    return said


def check_one_sided(results: list[list[str]]) -> None:
    """What `one_sided` must say."""
    first, *others = results
    assert [text.split(":")[0] for text in first] == ["CommTimeoutError", *["MismatchError"] * 5, "well"], first
    for said in others:
        assert said[0].startswith(("well", "CommTimeoutError")), said
        assert [text.split(":")[0] for text in said[1:]] == [*["MismatchError"] * 5, "well"], said
    for said in (first, others[-1]):
        assert "an earlier call has failed" in said[1], said
        assert "call buffer.sync() on all ranks" in said[2], said


def same_layers(rank: int, num_ranks: int) -> list[str]:
    """A model of four layers whose steps are made again after an error, while rank 0 is late to one combine."""
    said = []
    with make(num_ranks, num_experts=2 * num_ranks, timeout=1.5) as buffer:
        idx = torch.arange(0, 2 * num_ranks, 2)[:NUM_TOPK].expand(1, -1)  # one expert on each rank; weights 1
        idx = torch.nn.functional.pad(idx, (0, NUM_TOPK - idx.shape[1]), value=-1).to(buffer.config.device)
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=buffer.config.device)
        want = float(times_sent(idx.cpu(), num_ranks)[0, 0])
        for layer in range(1, 5):
            for attempt in range(10):
                try:
                    d = buffer.dispatch(x, idx, layout="expert")
                    if rank == 0 and layer == 2 and attempt == 0:
                        time.sleep(3.0)
                    out = buffer.combine(d.x * layer, d.handle).x[0, 0].item()
                    buffer.check()
                    said.append("right" if out == want * layer else f"layer {layer}: {out}")
                    break
                except epee.EpeeError as error:
                    said.append(f"{type(error).__name__}: {error}")
    return said


def check_same_layers(results: list[list[str]]) -> None:
    """What `same_layers` must say."""
    for said in results:
        kinds = [text.split(":")[0] for text in said]
        assert kinds.count("right") == 4, said
        assert "CommTimeoutError" in kinds, said
        assert set(kinds) <= {"right", "CommTimeoutError", "MismatchError"}, said


def _synchronize(buffer: epee.Buffer) -> None:
    if buffer.config.device.type == "cuda":
        torch.cuda.synchronize()


def misplaced(rank: int, num_ranks: int) -> list[str]:
    """Rows that a GPU cannot copy in one piece are refused with the remedy, on rank 1; rank 0 hears of it."""
    seen = []
    with make(num_ranks) as buffer:
        x, idx, _ = tokens(buffer, 6)
        handle = buffer.dispatch(x, idx).handle
        y = torch.ones(handle.num_recv, HIDDEN, dtype=torch.bfloat16, device=x.device)
        flat = torch.zeros(6 * HIDDEN + 1, dtype=x.dtype, device=x.device)
        shifted, gaps = flat[1:].view(6, HIDDEN), x.repeat(1, 2)[:, ::2]
        wide_y = y.repeat(1, 2)[:, :HIDDEN]
        calls: list[Any] = [
            lambda: buffer.dispatch(shifted, idx),
            lambda: buffer.dispatch(gaps, idx),
            lambda: buffer.combine(wide_y, handle),
            lambda: buffer.combine(y, handle, out=shifted),
            lambda: buffer.combine(y, handle, num_sms=0),
            lambda: buffer.dispatch(x, idx, num_sms=100_000),
            lambda: buffer.dispatch(x, idx, previous_event="now"),
            lambda: buffer.dispatch(x, idx, sync=1),
        ]
        good = [0, 0, 1, 1, 1, 0, 0, 0]
        for call, op in zip(calls, good, strict=True):
            try:
                if rank == 1:
                    call()
                elif op == 0:
                    buffer.dispatch(x, idx)
                else:
                    buffer.combine(y, handle)
                    _synchronize(buffer)
                    buffer.check()
            except epee.EpeeError as error:
                seen.append(f"{type(error).__name__}: {error}")
        wide = torch.zeros(6, 2 * HIDDEN, dtype=x.dtype, device=x.device)
        wide[:, HIDDEN:] = x
        rows = buffer.dispatch(wide[:, HIDDEN:], handle=handle)  # gaps between rows are no matter
        same_bits(buffer.combine(rows.x, handle).x, x * times_sent(idx, num_ranks) + 0.0, "afterwards")
    return seen


def graph_words(rank: int, num_ranks: int) -> tuple[bool, int, int]:
    """`nbytes` counts the GPU's memory, `num_copied_results` the results that found no slot."""
    with make(num_ranks, num_slots=1) as buffer:
        x, idx, _ = tokens(buffer, 5)
        held = [buffer.dispatch(x, idx) for _ in range(3)]
        assert all(torch.equal(d.x, held[0].x) for d in held)  # type: ignore[arg-type]
        slots = buffer.nbytes > 2 * 16 * num_ranks * HIDDEN * 2
        return slots, buffer.num_copied_results, len(held)


def gradients(rank: int, num_ranks: int, layout: str) -> list[torch.Tensor]:
    """One step through `epee.nn`: output, and gradients of tokens, weights and bias."""
    with make(num_ranks, dtype=torch.float32) as buffer:
        generator = torch.Generator().manual_seed(rank)
        device = buffer.config.device
        _, idx, _ = tokens(buffer, 9)
        x, bias = (torch.randn(9, HIDDEN, generator=generator).to(device).requires_grad_() for _ in range(2))
        weights = torch.rand(9, NUM_TOPK, generator=generator).to(device).requires_grad_()
        d = epee.nn.dispatch(buffer, x, idx, weights, layout=layout, expert_alignment=4)
        assert isinstance(d.x, torch.Tensor)
        y = d.x * (1.0 + rank)
        if layout == "rank":
            assert d.topk_weights is not None
            y = y * d.topk_weights.sum(1, keepdim=True)
        out = epee.nn.combine(buffer, y, d, bias=bias)
        out.backward(torch.randn(out.shape, generator=generator).to(device))
        found = [out, x.grad, weights.grad, bias.grad]
        return [value.detach().cpu().clone() for value in found if value is not None]
