"""Calls of a `LatencyBuffer` on GPUs that are like earlier ones: made without a look around, unless something happened.

The emulated kernels take longer than a look for the dead is put off, so the tests put it off for longer. And they make
calls without the poison of all other tests.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import epee
from epee.compat.deep_ep import EventOverlap
from epee.compat.deep_ep.event import no_event
from epee.ep.latency import gpu_path
from epee.ep.latency.gpu.params import BOTH_HALVES
from epee.ep.pool import latency as rooms
from epee.ep.pool import pool
from epee.errors import InvalidArgument, InvalidState, MismatchError, RankFailedError, StaleHandleError
from epee.gpu.device import Share
from epee.reference import latency as oracle
from tests.compat.test_deep_ep_low_latency import check_rows
from tests.compat.test_deep_ep_low_latency import make as make_names
from tests.csrc.emulated import has_compiler
from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer, emulated
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
from tests.harness import DEAD, run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
SHAPE = Shape()
OP = ("dispatch", "combine")


@contextmanager
def _warm(shape: Shape = SHAPE, num_tokens: int = 4) -> Iterator[tuple[epee.LatencyBuffer, Any, list[str]]]:
    """Give a buffer after some rounds, its path, and the list into which every call goes that is made as one before."""
    gpu_path.LOOK_S = 600.0
    with _plain(shape) as buffer:
        path, seen = buffer._path, []
        for name in OP:
            setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
        for _ in range(4):
            _round(buffer, shape, num_tokens)
        seen.clear()
        yield buffer, path, seen


def _plain(shape: Shape) -> epee.LatencyBuffer:
    buffer = make(shape)
    buffer._path.set_poison(False)  # type: ignore[attr-defined]
    return buffer


def _spied(made: Callable[..., Any], name: str, seen: list[str]) -> Callable[..., Any]:
    def spy(*args: Any) -> Any:
        got = made(*args)
        if got is not None and got is not False:
            seen.append(name)
        return got

    return spy


def _round(buffer: epee.LatencyBuffer, shape: Shape = SHAPE, num_tokens: int = 4, **options: Any) -> None:
    given = inputs(shape, (num_tokens,) * buffer.num_ranks, 1)[buffer.rank]
    d = dispatch(buffer, given, **options)
    if d.hook is not None:
        d.hook()
    y = torch.zeros(
        shape.num_experts // buffer.num_ranks, buffer.num_ranks * shape.max_tokens, shape.hidden, dtype=BF16
    )
    c = combine(buffer, y, d, **options)
    if c.hook is not None:
        c.hook()


def _same(rank: int, num_ranks: int) -> int:
    """Rounds give what the oracle gives, and all but the first ones are made as ones before."""
    gpu_path.LOOK_S = 600.0
    seen: list[str] = []
    with _plain(SHAPE) as buffer:
        for name in OP:
            setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
        for seed in range(5):
            check_round(buffer, SHAPE, (6, 3), seed)
            check_round(buffer, SHAPE, (6, 3), seed, payload="fp8")
            check_round(buffer, SHAPE, (3, 6), seed, active_ranks=torch.ones(2, dtype=torch.int32))
    return len(seen)


def test_calls_like_earlier_ones_give_what_the_oracle_gives() -> None:
    assert min(run_ranks(emulated, 2, _same, timeout_s=200)) >= 18


def _few_calls(rank: int, num_ranks: int) -> int:
    """Return how many Python functions a pair of calls like earlier ones enters."""
    entered: list[str] = []
    with _warm() as (buffer, _, seen):
        given = inputs(SHAPE, (4,), 1)[0]
        y = torch.zeros(SHAPE.num_experts, SHAPE.max_tokens, SHAPE.hidden, dtype=BF16)
        again = buffer.again
        assert again is not None
        for _ in range(2):
            got = again.dispatch(given.x, given.topk_idx, given.topk_weights, None, False, False, False, False)
            back = again.combine(y, got.handle, None, None, None, None, False)
            assert back is not None
        sys.setprofile(lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None)
        try:
            got = again.dispatch(given.x, given.topk_idx, given.topk_weights, None, False, False, False, False)
            again.combine(y, got.handle, None, None, None, None, False)
        finally:
            sys.setprofile(None)
        del seen
    return len(entered)


def test_a_pair_like_an_earlier_one_enters_few_functions() -> None:
    (entered,) = run_ranks(emulated, 1, _few_calls, timeout_s=200)
    assert entered <= 44, "each costs a call on a GPU 0.1 to 0.3 us"


def _hooked(rank: int, num_ranks: int) -> list[str]:
    """Calls with hooks, their receive phases too, are made as ones before, also while others wait for theirs."""
    gpu_path.LOOK_S = 600.0
    seen: list[str] = []
    with _plain(SHAPE) as buffer:
        for name in (*OP, "receive"):
            setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
        for seed in range(4):
            check_round(buffer, SHAPE, (6, 3), seed, use_hook=True)
            check_round(buffer, SHAPE, (6, 3), seed, use_hook=True, payload="fp8", late_weights=True)
            check_round(buffer, SHAPE, (3, 6), seed, use_hook=True, active_ranks=torch.ones(2, dtype=torch.int32))
            check_round(buffer, SHAPE, (6, 3), seed)
        found = list(seen)
        for seed in range(4):
            given = [inputs(SHAPE, (6, 3), 10 * seed + nth) for nth in range(2)]
            calls = [dispatch(buffer, each[rank], return_hook=True) for each in given]
            with pytest.raises(InvalidState, match="the oldest of 2 calls has not received yet"):
                dispatch(buffer, given[0][rank], return_hook=True)
            for at in (seed % 2, 1 - seed % 2):
                hook = calls[at].hook
                assert hook is not None
                hook()
                check_dispatched(calls[at], oracle.dispatch(given[at], SHAPE.num_experts, SHAPE.max_tokens)[rank])
                with pytest.raises(InvalidState, match="called already"):
                    hook()
        found += seen[len(found) :]
        waiting = dispatch(buffer, inputs(SHAPE, (6, 3), 1)[rank], return_hook=True)
        with pytest.raises(InvalidState, match="not received"):
            buffer.sync()
        assert waiting.hook is not None
        waiting.hook()
        buffer.sync()
        for seed in range(3):
            check_round(buffer, SHAPE, (6, 3), seed, use_hook=True)
        buffer.close()
        with pytest.raises(InvalidState, match="closed"):
            dispatch(buffer, inputs(SHAPE, (6, 3), 1)[rank], return_hook=True)
    return found


def test_calls_with_hooks_are_made_as_ones_before() -> None:
    for found in run_ranks(emulated, 2, _hooked, timeout_s=200):
        assert found.count("dispatch") >= 12 + 7
        assert found.count("combine") >= 12
        assert found.count("receive") >= 20 + 8


def _with_events(rank: int, num_ranks: int) -> list[str]:
    """Calls on the buffer's own stream are made as ones before; they and others give what the oracle gives."""
    gpu_path.LOOK_S = 600.0
    seen: list[str] = []
    with _plain(SHAPE) as buffer:
        for name in (f"{op}_async" for op in OP):
            setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
        for seed in range(4):
            check_round(buffer, SHAPE, (6, 3), seed, async_op=True)
            check_round(buffer, SHAPE, (6, 3), seed, async_op=True, payload="fp8", late_weights=True)
            check_round(buffer, SHAPE, (6, 3), seed)
        event = dispatch(buffer, inputs(SHAPE, (6, 3), 1)[rank], async_op=True).event
        assert event.query()
        dispatch(buffer, inputs(SHAPE, (6, 3), 1)[rank], async_op=True, previous_event=event)
        found = list(seen)
        with pytest.raises(InvalidArgument, match="previous_event must be"):
            dispatch(buffer, inputs(SHAPE, (6, 3), 1)[rank], async_op=True, previous_event=7)
    return found


