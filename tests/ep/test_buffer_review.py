"""What a review found: aliasing, odd strides, edited results, interrupts in the worst places, dropped buffers."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import epee
from tests.ep.moments import when_it_waits
from tests.harness import run_ranks
from tests.survive import stages

HIDDEN = 64


def _buffer(num_ranks: int, **changes: Any) -> epee.Buffer:
    options = {"num_experts": 2 * num_ranks, "hidden": HIDDEN, "num_topk": 2, "max_tokens_per_rank": 32}
    return epee.Buffer(**{**options, **changes})


def _inputs(rank: int, num_ranks: int, num_tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    idx = torch.rand(num_tokens, 2 * num_ranks, generator=generator).topk(2).indices
    return x, idx, torch.rand(num_tokens, 2, generator=generator)


def _aliases(rank: int, num_ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, idx, _ = _inputs(rank, num_ranks)
        x = x.to(dtype)
        with _buffer(num_ranks, dtype=dtype) as buffer:
            d = buffer.dispatch(x, idx)
            assert isinstance(d.x, torch.Tensor)
            residual = torch.randn(8, HIDDEN).to(dtype)
            want = buffer.combine(d.x, d.handle, bias=residual.clone()).x
            both = buffer.combine(d.x, d.handle, bias=residual, out=residual).x
            assert both is residual or both.data_ptr() == residual.data_ptr()
            assert torch.equal(residual, want)
            storage = torch.zeros(max(d.handle.num_recv, 8), HIDDEN, dtype=dtype)
            with pytest.raises(epee.InvalidArgument, match="out must not share memory with y"):
                buffer.combine(storage[: d.handle.num_recv], d.handle, out=storage[:8])
            assert torch.equal(buffer.combine(d.x, d.handle, bias=residual).x.isnan(), residual.isnan())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_out_may_be_the_bias_but_not_y(num_ranks: int) -> None:
    run_ranks(_aliases, num_ranks)


def _odd_strides(rank: int, num_ranks: int) -> None:
    with _buffer(num_ranks) as buffer:
        idx = torch.tensor([[0, 2]])
        base = torch.randn(4, HIDDEN + 1).bfloat16()
        for x in (base[:, :HIDDEN][:1], base[1:2, 1:], base.t()[:HIDDEN].t()[:1]):
            d = buffer.dispatch(x, idx)
            assert isinstance(d.x, torch.Tensor)
            assert torch.equal(d.x[d.handle.src_rank == rank], x)
            assert torch.equal(buffer.combine(d.x, d.handle).x, x * 2)


def test_one_row_may_have_any_strides() -> None:
    run_ranks(_odd_strides, 2)


def _edited(rank: int, num_ranks: int) -> None:
    x, idx, weights = _inputs(rank, num_ranks)
    with _buffer(num_ranks) as buffer:
        d = buffer.dispatch(x.bfloat16(), idx, weights)
        assert d.topk_idx is not None
        assert d.topk_weights is not None
        kept = d.topk_idx.clone()
        d.topk_idx.fill_(7)
        d.topk_weights.fill_(9)
        d.num_tokens_per_expert.clear()
        again = buffer.dispatch(x.bfloat16(), handle=d.handle)
        assert again.topk_idx is not None
        assert torch.equal(again.topk_idx, kept)
        assert sum(again.num_tokens_per_expert) == int((kept >= 0).sum())


def test_editing_a_result_does_not_change_the_handle() -> None:
    run_ranks(_edited, 2)


def _lost_slots(rank: int, num_ranks: int) -> None:
    x, idx, _ = _inputs(rank, num_ranks)
    with _buffer(num_ranks) as buffer:
        path = buffer._path
        real = path.arenas.result
        for _ in range(10):  # more often than there are slots

            def interrupted(*_: Any) -> Any:
                raise KeyboardInterrupt

            path.arenas.result = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(x.bfloat16(), idx)
            path.arenas.result = real  # type: ignore[method-assign]
        d = buffer.dispatch(x.bfloat16(), idx)
        assert isinstance(d.x, torch.Tensor)
        assert buffer.combine(d.x, d.handle).x.shape == x.shape


def test_interrupts_cost_no_slots() -> None:
    run_ranks(_lost_slots, 2)


def _interrupted_announcement(rank: int, num_ranks: int, folder: str, others_come: str) -> list[str]:
    """Rank 0 is interrupted when it has sent its row; the call ends on the others, too, and the next ones work."""
    x, idx, _ = _inputs(rank, num_ranks)
    seen = []
    with _buffer(num_ranks) as buffer:
        buffer.dispatch(x.bfloat16(), idx)
        if rank == 0:

            def interrupt() -> None:
                raise KeyboardInterrupt

            when_it_waits(buffer, interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(x.bfloat16(), idx)
            stages.reach(folder, "left")
        else:
            if others_come == "later":
                stages.wait_for(folder, "left")
            try:
                buffer.dispatch(x.bfloat16(), idx, timeout=20)
            except epee.EpeeError as exc:
                seen.append(type(exc).__name__)
        for _ in range(3):
            d = buffer.dispatch(x.bfloat16(), idx, timeout=20)
            assert isinstance(d.x, torch.Tensor)
            assert torch.equal(d.x[d.handle.src_rank == rank], x.bfloat16()[(idx // 2 == rank).any(1)])
    return seen


@pytest.mark.parametrize("others_come", ["later", "at the same time"])
def test_an_interrupted_announcement_is_finished_by_the_next_call(others_come: str, tmp_path: Path) -> None:
    seen = run_ranks(_interrupted_announcement, 3, str(tmp_path), others_come)[1:]
    if others_come == "later":
        assert seen == [["CommTimeoutError"]] * 2  # given up before anybody could gather it
    else:  # or one had gathered it first, so both did, and rank 0 sends no rows
        assert seen in ([["CommTimeoutError"]] * 2, [["MismatchError"]] * 2)


def _close_in_handler(rank: int, num_ranks: int, folder: str) -> str:
    x, idx, _ = _inputs(rank, num_ranks)
    buffer = _buffer(num_ranks)
    if rank == 1:
        stages.wait_for(folder, "closed")  # stays away: rank 0 must be waiting when its signal comes
        buffer.close()
        return "stayed away"

    def close(*_: Any) -> None:
        buffer.close()
        stages.reach(folder, "closed")

    signal.signal(signal.SIGUSR1, close)
    when_it_waits(buffer, threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start)
    try:
        buffer.dispatch(x.bfloat16(), idx, timeout=30)
    except epee.EpeeError as exc:
        assert buffer.nbytes == 0
        return type(exc).__name__
    return "returned"


def test_a_signal_handler_may_close_the_buffer_that_waits(tmp_path: Path) -> None:
    assert run_ranks(_close_in_handler, 2, str(tmp_path))[0] == "AbortedError"


def _dropped(rank: int, num_ranks: int) -> None:
    x, idx, _ = _inputs(rank, num_ranks)

    def use() -> None:
        buffer = _buffer(num_ranks)
        buffer.dispatch(x.bfloat16(), idx)

    for _ in range(3):
        use()
    gc.collect()
    assert not any("inbox" in link or "-rank-" in link or "arena" in link for link in _shared_descriptors())
    _buffer(num_ranks).close()  # ends the part of those that were dropped in the control plane, too
    gc.collect()
    assert _shared_descriptors() == []


def _shared_descriptors() -> list[str]:
    """Return what this process holds of a buffer's kind; gloo's sockets come and go and are none of our business."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return [link for link in links if ("memfd:epee" in link and "epee-beat" not in link) or "pidfd" in link]


