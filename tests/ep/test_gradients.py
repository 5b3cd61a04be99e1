"""A buffer through which no gradient flows says so, once, where one is asked for; `epee.nn` over it says nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.harness import run_ranks

TOKENS, HIDDEN, TOPK = 6, 16, 2


def _caught(call: Any) -> list[tuple[str, str]]:
    """Return the warnings of a call: file and text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(each.filename, str(each.message)) for each in found]


def _routing(num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, topk_idx = torch.rand(TOKENS, 2 * num_ranks).softmax(-1).topk(TOPK)
    return topk_idx, weights


def _buffer(num_ranks: int) -> epee.Buffer:
    return epee.Buffer(
        num_experts=2 * num_ranks,
        hidden=HIDDEN,
        num_topk=TOPK,
        max_tokens_per_rank=TOKENS,
        dtype=torch.float32,
        max_recv_rows=num_ranks * TOKENS * TOPK,  # room for any routing, as it is random
    )


def _throughput(rank: int, num_ranks: int) -> list[Any]:
    del rank
    topk_idx, weights = _routing(num_ranks)
    x, learned = torch.randn(TOKENS, HIDDEN), weights.clone().requires_grad_()
    with _buffer(num_ranks) as buffer:
        found = [_caught(lambda: buffer.dispatch(x, topk_idx, weights))]
        with torch.no_grad():
            found.append(_caught(lambda: buffer.dispatch(x.requires_grad_(), topk_idx, learned)))

        def through_nn() -> None:
            d = epee.nn.dispatch(buffer, x, topk_idx, learned, layout="expert")
            epee.nn.combine(buffer, d.x * 2, d).sum().backward()  # type: ignore[operator]

        found.append(_caught(through_nn))
        found.append(_caught(lambda: buffer.dispatch(x.detach(), topk_idx, learned)))  # the weights alone ask for it
        found.append(_caught(lambda: buffer.dispatch(x, topk_idx, weights)))  # said already
        d = buffer.dispatch(x.detach(), topk_idx, weights)
        y = torch.zeros_like(d.x, requires_grad=True)  # type: ignore[arg-type]
        found += [_caught(lambda: buffer.combine(y, d.handle)) for _ in range(2)]
    return found


def test_a_buffer_warns_once_for_each_call() -> None:
    for found in run_ranks(_throughput, 2):
        assert [len(each) for each in found] == [0, 0, 0, 1, 0, 1, 0]
        for (file, text), call in ((found[3][0], "Buffer.dispatch"), (found[5][0], "Buffer.combine")):
            assert file == __file__
            assert text.startswith(call)
            assert "epee.nn" in text


def _latency(rank: int, num_ranks: int) -> list[Any]:
    del rank
    topk_idx, weights = _routing(num_ranks)
    x = torch.randn(TOKENS, 128, dtype=torch.bfloat16, requires_grad=True)
    with epee.LatencyBuffer(num_experts=2 * num_ranks, hidden=128, num_topk=TOPK, max_tokens_per_rank=TOKENS) as buffer:
        found = [_caught(lambda: buffer.dispatch(x.detach(), topk_idx, weights))]
        d = buffer.dispatch(x.detach(), topk_idx, weights)
        found.append(_caught(lambda: buffer.dispatch(x, topk_idx, weights)))
        y = torch.zeros_like(d.x, dtype=torch.bfloat16, requires_grad=True)  # type: ignore[arg-type]
        found.append(_caught(lambda: buffer.combine(y, d.handle)))
    return found


def test_a_latency_buffer_warns_as_well() -> None:
    for found in run_ranks(_latency, 2):
        assert [len(each) for each in found] == [0, 1, 1]


def _as_error(rank: int, num_ranks: int) -> str:
    """Rank 1 has a tensor that requires grad, and warnings are errors."""
    topk_idx, weights = _routing(num_ranks)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=rank == 1)
    with _buffer(num_ranks) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, epee.MismatchError)) as caught:
            buffer.dispatch(x, topk_idx, weights, timeout=90.0)
        buffer.dispatch(x.detach(), topk_idx, weights)
    assert dist.is_initialized()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_warning_that_is_an_error_ends_the_call_on_all_ranks() -> None:
    told = run_ranks(_as_error, 2)
    assert told[0].startswith("MismatchError")
    assert "epee.nn" in told[0]
    assert told[1].startswith("UserWarning")