def test_calls_with_events_are_made_as_ones_before() -> None:
    for found in run_ranks(emulated, 2, _with_events, timeout_s=200):
        assert found.count("dispatch_async") >= 6 + 2
        assert found.count("combine_async") >= 6


def _hook_after_changes(rank: int, num_ranks: int) -> None:
    """A hook that is called when something has happened is run after all checks."""
    with _warm() as (buffer, path, seen):
        given, platform = inputs(SHAPE, (4,), 1)[0], path._platform
        buffer.again.receive = _spied(buffer.again.receive, "receive", seen)  # type: ignore[union-attr, method-assign]
        for _ in range(3):
            _round(buffer, return_hook=True)
        seen.clear()
        _round(buffer, return_hook=True)
        assert seen == ["dispatch", "receive", "combine", "receive"]
        for name, value in (("stream", 7), ("is_capturing", True)):
            waiting = dispatch(buffer, given, return_hook=True)
            setattr(platform, name, lambda value=value: value)
            seen.clear()
            assert waiting.hook is not None
            waiting.hook()
            delattr(platform, name)
            assert seen == []
            for _ in range(2):
                _round(buffer)
        waiting = dispatch(buffer, given, return_hook=True)
        path.core.device.report.words[0] = 1  # a time-out, of an earlier call
        assert waiting.hook is not None
        with pytest.raises(epee.errors.CommTimeoutError):
            waiting.hook()


