"""Calls like earlier ones: what no key holds is checked each time, and they give what first calls give."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch

import epee
from epee.ep import plans
from epee.ep.throughput.gpu.dispatch import DispatchPlan
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
EXPERTS, HIDDEN, TOPK, TOKENS = 4, 64, 2, 8


def _buffer(num_experts: int = EXPERTS, **options: object) -> epee.Buffer:
    return epee.Buffer(num_experts=num_experts, hidden=HIDDEN, num_topk=TOPK, max_tokens_per_rank=TOKENS, **options)  # type: ignore[arg-type]


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)])
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    return x, idx, torch.rand(TOKENS, TOPK, generator=generator)


def _count_again(buffer: epee.Buffer) -> list[str]:
    """Return a list into which every call goes that is run as one like an earlier one."""
    seen: list[str] = []
    again = buffer.again
    assert again is not None
    for name in ("dispatch", "combine"):
        original = getattr(again, name)

        def spy(*args: object, original: object = original, name: str = name) -> object:
            got = original(*args)  # type: ignore[operator]
            if got is not None:
                seen.append(name)
            return got

        setattr(again, name, spy)
    return seen


def _same(rank: int, num_ranks: int) -> None:
    with _buffer() as buffer:
        seen = _count_again(buffer)
        results, handles = [], []
        for turn in range(3):
            x, idx, weights = _inputs(rank + 10)
            got = buffer.dispatch(x, idx, weights, sync=turn != 1)
            num_recv = int(got.handle.recv_counts[0])
            assert got.topk_idx is not None
            assert got.topk_weights is not None
            assert isinstance(got.x, torch.Tensor)
            back = buffer.combine(got.x, got.handle).x
            parts = (got.x, got.topk_idx, got.topk_weights, got.handle.src_token)
            results.append([part[:num_recv].clone() for part in parts] + [back])
            handles.append(got.handle)
        for part, other in zip(results[0], results[2], strict=True):
            assert torch.equal(part, other)
        for part, other in zip(results[0], results[1], strict=True):
            assert torch.equal(part, other)
        late = {"src_rank", "src_token", "form"}  # that were read meanwhile
        assert handles[2].__dict__.keys() - late == handles[0].__dict__.keys() - late
        kept = {"seq", "core", "kept", *late}
        assert all(handles[2].__dict__[name] == value for name, value in vars(handles[0]).items() if name not in kept)
        assert handles[2].core.__dict__.keys() == handles[0].core.__dict__.keys()
        assert seen.count("dispatch") == 1, "only the third call is like an earlier one"
        assert seen.count("combine") >= 1
        buffer.all_gather_bytes(b"done")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_call_like_an_earlier_one_gives_the_same(num_ranks: int) -> None:
    run_ranks(emulated, num_ranks, _same, timeout_s=200)


def _looked_at(rank: int, num_ranks: int) -> None:
    with _buffer() as buffer:
        x, idx, weights = _inputs()
        got = buffer.dispatch(x, idx, weights)
        handle = got.handle
        assert isinstance(got.x, torch.Tensor)
        buffer.combine(got.x, handle)
        wide = torch.zeros(TOKENS * HIDDEN + 1, dtype=torch.bfloat16)
        with pytest.raises(epee.InvalidArgument, match="multiples of 16 bytes"):
            buffer.dispatch(wide[1:].view(TOKENS, HIDDEN), idx, weights)
        rows = torch.zeros(got.x.numel() + 1, dtype=torch.bfloat16)[1:].view(got.x.shape)
        with pytest.raises(epee.InvalidArgument, match="multiple of 16 bytes"):
            buffer.combine(rows, handle)
        learnt = buffer.dispatch(x.clone().requires_grad_(), idx, weights.clone().requires_grad_())
        assert isinstance(learnt.x, torch.Tensor)
        assert not learnt.x.requires_grad
        assert not buffer.combine(got.x.clone().requires_grad_(), handle).x.requires_grad
        for wrong in (x.float(), x[:, :32], x.to_sparse(), "x"):
            with pytest.raises(epee.InvalidArgument, match=r"^x must"):
                buffer.dispatch(wrong, idx, weights)  # type: ignore[arg-type]
        with pytest.raises(epee.InvalidArgument, match="topk_idx must"):
            buffer.dispatch(x, idx.int(), weights)
        with pytest.raises(epee.InvalidArgument, match="expert_alignment"):
            buffer.dispatch(x, idx, weights, expert_alignment=True)
        with pytest.raises(epee.InvalidArgument, match="sync must"):
            buffer.dispatch(x, idx, weights, sync=1)  # type: ignore[arg-type]
        again = buffer.dispatch(x, idx, weights)
        assert torch.equal(again.handle.src_token, handle.src_token)


def test_what_facts_do_not_say_is_looked_at_each_time() -> None:
    run_ranks(emulated, 1, _looked_at, timeout_s=200)


def _alignments(rank: int, num_ranks: int) -> None:
    with _buffer() as buffer:
        x, idx, weights = _inputs()
        handles = [buffer.dispatch(x, idx, weights, layout="expert", expert_alignment=a).handle for a in (1, 4)]
        for handle in handles * 2:
            got = buffer.dispatch(x, handle=handle)
            assert isinstance(got.x, torch.Tensor)
            padding = got.x[handle.src_rank < 0]
            assert not padding.any(), "rows of another alignment"


def test_handles_that_differ_in_their_alignment_are_not_alike() -> None:
    run_ranks(emulated, 1, _alignments, timeout_s=200)


def _kept(rank: int, num_ranks: int) -> None:
    with _buffer(num_slots=1) as buffer:
        x, idx, weights = _inputs()
        for _ in range(3):
            got = buffer.dispatch(x, idx, weights)
            wanted = got.x.clone()  # type: ignore[union-attr]
            got.x = wanted  # the slot's tensor is dropped, and `topk_weights` has not been read
            gc.collect()
            other = buffer.dispatch(-x, idx, 1 - weights)
            assert torch.equal(other.x, -wanted)  # type: ignore[arg-type]
            assert got.topk_weights is not None
            assert other.topk_weights is not None
            chosen = got.topk_idx >= 0  # type: ignore[operator]
            assert torch.allclose(got.topk_weights[chosen] + other.topk_weights[chosen], torch.ones(()))
            del got, other
        assert buffer.num_copied_results > 0


def test_what_is_made_late_is_of_its_own_call() -> None:
    run_ranks(emulated, 1, _kept, timeout_s=200)


def _bounded(rank: int, num_ranks: int) -> None:
    plans._MOST_FACTS = 4
    with _buffer() as buffer:
        x, idx, weights = _inputs()
        for num_tokens in (*range(TOKENS), *range(TOKENS)):
            buffer.dispatch(x[:num_tokens], idx[:num_tokens], weights[:num_tokens])
        assert len(buffer._checked._passed) <= 4


def test_facts_are_not_remembered_for_ever() -> None:
    run_ranks(emulated, 1, _bounded, timeout_s=200)


def _other_rows(rank: int, num_ranks: int) -> None:
    """Combines are alike however many rows they have."""
    with _buffer() as buffer:
        seen = _count_again(buffer)
        x, _, weights = _inputs()
        rows = set()
        for step in range(4):
            idx = (torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS + step).clamp(max=EXPERTS - 1)
            idx[: step + rank] = -1
            got = buffer.dispatch(x, idx, weights)
            assert isinstance(got.x, torch.Tensor)
            rows.add(len(got.x))
            chosen = (idx >= 0).any(1)
            num_dst = torch.stack([(idx // (EXPERTS // num_ranks) == r).any(1) for r in range(num_ranks)]).sum(0)
            back = buffer.combine(got.x.clone(), got.handle).x
            wanted = torch.where(chosen[:, None], x.float() * num_dst[:, None], torch.zeros(()))
            assert torch.allclose(back.float(), wanted, rtol=2**-7)
        assert len(rows) > 1
        assert seen.count("combine") >= 2
        buffer.all_gather_bytes(b"done")


def test_combines_are_alike_however_many_rows_they_have() -> None:
    run_ranks(emulated, 2, _other_rows, timeout_s=200)


def _untold(rank: int, num_ranks: int) -> str:
    """One rank's call like an earlier one fails before the other hears of it."""
    with _buffer() as buffer:
        x, idx, weights = _inputs()
        for _ in range(3):
            buffer.dispatch(x, idx, weights)
        path = buffer._gpu
        assert path is not None
        start = DispatchPlan.start
        errors: list[Exception] = [torch.OutOfMemoryError(), ValueError("a handler's")] if rank == 0 else []

        def fails(*args: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop(0)
            return start(*args, **options)

        DispatchPlan.start = fails  # type: ignore[method-assign]
        told = ""
        for _ in range(2):
            try:
                buffer.dispatch(x, idx, weights)
            except (ValueError, epee.MismatchError) as error:
                told += f"{type(error).__name__}: {error}"
        DispatchPlan.start = start  # type: ignore[method-assign]
        buffer.dispatch(x, idx, weights)
        buffer.all_gather_bytes(b"done")
        return told


def test_an_error_before_a_call_is_told_to_the_peer() -> None:
    here, there = run_ranks(emulated, 2, _untold, timeout_s=200)
    assert here.startswith("ValueError: a handler's") or "a handler's" in here
    assert "refused" in there


def _weighted(rank: int, num_ranks: int, layout: str) -> None:
    """Combines with weights, in ordinary memory and in place, among calls without them, with changing routings."""
    with _buffer() as buffer:
        seen = _count_again(buffer)
        for turn in range(4):
            x, idx, weights = _inputs(rank + 10 + 5 * turn)
            idx[: turn + rank] = -1
            wanted = torch.where(idx >= 0, weights, 0)
            got = buffer.dispatch(x, idx, weights, layout=layout)
            assert isinstance(got.x, torch.Tensor)
            assert got.topk_weights is not None
            there = buffer.combine_input(got.handle).copy_(got.x)
            plain = buffer.combine(got.x.clone(), got.handle)
            assert plain.topk_weights is None
            for factor, y in ((1, got.x.clone()), (2, got.x), (3, there)):
                back = buffer.combine(y, got.handle, topk_weights=factor * got.topk_weights)
                assert torch.equal(back.x, plain.x)
                assert torch.equal(back.topk_weights, factor * wanted)  # type: ignore[arg-type]
            del got, there, y
        assert seen.count("combine") >= 11, "all but the first ones of a kind are like earlier ones"
        _change_weighted(buffer, layout, seen)
        buffer.all_gather_bytes(b"done")


def _change_weighted(buffer: epee.Buffer, layout: str, seen: list[str]) -> None:
    """Whatever is not as in the calls before is checked, and gives the same or an error."""
    x, idx, weights = _inputs(3)
    got = buffer.dispatch(x, idx, weights, layout=layout)
    rows, sent = got.x, got.topk_weights
    assert isinstance(rows, torch.Tensor)
    assert sent is not None
    for _ in range(2):
        back = buffer.combine(rows, got.handle, topk_weights=sent)
    for num_sms in (2, 2):
        seen.clear()
        other = buffer.combine(rows, got.handle, topk_weights=sent, num_sms=num_sms)
        assert torch.equal(other.topk_weights, back.topk_weights)  # type: ignore[arg-type]
    assert seen == ["combine"]
    seen.clear()
    apart = torch.stack([sent, sent], -1)[..., 0]
    for options in ({"topk_weights": apart}, {"topk_weights": sent, "out": torch.empty_like(x)}):
        other = buffer.combine(rows, got.handle, **options)  # type: ignore[arg-type]
        assert torch.equal(other.topk_weights, back.topk_weights)  # type: ignore[arg-type]
        assert torch.equal(other.x, back.x)
    assert seen == []
    for wrong in (sent.double(), sent[1:], sent[None], "weights"):
        if buffer.num_ranks == 1:
            with pytest.raises(epee.InvalidArgument, match="topk_weights must"):
                buffer.combine(rows, got.handle, topk_weights=wrong)  # type: ignore[arg-type]
    with torch.profiler.profile():
        buffer.combine(rows, got.handle, topk_weights=sent)
    assert seen == []
    buffer.sync()
    if buffer.num_ranks > 1:  # else there is one epoch
        with pytest.raises(epee.errors.StaleHandleError):
            buffer.combine(rows, got.handle, topk_weights=sent)
    for _ in range(3):
        got = buffer.dispatch(x, idx, weights, layout=layout)
        back = buffer.combine(got.x, got.handle, topk_weights=got.topk_weights)  # type: ignore[arg-type]
        assert torch.equal(back.topk_weights, weights)  # type: ignore[arg-type]
    assert seen[-1] == "combine"


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_combines_with_weights_and_in_both_layouts_are_like_earlier_ones(num_ranks: int, layout: str) -> None:
    run_ranks(emulated, num_ranks, _weighted, layout, timeout_s=200)


def _one_row(rank: int, num_ranks: int) -> None:
    """A matrix of one row is contiguous whatever its strides are: it is no model for others."""
    with _buffer() as buffer:
        x, idx, weights = _inputs()
        for num_tokens in (1, 4, 1, 4):
            got = buffer.dispatch(x[:num_tokens], idx[:num_tokens], weights[:num_tokens])
            rows, sent = got.x, got.topk_weights
            assert isinstance(rows, torch.Tensor)
            assert sent is not None
            wide = torch.cat([rows, rows], 1)[:, :HIDDEN]
            if num_tokens > 1:
                with pytest.raises(epee.InvalidArgument, match="y must be contiguous"):
                    buffer.combine(wide, got.handle)
            else:
                buffer.combine(wide, got.handle)
            back = buffer.combine(rows, got.handle, topk_weights=torch.cat([sent, sent], 1)[:, :TOPK])
            assert torch.equal(back.topk_weights, weights[:num_tokens])  # type: ignore[arg-type]


def test_a_row_alone_is_no_model_for_the_strides_of_others() -> None:
    run_ranks(emulated, 1, _one_row, timeout_s=200)


def _weighted_death(rank: int, num_ranks: int, layout: str) -> None:
    """A rank dies among combines with weights; the others hear of it, agree, and go on."""
    with _buffer(num_experts=6) as buffer:
        seen = _count_again(buffer)
        x, _, weights = _inputs(rank)
        idx = torch.tensor([[0, 2], [2, 4]]).repeat(TOKENS // 2, 1)
        for _ in range(3):
            got = buffer.dispatch(x, idx, weights, layout=layout)
            assert isinstance(got.x, torch.Tensor)
            buffer.combine(got.x.clone(), got.handle, topk_weights=got.topk_weights)
        assert "combine" in seen
        buffer.all_gather_bytes(b"done")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(epee.errors.RankFailedError):
            _combine_on(buffer, got)
        assert buffer.sync().tolist() == [1, 1, 0]
        for _ in range(3):
            got = buffer.dispatch(x, idx, weights, layout=layout)
            assert isinstance(got.x, torch.Tensor)
            back = buffer.combine(got.x.clone(), got.handle, topk_weights=got.topk_weights)
            assert torch.equal(back.topk_weights, torch.where(idx < 4, weights, 0))  # type: ignore[arg-type]


def _combine_on(buffer: epee.Buffer, got: Any) -> None:
    for _ in range(1000):
        buffer.combine(got.x.clone(), got.handle, topk_weights=got.topk_weights)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_a_death_is_met_by_combines_with_weights(layout: str) -> None:
    assert run_ranks(emulated, 3, _weighted_death, layout, dead={2}, timeout_s=200) == [None, None, DEAD]


def _streams(rank: int, num_ranks: int) -> None:
    """Calls on other streams than the last one are ordered after it, and are like earlier ones all the same."""
    with _buffer() as buffer:
        seen = _count_again(buffer)
        path = buffer._gpu
        assert path is not None
        machine, platform = path.machine, path._platform
        ordered: list[tuple[str, int | None]] = []
        platform.mark = lambda stream: ordered.append(("mark", stream))  # type: ignore[attr-defined]
        platform.wait = lambda mark, stream=None: ordered.append(("wait", stream))  # type: ignore[attr-defined]
        x, idx, weights = _inputs(rank)
        for turn in range(12):
            platform.stream = lambda turn=turn: 7 + turn % 2  # type: ignore[attr-defined]
            seen.clear()
            ordered.clear()
            got = buffer.dispatch(x, idx, weights)
            assert (machine.device._last_stream, machine.stream, machine._share.stream) == (7 + turn % 2,) * 3
            assert isinstance(got.x, torch.Tensor)
            assert turn == 0 or ordered[:2] == [("mark", 7 + (turn + 1) % 2), ("wait", None)]
            ordered.clear()
            platform.stream = lambda turn=turn: 8 - turn % 2  # type: ignore[attr-defined]
            back = buffer.combine(got.x, got.handle, topk_weights=got.topk_weights)
            assert torch.equal(back.topk_weights, weights)  # type: ignore[arg-type]
            assert ordered[:2] == [("mark", 7 + turn % 2), ("wait", None)]
            buffer.barrier()
            assert machine.stream == 8 - turn % 2
            platform.stream = lambda turn=turn: 7 + turn % 2  # type: ignore[attr-defined]
            buffer.barrier()
            assert machine.stream == 7 + turn % 2
            assert turn < 2 or seen == ["dispatch", "combine"]
            del got, back
        platform.is_capturing = lambda: True  # type: ignore[attr-defined]
        platform.stream = lambda: 9  # type: ignore[attr-defined]
        assert machine.quiet_stream() is None
        assert machine.device._last_stream != 9
        platform.is_capturing = lambda: False  # type: ignore[attr-defined]
        machine.device.report.words[0] = 1  # a time-out, of an earlier call
        assert machine.quiet_stream() is None
        machine.device.report.words[0] = 0
        assert machine.quiet_stream() == 9
        buffer.all_gather_bytes(b"done")


def test_calls_on_streams_in_turn_are_like_earlier_ones() -> None:
    run_ranks(emulated, 2, _streams, timeout_s=200)
