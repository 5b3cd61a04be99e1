"""Calls of a `LatencyBuffer` on GPUs that look alike share a plan: what is checked all the same, and what is lazy."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epee
from epee.ep.latency import plans
from epee.ep.latency.gpu.params import (
    CALL_WORDS,
    COMBINE_POINTERS,
    DISPATCH_POINTERS,
    LatencyCall,
    LatencyCombineParams,
    LatencyDispatchParams,
)
from epee.ep.latency.gpu.results import lost_weight
from epee.errors import InvalidArgument, InvalidState
from epee.gpu.event import DONE
from epee.reference import latency as oracle
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import emulated
from tests.ep.latency_cases import (
    BF16,
    Shape,
    bits,
    check_dispatched,
    check_round,
    combine,
    dispatch,
    expert_outputs,
    inputs,
    make,
)
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
SHAPE = Shape()


@pytest.mark.parametrize(
    ("params", "pointers"), [(LatencyDispatchParams, DISPATCH_POINTERS), (LatencyCombineParams, COMBINE_POINTERS)]
)
def test_the_words_of_a_call_follow_each_other(params: Any, pointers: str) -> None:
    places = [params.call.offset + getattr(LatencyCall, name).offset for name in CALL_WORDS.split()]
    places += [getattr(params, name).offset for name in pointers.split()]
    assert places == list(range(places[0], places[0] + 8 * len(places), 8))
    assert places[-1] + 8 <= ctypes.sizeof(params)


class _Checks:
    """Counts the calls that are checked."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("check_latency_dispatch", "check_latency_combine"):
            setattr(plans, name, self._counted(getattr(plans, name)))

    def _counted(self, check: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return check(*args)

        return counted


def _alike(rank: int, num_ranks: int) -> None:
    """New tensors of one shape are checked once; another flag, shape or mask is checked anew. Results are right."""
    with make(SHAPE) as buffer:
        checks = _Checks()
        for seed in range(4):
            check_round(buffer, SHAPE, (6, 3), seed)
        assert checks.count == 2
        check_round(buffer, SHAPE, (6, 3), 4, payload="fp8", use_hook=True)
        assert checks.count == 4
        check_round(buffer, SHAPE, (6, 3), 5, active_ranks=torch.ones(2, dtype=torch.int32))
        assert checks.count == 6
        check_round(buffer, SHAPE, (3, 6), 6)
        assert checks.count == 8
        for seed in range(7, 9):
            check_round(buffer, SHAPE, (6, 3), seed, payload="fp8", use_hook=True)
            check_round(buffer, SHAPE, (6, 3), seed, active_ranks=torch.ones(2, dtype=torch.int32))
            check_round(buffer, SHAPE, (6, 3), seed, timeout_us=10**7)
        assert checks.count == 8


def test_calls_alike_are_checked_once() -> None:
    run_ranks(emulated, 2, _alike, timeout_s=200)


def _call(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
    return {"x": x, "topk_idx": idx, "topk_weights": weights, "use_fp8": True, "return_hook": False}


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(x.numel() + 8, dtype=BF16)
    start = (16 - room.data_ptr() % 16) // 2 % 8 + 1
    return room[start : start + x.numel()].view(x.shape)


def _negated(weights: torch.Tensor) -> torch.Tensor:
    """As one weight, in one piece, but the sign is still to be applied."""
    return torch.complex(weights, -weights).conj().imag


def _dispatch_rules(rank: int, num_ranks: int) -> None:
    shape = Shape(num_topk=1)
    x, idx, weights = dataclasses.astuple(inputs(shape, (1,), 1)[0])
    good = _call(x, idx, weights)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("multiples of 16 bytes", {"x": _misaligned(x)}),
        ("x must be on the CPU", {"x": torch.empty_like(x, device="meta")}),
        ("topk_idx must be on the CPU", {"topk_idx": torch.empty_like(idx, device="meta")}),
        ("topk_weights must be on the CPU", {"topk_weights": torch.empty_like(weights, device="meta")}),
        ("x must be bfloat16", {"x": x.half()}),
        ("topk_idx must be int64", {"topk_idx": idx.int()}),
        ("topk_idx must be int64", {"topk_idx": idx[:, :0]}),
        ("topk_weights must be float32", {"topk_weights": weights.double()}),
        ("topk_weights must be a plain dense tensor", {"topk_weights": _negated(weights)}),
        ("x must be a plain dense tensor", {"x": x.to_sparse()}),
        ("x must be a tensor", {"x": x.float().numpy()}),
        ("x must be a tensor", {"x": None}),
        ("use_fp8 must be True or False", {"use_fp8": 1}),
        ("return_hook must be True or False", {"return_hook": 0}),
        ("return_hook must be True or False", {"return_hook": []}),
        ("exclude each other", {"return_hook": True, "async_op": True}),
        ("timeout_us must be", {"timeout_us": True}),
        ("timeout must be", {"timeout": True}),
        ("topk_idx must hold expert ids", {"topk_idx": idx + 100}),  # looked at by the host where tensors are the CPU's
    ]
    assert _negated(weights).is_contiguous()
    with make(shape) as buffer:
        want = buffer.dispatch(**good).x
        for message, change in wrong:
            for _ in range(2):
                with pytest.raises(InvalidArgument, match=message):
                    buffer.dispatch(**{**good, **change})
        checks = _Checks()
        for grown in ({"x": x.clone().requires_grad_()}, {"topk_weights": weights.clone().requires_grad_()}):
            got = buffer.dispatch(**{**good, **grown}).x
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(bits(mine), bits(theirs))
                assert not mine.requires_grad
        assert checks.count == 0
        spread = torch.stack([idx, idx], 2)[:, :, 0]  # a copy is made of it, in each call
        for _ in range(2):
            buffer.dispatch(**{**good, "topk_idx": spread.expand(1, 1)})
        mask = torch.zeros(2, dtype=torch.int32)
        for bad in (mask.float(), mask[:0]):
            for _ in range(2):
                with pytest.raises(InvalidArgument, match="active_ranks must"):
                    buffer.dispatch(**good, active_ranks=bad)


def test_a_dispatch_like_one_before_is_refused_for_its_data_and_address() -> None:
    run_ranks(emulated, 1, _dispatch_rules, timeout_s=200)


def _combine_rules(rank: int, num_ranks: int) -> None:
    given = inputs(SHAPE, (4,), 1)[0]
    with make(SHAPE) as buffer:
        d = dispatch(buffer, given)
        y = torch.zeros(8, 6, 512, dtype=BF16)
        out, weights = torch.zeros(4, 512, dtype=BF16), torch.zeros(4, 2)
        as_out = torch.zeros(4 * 512, dtype=BF16)
        in_out = as_out.view(torch.float32)[:8].view(4, 2)
        assert combine(buffer, y, d, topk_weights=weights, out=out).x is out
        wrong: list[tuple[str, torch.Tensor, dict[str, Any]]] = [
            ("out must not share memory with y", y, {"out": y.view(-1, 512)[2:6]}),
            ("out must not share memory with topk_weights", y, {"out": as_out.view(4, 512), "topk_weights": in_out}),
            ("out must be on the CPU", y, {"out": torch.empty_like(out, device="meta")}),
            ("y must be on the CPU", torch.empty_like(y, device="meta"), {}),
            ("y must be contiguous", torch.zeros(8, 512, 6, dtype=BF16).transpose(1, 2), {}),
            ("partial_dtype must be", y, {"partial_dtype": torch.float16}),
            ("return_hook must be", y, {"return_hook": 0}),
        ]
        for message, rows, change in wrong:
            for _ in range(2):
                with pytest.raises(InvalidArgument, match=message):
                    combine(buffer, rows, d, **{"topk_weights": weights, "out": out, **change})
        grown = out.clone().requires_grad_()
        back = combine(buffer, y, d, topk_weights=weights.clone().requires_grad_(), out=grown)
        assert back.x.data_ptr() == grown.data_ptr()
        assert not back.x.requires_grad
        assert not back.lost_weight.requires_grad
        waiting = dispatch(buffer, given, return_hook=True)
        with pytest.raises(InvalidState, match="call its hook first"):
            combine(buffer, y, waiting, topk_weights=weights, out=out)
        assert waiting.hook is not None
        waiting.hook()
        assert combine(buffer, y, waiting, topk_weights=weights, out=out).x is out


def test_a_combine_like_one_before_is_refused_for_its_address_and_handle() -> None:
    run_ranks(emulated, 1, _combine_rules, timeout_s=200)


def _lazy(rank: int, num_ranks: int, is_inference: bool) -> None:
    """What is made when it is read is what would have been made at once, and made once."""
    given = inputs(SHAPE, (6, 3), 1)
    want = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
    y = expert_outputs(want, 1)[rank]
    with make(SHAPE) as buffer:
        with torch.inference_mode(is_inference):
            d = dispatch(buffer, given[rank])
            back = combine(buffer, y, d)
            assert "num_tokens_per_expert" not in d.__dict__
            core: Any = d.handle.core  # type: ignore[attr-defined]
            at_once = {name: getattr(core, name) for name in ("num_tokens_per_expert", "got", "wait_us")}
            of_handle = {name: getattr(core, name) for name in ("got", "layout_range", "src_token")}
            weights = lost_weight(core.own_ids, core.own_weights, back.got, SHAPE.num_experts // num_ranks)
        pairs = [(d, name, tensor) for name, tensor in at_once.items()]
        pairs += [(d.handle, name, tensor) for name, tensor in of_handle.items()]  # type: ignore[misc]
        for holder, name, tensor in pairs:
            with torch.inference_mode(not is_inference):  # whatever the mode is in which it is read
                made = getattr(holder, name)
            assert made is getattr(holder, name)
            assert torch.equal(made, tensor)
            checked = made.data_ptr(), made.dtype, made.stride(), made.is_inference()
            assert checked == (tensor.data_ptr(), tensor.dtype, tensor.stride(), is_inference), name
        for tensor in (d.x, d.got, d.num_tokens_per_expert, back.x, back.got, back.wait_us):
            assert isinstance(tensor, torch.Tensor)
            assert tensor.is_inference() == is_inference
        check_dispatched(d, want[rank])
        assert torch.equal(back.lost_weight, weights)
        assert back.got.tolist() == [True, True]
        assert back.wait_us is not None
        assert back.wait_us.shape == (2,)
        assert d.event is DONE
        assert back.event is DONE
        assert isinstance(d, epee.ep.LatencyDispatched)
        assert "num_tokens_per_expert=tensor" in repr(d)
        d.got = torch.zeros(2, dtype=torch.bool)  # as every field of a result
        assert not d.got.any()


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_is_made_when_it_is_read_is_what_was_made_at_once(is_inference: bool) -> None:
    run_ranks(emulated, 2, _lazy, is_inference, timeout_s=200)


def _bounded(rank: int, num_ranks: int) -> None:
    plans.MAX_FACTS = 3
    with make(SHAPE) as buffer:
        for seed in range(14):
            check_round(buffer, SHAPE, (seed % 7, 3), seed)
            known = buffer._plans
            assert max(len(known._dispatches), len(known._combines)) <= 3
        handles = [dispatch(buffer, inputs(SHAPE, (n, 3), 1)[rank], return_hook=True) for n in (5, 2)]
        check_plans = [len(known._dispatches), len(known._combines)]
        known._dispatches.clear()  # a call in flight keeps its plan
        for got, n in reversed(list(zip(handles, (5, 2), strict=True))):
            assert got.hook is not None
            got.hook()
            check_dispatched(got, oracle.dispatch(inputs(SHAPE, (n, 3), 1), 8, 6)[rank])
        assert max(check_plans) <= 3


def test_plans_are_bounded() -> None:
    run_ranks(emulated, 2, _bounded, timeout_s=200)


def _in_flight(rank: int, num_ranks: int) -> None:
    """Two buffers, and two calls in flight of one plan: each receives into its own memory, in either order."""
    with make(SHAPE) as first, make(SHAPE) as second:
        for seed in range(4):
            pending_calls = []
            for nth, buffer in enumerate((first, second, first, second)):
                given = inputs(SHAPE, (6, 3), 10 * seed + nth)
                packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
                pending_calls.append((buffer, given, packed, dispatch(buffer, given[rank], return_hook=True)))
            pending_calls = pending_calls if seed % 2 else pending_calls[::-1]
            for *_, packed, got in pending_calls:
                assert got.hook is not None
                got.hook()
                check_dispatched(got, packed[rank])
            backs = []
            for nth, (buffer, _, packed, got) in enumerate(pending_calls):
                backs.append(combine(buffer, expert_outputs(packed, nth)[rank], got, return_hook=True))
            for nth, ((_, given, packed, _), back) in reversed(list(enumerate(zip(pending_calls, backs, strict=True)))):
                assert back.hook is not None
                back.hook()
                assert torch.equal(bits(back.x), bits(oracle.combine(given, packed, expert_outputs(packed, nth))[rank]))


def test_calls_in_flight_that_share_a_plan_do_not_mix() -> None:
    run_ranks(emulated, 2, _in_flight, timeout_s=200)


def _too_many(rank: int, num_ranks: int) -> str:
    """Rank 0 has more tokens than its kernel has room for: its peer hears of it at once, and both go on."""
    shape = Shape(num_experts=64, num_topk=32, max_tokens=1024)
    with make(shape, timeout=60.0) as buffer:
        with pytest.raises(epee.EpeeError) as caught:
            dispatch(buffer, inputs(shape, (1024, 4), 1)[rank])
        check_round(buffer, shape, (2, 3), 2)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_a_batch_that_the_kernel_has_no_room_for_is_refused_everywhere() -> None:
    here, there = run_ranks(emulated, 2, _too_many, timeout_s=50)
    assert "InvalidArgument: 1024 tokens with top-32 of hidden 512 need" in here
    assert "MismatchError: dispatch (rank=1, peer=0, seq=1): rank 0 refused the call" in there