def test_a_hook_after_changes_is_run_after_all_checks() -> None:
    run_ranks(emulated, 1, _hook_after_changes, timeout_s=200)


def _masks_only(rank: int, num_ranks: int) -> int:
    seen: list[str] = []
    with _plain(SHAPE) as buffer:
        for name in OP:
            setattr(buffer.again, name, _spied(getattr(buffer.again, name), name, seen))
        for seed in range(5):
            check_round(buffer, SHAPE, (3, 6), seed, active_ranks=torch.ones(2, dtype=torch.int32))
    return len(seen)


def test_calls_with_masks_alone_find_quiet_times_too() -> None:
    assert min(run_ranks(emulated, 2, _masks_only, timeout_s=200)) >= 4


def _left(rank: int, num_ranks: int) -> None:
    """Whatever is not as it was sends a call the ordinary way, and it is made there."""
    with _warm() as (buffer, path, seen):
        core, platform = path.core, path._platform

        def is_ordinary(**options: Any) -> None:
            seen.clear()
            _round(buffer, **options)
            assert seen == []

        _round(buffer)
        assert seen == list(OP)
        platform.stream = lambda: 7
        seen.clear()
        _round(buffer)
        assert seen == ["combine"]  # on that stream the next ones are quiet
        _round(buffer)
        assert seen[-2:] == list(OP)
        platform.is_capturing = lambda: True
        is_ordinary()
        platform.is_capturing = lambda: False
        path.set_poison(True)
        is_ordinary()
        path.set_poison(False)
        for options in ({"timeout": 60.0}, {"timeout_us": 10**7}, {"num_sms": 2}, {"return_hook": True}):
            is_ordinary(**options)  # with a hook the first one is
        with torch.profiler.profile():
            is_ordinary()
        path._look_at = 0.0  # it is time to look for the dead
        seen.clear()
        _round(buffer)
        assert seen == ["combine"]
        waiting = dispatch(buffer, inputs(SHAPE, (4,), 1)[0], return_hook=True)
        seen.clear()
        dispatch(buffer, inputs(SHAPE, (4,), 1)[0])
        assert waiting.hook is not None
        waiting.hook()
        assert seen == []
        other = Share(platform.device, 1)  # another buffer of this GPU
        _round(buffer)
        assert buffer._path.core.num_calls > 0
        other.leave()
        for _ in range(3):
            _round(buffer)
        assert seen[-2:] == list(OP)
        core.device.report.words[0] = 1  # a time-out, of an earlier call
        with pytest.raises(epee.errors.CommTimeoutError):
            dispatch(buffer, inputs(SHAPE, (4,), 1)[0])
        with pytest.raises(InvalidState, match="has timed out on this rank"):
            dispatch(buffer, inputs(SHAPE, (4,), 1)[0])


def test_what_has_happened_sends_a_call_the_ordinary_way() -> None:
    run_ranks(emulated, 1, _left, timeout_s=200)