def test_a_buffer_that_is_dropped_returns_its_descriptors() -> None:
    run_ranks(_dropped, 2)


def _bad_birth(rank: int, num_ranks: int, changes: dict[str, Any], variable: str) -> str:
    if rank == 1 and variable:
        os.environ[variable] = "nonsense"
    try:
        _buffer(num_ranks, **(changes if rank == 1 else {}))
    except epee.EpeeError as exc:
        assert _shared_descriptors() == []
        return f"{type(exc).__name__}: {exc}"
    return "made"


@pytest.mark.parametrize(
    ("changes", "variable", "word"),
    [
        ({"device": "foo"}, "", "foo"),
        ({"max_tokens_per_rank": 10**30}, "", "max_tokens_per_rank"),
        ({"num_experts": 4 * 10**29}, "", "num_experts"),
        ({"num_slots": 10**7}, "", "num_slots"),
        ({"max_recv_rows": "many"}, "", "max_recv_rows"),
        ({}, "EPEE_TIMEOUT_S", "EPEE_TIMEOUT_S"),
        ({}, "EPEE_POISON", "EPEE_POISON"),
    ],
)
def test_whatever_is_wrong_at_birth_is_told_to_the_peers(changes: dict[str, Any], variable: str, word: str) -> None:
    peer, culprit = run_ranks(_bad_birth, 2, changes, variable)
    assert culprit.startswith("InvalidArgument")
    assert peer.startswith("MismatchError: Buffer: rank 1 refused")
    assert word in culprit
    assert word in peer