def _timeouts(rank: int, num_ranks: int) -> None:
    """A call waits as long as the buffer says, whatever the first call of its kind was told."""
    gpu_path.LOOK_S = 600.0
    with _plain(SHAPE) as buffer:
        for options in ({"timeout": 7.0}, {}, {}, {}):
            _round(buffer, **options)
        for known in (buffer._plans._dispatches, buffer._plans._combines):
            (checked,) = known.values()  # type: ignore[attr-defined]
            assert checked.plan.calls.timeout_ns == 7 * 10**9
            assert checked.plan.calls.made[BOTH_HALVES]._args.call.timeout_ns == int(buffer._timeout * 1e9)


def test_a_call_waits_as_long_as_its_buffer_says() -> None:
    run_ranks(emulated, 1, _timeouts, timeout_s=200)


def _rules(rank: int, num_ranks: int) -> None:
    """What is wrong with a call is found where all else is like the one before."""
    shape = Shape(num_topk=1)
    with _warm(shape, 1) as (buffer, _, seen):
        given = inputs(shape, (1,), 1)[0]
        x, idx, weights = given.x, given.topk_idx, given.topk_weights
        room = torch.zeros(x.numel() + 16, dtype=BF16)
        start = (16 - room.data_ptr() % 16) // 2 % 8 + 1
        good: dict[str, Any] = {"x": x, "topk_idx": idx, "topk_weights": weights}
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("multiples of 16 bytes", {"x": room[start : start + x.numel()].view(x.shape)}),
            ("x must be on the CPU", {"x": torch.empty_like(x, device="meta")}),
            ("topk_idx must be on the CPU", {"topk_idx": torch.empty_like(idx, device="meta")}),
            ("topk_weights must be on the CPU", {"topk_weights": torch.empty_like(weights, device="meta")}),
            ("x must be bfloat16", {"x": x.half()}),
            ("topk_idx must be int64", {"topk_idx": idx.int()}),
            ("topk_idx must be int64", {"topk_idx": idx[:, :0]}),
            ("topk_weights must be float32", {"topk_weights": weights.double()}),
            ("topk_weights must be float32", {"topk_weights": weights[0]}),
            ("plain dense tensor", {"topk_weights": torch.complex(weights, -weights).conj().imag}),
            ("x must be a plain dense tensor", {"x": x.to_sparse()}),
            ("x must be a tensor", {"x": x.float().numpy()}),
            ("use_fp8 must be True or False", {"use_fp8": 0}),
            ("topk_idx must hold expert ids", {"topk_idx": idx + 100}),
            ("active_ranks must", {"active_ranks": torch.ones(1)}),
            ("active_ranks must", {"active_ranks": torch.ones(0, dtype=torch.int32)}),
        ]
        d = buffer.dispatch(**good)
        assert seen == ["dispatch"]
        for message, change in wrong:
            with pytest.raises(InvalidArgument, match=message):
                buffer.dispatch(**{**good, **change})
        y, out = torch.zeros(8, 6, 512, dtype=BF16), torch.zeros(1, 512, dtype=BF16)
        for _ in range(3):
            assert buffer.combine(y, d.handle, topk_weights=weights, out=out).x is out
        assert seen.count("combine") == 2  # the first one of such is checked
        wrong = [
            ("out must not share memory with y", {"out": y.view(-1, 512)[2:3]}),
            ("out must be bfloat16", {"out": out[:, :8]}),
            ("y must be contiguous", {"y": torch.zeros(8, 512, 6, dtype=BF16).transpose(1, 2)}),
            ("y must be bfloat16", {"y": y[:7]}),
            ("topk_weights must be float32", {"topk_weights": weights.double()}),
            ("partial_dtype must be", {"partial_dtype": torch.float16}),
            ("handle must be", {"handle": d}),
        ]
        for message, change in wrong:
            with pytest.raises(InvalidArgument, match=message):
                buffer.combine(**{"y": y, "handle": d.handle, "topk_weights": weights, "out": out, **change})
        with make(shape) as second, pytest.raises(StaleHandleError):
            second.combine(y, d.handle)
        buffer.sync()
        with pytest.raises((StaleHandleError, InvalidState)) if buffer.epoch else pytest.raises(InvalidArgument):
            buffer.combine(y if buffer.epoch else y[:7], d.handle)


def test_what_is_wrong_is_found_in_a_call_like_an_earlier_one() -> None:
    run_ranks(emulated, 1, _rules, timeout_s=200)


def _turns(rank: int, num_ranks: int) -> None:
    """A call from within one is refused, a close from within one happens at its end, a child gets an error."""
    with _warm() as (buffer, path, seen):
        given, told = inputs(SHAPE, (4,), 1)[0], []

        def nested(*_: Any) -> None:
            with pytest.raises(InvalidState, match="in progress"):
                dispatch(buffer, given)
            told.append("nested")

        _interrupt(path, nested)
        dispatch(buffer, given)
        assert told == ["nested"]
        assert seen == ["dispatch"]
        child = os.fork()
        if not child:
            try:
                dispatch(buffer, given)
            except epee.errors.ForkError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        _interrupt(path, lambda *_: buffer.close())
        dispatch(buffer, given)
        assert buffer._turns.is_closed
        with pytest.raises(InvalidState, match="closed"):
            dispatch(buffer, given)


def _interrupt(path: Any, handler: Callable[..., None]) -> None:
    """Let a signal come in the midst of the next call that is made as one before."""
    core = path.core
    launch = core._launch

    def interrupted(*args: Any) -> None:
        core._launch = launch
        signal.signal(signal.SIGUSR1, handler)
        signal.raise_signal(signal.SIGUSR1)
        launch(*args)

    core._launch = interrupted


def test_calls_like_earlier_ones_keep_their_turn() -> None:
    run_ranks(emulated, 1, _turns, timeout_s=200)


def _untold(rank: int, num_ranks: int) -> str:
    """An error before the peer has heard of a call is told to it; memory that is short is asked for once more."""
    with _warm() as (buffer, path, seen):
        given = inputs(SHAPE, (4, 4), 1)[rank]
        core, call, errors = path.core, path.core.dispatch, [torch.OutOfMemoryError(), ValueError("a handler's")]

        def fails(*args: Any, **options: Any) -> Any:
            if len(args) > 8 and errors:  # in quiet times
                raise errors.pop(0)
            return call(*args, **options)

        core.dispatch = fails if rank == 0 else call
        dispatch(buffer, given)
        assert seen == [] if rank == 0 else ["dispatch"]
        told = ""
        try:
            dispatch(buffer, given)
            buffer.check()
        except (ValueError, MismatchError) as error:
            told = f"{type(error).__name__}: {error}"
        core.dispatch = call
        check_round(buffer, SHAPE, (4, 4), 1)
        return told


def test_an_error_before_a_call_is_told_to_the_peer() -> None:
    here, there = run_ranks(emulated, 2, _untold, timeout_s=60)
    assert here == "ValueError: a handler's"
    assert "rank 0 refused the call" in there


def _death(rank: int, num_ranks: int, use_hook: bool) -> None:
    gpu_path.LOOK_S = 0.001
    with _plain(SHAPE) as buffer:
        for seed in range(4):
            check_round(buffer, SHAPE, (4, 4), seed, use_hook=use_hook)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankFailedError, match="is dead"):
            _dispatch_on(buffer, rank, use_hook)
        mask = torch.ones(2, dtype=torch.int32)
        d = dispatch(buffer, inputs(SHAPE, (4, 4), 1)[rank], active_ranks=mask)
        assert d.got.tolist() == [True, False]
        assert mask.tolist() == [1, 0]


def _dispatch_on(buffer: epee.LatencyBuffer, rank: int, use_hook: bool) -> None:
    for _ in range(2000):
        got = dispatch(buffer, inputs(SHAPE, (4, 4), 1)[rank], return_hook=use_hook)
        if got.hook is not None:
            got.hook()


@pytest.mark.parametrize("use_hook", [False, True])
def test_a_death_is_met(use_hook: bool) -> None:
    assert run_ranks(emulated, 2, _death, use_hook, dead={1}, timeout_s=100) == [None, DEAD]


def _names(rank: int, num_ranks: int, enable_shrink: bool) -> None:
    """By DeepEP's names: the same results, and whatever is not as it was sends a call the ordinary way."""
    gpu_path.LOOK_S = 600.0
    rooms.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    buffer = make_names(enable_shrink=enable_shrink)
    sizes, stats = (SHAPE.max_tokens, SHAPE.num_experts), torch.zeros(SHAPE.num_experts // num_ranks, dtype=torch.int32)
    seen: list[str] = []
    for seed in range(8):
        given = inputs(SHAPE, (6, 3), seed)
        mine, packed = given[rank], oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
        options: dict[str, Any] = {"cumulative_local_expert_recv_stats": stats} if seed == 5 else {}
        outputs = expert_outputs(packed, seed)
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, *sizes, use_fp8=False, return_recv_hook=seed == 6, **options
        )
        if hook is not None:
            hook()
        check_rows(recv_x, counts, packed[rank])
        assert event.event is None
        given_back = list(handle) if seed == 4 else handle
        combined, event, hook = buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, given_back)
        assert (event.event, hook) == (None, None)
        assert torch.equal(bits(combined), bits(oracle.combine(given, packed, outputs)[rank]))
        (core,) = buffer._padded._lately.values()
        if not seed:
            core._path.set_poison(False)
            for name in OP:
                setattr(core.again, name, _spied(getattr(core.again, name), name, seen))
        assert ("dispatch" in seen) == (seed not in {0, 6}), (seed, seen)
        assert ("combine" in seen) == (seed > 0), (seed, seen)
        seen.clear()
    with pytest.raises(InvalidArgument, match="topk_idx must be that"):
        buffer.low_latency_combine(outputs[rank], mine.topk_idx[:1], mine.topk_weights, handle)
    with pytest.raises(InvalidArgument, match="handle must be"):
        buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, 7)
    buffer.destroy()
    with pytest.raises(InvalidState, match="destroyed"):
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, *sizes, use_fp8=False)
    assert seen == []


def _hidden_sizes(rank: int, num_ranks: int) -> int:
    """Calls of two hidden sizes in turn are like earlier ones, each of its own."""
    gpu_path.LOOK_S = 600.0
    rooms.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    shapes = [Shape(), Shape(hidden=256)]
    buffer = make_names()
    seen: list[str] = []
    for seed in range(6):
        for shape in shapes:
            given = inputs(shape, (4, 4), seed)
            packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens)
            mine, sizes = given[rank], (shape.max_tokens, shape.num_experts)
            recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(mine.x, mine.topk_idx, *sizes, use_fp8=False)
            check_rows(recv_x, counts, packed[rank])
            outputs = expert_outputs(packed, seed)
            back = buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, handle)[0]
            assert torch.equal(bits(back), bits(oracle.combine(given, packed, outputs)[rank]))
        if not seed:
            cores = list(buffer._padded._lately.values())
            assert len(cores) == len(shapes)
            cores[0]._path.set_poison(False)  # of both: they share it
            for core in cores:
                for name in OP:
                    setattr(core.again, name, _spied(getattr(core.again, name), name, seen))
    return len(seen)


def test_calls_of_two_hidden_sizes_by_turns_are_like_earlier_ones() -> None:
    assert min(run_ranks(emulated, 2, _hidden_sizes, timeout_s=200)) >= 2 * 2 * 4


@pytest.mark.parametrize("enable_shrink", [False, True])
def test_names_of_deep_ep_make_calls_like_earlier_ones(enable_shrink: bool) -> None:
    run_ranks(_names, 2, enable_shrink, timeout_s=200)


def test_an_event_of_nothing_is_an_event() -> None:
    made, other = no_event(), EventOverlap()
    assert vars(other).items() <= {"event": None, "extra_tensors": None, "_hook": None}.items()
    for event in (made, other):
        assert (event.event, event.extra_tensors) == (None, None)
        with event as entered:
            assert entered is event
        with pytest.raises(InvalidState):
            event.current_stream_wait()
    made.register_hook_after_wait(lambda: 1)
    assert no_event()._hook is None
