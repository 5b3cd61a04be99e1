"""Failures of the latency kernels, on any platform: whole sources or none, the right error, no trap,
and a buffer that works on."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from epee.ep.latency.gpu.core import LatencyCore
from epee.ep.latency.gpu.params import OP_COMBINE, OP_DISPATCH
from epee.ep.latency.gpu.types import CoreOptions
from epee.errors import CommTimeoutError, EpeeError, InvalidArgument, InvalidState, MismatchError
from epee.reference import latency as reference
from tests.csrc.emulated import all_gather_bytes
from tests.csrc.latency_cases import (
    Plan,
    Round,
    bring,
    check_received,
    expected,
    expected_sums,
    expert_output,
    inputs_of,
    make_core,
    play,
    same,
    send,
    wait_for,
)
from tests.harness import run_ranks

SHORT_S, LONG_S = 1.5, 60.0  # a test that waits for the latter fails by its own time-out
FEW, MANY = Round((3, 2, 4), use_fp8=True, seed=3), Round((9, 12, 8), use_fp8=True, seed=4)
PLAN = Plan((FEW,), max_tokens=12)


def pause(core: LatencyCore, op: str, place: int, seconds: float) -> None:
    """Let threads of this process stand still at a place of a kernel; only emulated ones can."""
    library = core.platform._libraries[f"kernels/latency/{op}.cuh"]  # type: ignore[attr-defined]
    (ctypes.c_uint * 16).in_dll(library, "emulated_pause_us")[place] = int(seconds * 1e6)


def error_of(call: Any) -> tuple[str, str]:
    """The name and text of what `call` raises."""
    try:
        call()
    except EpeeError as error:
        return type(error).__name__, str(error)
    return "", ""


def mask_of(core: LatencyCore, *values: int) -> torch.Tensor:
    """A mask of the caller's."""
    return torch.tensor(values, dtype=torch.int32, device=core.platform.device)


def options(this: Round, timeout_s: float, *, strict: bool = False) -> CoreOptions:
    """How a call runs here."""
    return CoreOptions(timeout_s, strict, use_fp8=this.use_fp8)


def exchange(
    core: LatencyCore, this: Round, mask: torch.Tensor, timeout_s: float, got: Sequence[Sequence[bool]]
) -> None:
    """A dispatch and a combine in which `got[me]` comes; compares both with the reference."""
    rank = core.config.rank
    inputs, packed = expected(PLAN, this, got)
    d = send(core, this, inputs[rank], options(this, timeout_s), active_ranks=mask)
    wait_for(core)
    check_received(d, packed[rank], f"rank {rank}: dispatch")
    y = expert_output(PLAN, packed[rank], rank)
    # who is awaited in vain is out by now, and nobody else may be left out where the machine is busy
    c = bring(core, this, y, inputs[rank], d, options(this, LONG_S), active_ranks=mask)
    wait_for(core)
    want = expected_sums(PLAN, this, inputs, packed, got)
    same(c.x.cpu(), want[rank], f"rank {rank}: combine")
    heard = [bool(packed[dst].got[rank] and got[rank][dst]) for dst in range(len(inputs))]
    same(c.got.cpu(), torch.tensor(heard), f"rank {rank}: got of combine")
    core.check()


WITHOUT_2 = [[True, True, False], [True, True, False], [True, True, True]]
ALONE_2 = [[True, True, False], [True, True, False], [False, False, True]]


def missing(rank: int, num_ranks: int, platform: str, this: Round) -> Any:
    """Rank 2 stays away from the first exchange, and comes when it is over."""
    core = make_core(PLAN, rank, platform)
    mask = mask_of(core, 1, 1, 1)
    if rank < 2:
        exchange(core, this, mask, SHORT_S, WITHOUT_2)
        lost = core.lost()
        exchange(core, replace(this, seed=8), mask, LONG_S, WITHOUT_2)  # nobody waits for it again
        all_gather_bytes(b"over")
        return mask.tolist(), lost, core.lost()
    all_gather_bytes(b"over")
    inputs, packed = expected(PLAN, this)
    d = send(core, this, inputs[rank], options(this, LONG_S), active_ranks=mask)  # all had sent to it
    wait_for(core)
    check_received(d, packed[rank], "who was late")
    later = replace(this, seed=8)
    inputs, packed = expected(PLAN, later, ALONE_2)
    d = send(core, later, inputs[rank], options(this, LONG_S), active_ranks=mask)  # they have said that they went on
    wait_for(core)
    check_received(d, packed[rank], "who was left out")
    return mask.tolist(), core.lost(), ()


def slow_rows(rank: int, num_ranks: int, platform: str, this: Round, op: str) -> Any:
    """Rank 1 announces itself and is slow with its rows, in dispatch or in combine, so that others have laid out."""
    core = make_core(PLAN, rank, platform)
    mask = mask_of(core, 1, 1, 1)
    everybody = [[True] * 3] * 3
    without_1 = [[True, False, True], [True, True, True], [True, False, True]]
    inputs, packed = expected(PLAN, this, without_1 if op == "dispatch" else everybody)
    if rank == 1:
        pause(core, op, 4, 0.6 if op == "dispatch" else 0.4)  # for each warp and record: more than 3 s in all
    timeout_s = SHORT_S if rank != 1 else LONG_S
    first = SHORT_S if op == "dispatch" and rank != 1 else LONG_S
    d = send(core, this, inputs[rank], options(this, first), active_ranks=mask)
    wait_for(core)
    check_received(d, packed[rank], f"rank {rank}: dispatch")
    if op == "combine":
        y = expert_output(PLAN, packed[rank], rank)
        all_gather_bytes(b"at about the same time")
        c = bring(core, this, y, inputs[rank], d, options(this, timeout_s), active_ranks=mask)
        wait_for(core)
        same(c.got.cpu(), torch.tensor(without_1[rank]), f"rank {rank}: got of combine")
        same(c.x.cpu(), expected_sums(PLAN, this, inputs, packed, without_1)[rank], f"rank {rank}: combine")
    all_gather_bytes(b"over")
    return mask.tolist(), core.lost()


def masked(rank: int, num_ranks: int, platform: str, this: Round) -> None:
    """Rank 2 is out from the start, and makes its own calls alone; then all are in."""
    core = make_core(PLAN, rank, platform)
    mask = mask_of(core, 1, 1, 0) if rank < 2 else mask_of(core, 0, 0, 1)
    for seed in range(5):
        exchange(core, replace(this, seed=seed), mask, LONG_S, ALONE_2)
    all_gather_bytes(b"over")
    assert core.lost() == ()
    mask.fill_(1)  # they have made as many calls, so they find each other again
    exchange(core, replace(this, seed=9), mask, LONG_S, [[True] * 3] * 3)


def strict(rank: int, num_ranks: int, platform: str) -> Any:
    """Without a mask of the caller's, a silent rank is an error, and is awaited again."""
    core = make_core(PLAN, rank, platform)
    given = inputs_of(PLAN, FEW, rank)
    error = ("", "")
    if rank != 2:
        send(core, FEW, given, options(FEW, SHORT_S, strict=True))
        wait_for(core)
        error = error_of(core.check)
        all_gather_bytes(b"over")
    else:
        all_gather_bytes(b"over")
        send(core, FEW, given, options(FEW, LONG_S, strict=True))
    play(core, PLAN, MANY, f"rank {rank}")
    return error, core.active_ranks.tolist()


def bad_expert(rank: int, num_ranks: int, platform: str, value: int) -> Any:
    """A bad id is taken as -1 and reported; nothing is written anywhere else."""
    core = make_core(PLAN, rank, platform)
    inputs = [inputs_of(PLAN, FEW, src) for src in range(num_ranks)]
    given = inputs[rank]
    if rank == 0:
        given.topk_idx[1, 2] = value
    d = send(core, FEW, given, options(FEW, LONG_S, strict=True))
    wait_for(core)
    error = error_of(core.check)
    inputs[0].topk_idx[1, 2] = -1
    packed = reference.dispatch(inputs, 12, PLAN.max_tokens, use_fp8=True)
    check_received(d, packed[rank], f"rank {rank}")
    play(core, PLAN, MANY, f"rank {rank}")
    return error


def differing(rank: int, num_ranks: int, platform: str) -> Any:
    """Rank 2 sends bfloat16 where the others send FP8."""
    core = make_core(PLAN, rank, platform)
    this = FEW if rank < 2 else replace(FEW, use_fp8=False)
    d = send(core, this, inputs_of(PLAN, FEW, rank), options(this, LONG_S, strict=True))
    wait_for(core)
    error, got = error_of(core.check), d.handle.got.tolist()
    play(core, PLAN, MANY, f"rank {rank}")
    return error, got


def refused(rank: int, num_ranks: int, platform: str, op: int) -> Any:
    """Rank 0 cannot make a call; its refusal keeps everybody in step."""
    core = make_core(PLAN, rank, platform)
    inputs, packed = expected(PLAN, FEW)
    error = ("", "")
    if op == OP_DISPATCH:
        if rank == 0:
            core.refuse(op)
        else:
            send(core, FEW, inputs[rank], options(FEW, LONG_S, strict=True))
    else:
        d = send(core, FEW, inputs[rank], options(FEW, LONG_S, strict=True))
        wait_for(core)
        y = expert_output(PLAN, packed[rank], rank)
        if rank == 0:
            core.refuse(op)
        else:
            bring(core, FEW, y, inputs[rank], d, options(FEW, LONG_S, strict=True))
    wait_for(core)
    error = error_of(core.check)
    play(core, PLAN, MANY, f"rank {rank}")
    return error


def hooks(rank: int, num_ranks: int, platform: str) -> list[tuple[str, str]]:
    """Two calls in flight, received in any order, with whole calls between; everything else is refused."""
    core = make_core(PLAN, rank, platform)
    split = replace(options(FEW, LONG_S), return_hook=True)
    rounds = [replace(MANY if seed % 3 else FEW, seed=seed) for seed in range(12)]
    known = [expected(PLAN, this) for this in rounds]

    def start(number: int, how: CoreOptions) -> Any:
        return send(core, rounds[number], known[number][0][rank], how)

    def end(number: int, d: Any) -> None:
        if d.hook is not None:
            d.hook()
        wait_for(core)
        check_received(d, known[number][1][rank], f"rank {rank}, call {number}")

    errors: list[tuple[str, str]] = []
    for number in range(0, 12, 3):
        first, second = start(number, split), start(number + 1, replace(split, return_hook=number % 2 == 0))
        if number == 0:
            errors.append(error_of(lambda: start(2, split)))
            errors.append(error_of(lambda: start(2, replace(split, return_hook=False))))
        end(number + 1, second)  # the later one first
        end(number, first)
        errors += [error_of(first.hook)] if number == 0 else []
        end(number + 2, start(number + 2, replace(split, return_hook=False)))
    last = start(0, split)
    core.set_view([True] * num_ranks, core.memory.tags() + 100)
    core.memory.open_view()
    errors.append(error_of(last.hook))
    return errors


def rejoined(rank: int, num_ranks: int, platform: str) -> list[int]:
    """After a loss the ranks agree on a view again, and everything is as in a fresh buffer."""
    core = make_core(PLAN, rank, platform)
    mask = core.active_ranks
    if rank < 2:
        exchange(core, FEW, mask, SHORT_S, WITHOUT_2)
    left = mask.tolist()
    assert core.lost() == ((2,) if rank < 2 else ())
    tags = [int.from_bytes(raw, "little") for raw in all_gather_bytes(core.memory.tags().to_bytes(8, "little"))]
    core.set_view([True] * num_ranks, max(tags) + 8)
    core.memory.open_view()
    all_gather_bytes(b"agreed")
    for seed in range(4):
        play(core, PLAN, replace(MANY if seed % 2 else FEW, seed=seed), f"rank {rank}")
    return left


def far_on(rank: int, num_ranks: int, platform: str, step: int) -> None:
    """The ranks go on so far above what their words show that those, with 32 bits of a number, seem later or new."""
    core = make_core(PLAN, rank, platform)
    for seed in range(8):
        play(core, PLAN, replace(MANY if seed % 2 else FEW, seed=seed), f"rank {rank}")
    core.set_view([True] * num_ranks, core.memory.tags() + step)
    core.memory.open_view()
    all_gather_bytes(b"agreed")
    for seed in range(20, 28):
        this = replace(MANY if seed % 2 else FEW, weights="combine", seed=seed)
        if rank == seed % num_ranks:
            time.sleep(0.1)  # the others look at old words until it comes
        play(core, PLAN, this, f"rank {rank}, far on")


def replayed_before(rank: int, num_ranks: int, platform: str, *, strict: bool) -> list[tuple[str, str]]:
    """Rank 0 replays a graph between the two steps into a view: it ends without the others, and is nothing to them."""
    core = make_core(PLAN, rank, platform)
    play(core, PLAN, MANY, f"rank {rank}")
    core.set_view([True] * num_ranks, core.memory.tags() + 8)
    all_gather_bytes(b"all are ready")
    errors = []
    for number in range(6 if rank == 0 else 0):
        this, mask = FEW if number % 2 else MANY, mask_of(core, *[1] * num_ranks)
        inputs, packed = expected(PLAN, this, [[src == dst for src in range(num_ranks)] for dst in range(num_ranks)])
        how = options(this, LONG_S, strict=strict)
        d = send(core, this, inputs[0], how, active_ranks=mask)
        wait_for(core)
        check_received(d, packed[0], "alone")
        assert mask.tolist() == [1] * num_ranks if strict else [1] + [0] * (num_ranks - 1)
        errors.append(error_of(core.check))
        bring(core, this, expert_output(PLAN, packed[0], 0), inputs[0], d, how, active_ranks=mask)
        wait_for(core)
        core.check()
    assert core.lost() == (() if strict or rank else tuple(range(1, num_ranks)))
    core.memory.open_view()
    all_gather_bytes(b"all are there")
    for seed in range(8):
        play(core, PLAN, replace(MANY if seed % 2 else FEW, seed=seed), f"rank {rank}, round {seed}")
    inputs = inputs_of(PLAN, FEW, rank)
    if rank == 1:
        core.refuse(OP_DISPATCH)
    else:
        send(core, FEW, inputs, options(FEW, LONG_S, strict=True))
    wait_for(core)
    return [*errors, error_of(core.check)]


def far_behind(rank: int, num_ranks: int, platform: str) -> list[tuple[str, str]]:
    """Rank 2 misses one strict call after the other; who is too far behind is neither written to nor awaited."""
    core = make_core(PLAN, rank, platform)
    errors = []
    if rank < 2:
        for number in range(5):  # more than there are slots; the last ones would take LONG_S if they waited
            how = options(MANY, SHORT_S if number < PLAN_IN_FLIGHT else LONG_S, strict=True)
            send(core, MANY, inputs_of(PLAN, MANY, rank), how)
            wait_for(core)
            errors.append(error_of(core.check))
    tags = [int.from_bytes(raw, "little") for raw in all_gather_bytes(core.memory.tags().to_bytes(8, "little"))]
    core.set_view([True] * num_ranks, max(tags) + 8)
    core.memory.open_view()
    all_gather_bytes(b"agreed")
    for seed in range(4):
        play(core, PLAN, replace(MANY, seed=seed), f"rank {rank}")
    return errors


PLAN_IN_FLIGHT = 2


def aborted(rank: int, num_ranks: int, platform: str) -> tuple[str, str]:
    """A close while a kernel waits."""
    core = make_core(PLAN, rank, platform)
    error = ("", "")
    if rank == 0:
        core.device.abort()
        send(core, FEW, inputs_of(PLAN, FEW, rank), options(FEW, LONG_S))
        wait_for(core)
        error = error_of(core.check)
    all_gather_bytes(b"over")
    core.close()
    core.close()
    return error


def killed(rank: int, num_ranks: int, platform: str, point: str) -> None:
    """Rank 1 dies at `point` of its fourth dispatch; the others go on without it, and know it."""
    core = make_core(PLAN, rank, platform)
    mask = mask_of(core, 1, 1, 1)
    for number in range(7):
        this = replace(MANY if number % 2 else FEW, is_split=point == "between", seed=number)
        is_awaited = number >= 3 and bool(mask[1])  # in vain; nobody else may be left out where the machine is busy
        how = replace(options(this, SHORT_S if is_awaited else LONG_S), return_hook=this.is_split)
        inputs, packed = expected(PLAN, this)
        if rank == 1 and number == 3:
            if point != "before":
                send(core, this, inputs[1], how, active_ranks=mask)
            if point == "after":
                wait_for(core)
            os.kill(os.getpid(), signal.SIGKILL)
        d = send(core, this, inputs[rank], how, active_ranks=mask)
        if d.hook is not None:
            d.hook()
        wait_for(core)
        came = bool(d.handle.got[1])
        assert came or number >= 3, number
        got = [[True, came, True]] * num_ranks
        inputs, packed = expected(PLAN, this, got)
        check_received(d, packed[rank], f"rank {rank}, call {number}")
        c = bring(core, this, expert_output(PLAN, packed[rank], rank), inputs[rank], d, how, active_ranks=mask)
        if c.hook is not None:
            c.hook()
        wait_for(core)
        heard = [[True, bool(c.got[1]), True]] * num_ranks
        want = expected_sums(PLAN, this, inputs, packed, heard)
        same(c.x.cpu(), want[rank], f"rank {rank}, call {number}: combine")
    assert mask.tolist() == [1, 0, 1]
    core.check()  # and no error of the GPU's that stays


def check_missing_source_is_left_out_whole_and_not_awaited_again(platform: str) -> None:
    """In packets and in rows."""
    for this in (FEW, MANY):
        results = run_ranks(missing, 3, platform, this, timeout_s=50)
        assert results[0] == results[1] == ([1, 1, 0], (2,), ())
        assert results[2] == ([0, 0, 1], (0, 1), ())


def check_masked_rank_is_neither_awaited_nor_served(platform: str) -> None:
    """All results are those of the ranks that are in."""
    run_ranks(masked, 3, platform, MANY, timeout_s=50)


def check_silent_rank_without_a_mask_is_an_error_and_comes_back(platform: str) -> None:
    """Named; the mask stays."""
    (first, mask), (second, _), (third, _) = run_ranks(strict, 3, platform, timeout_s=50)
    assert first[0] == second[0] == CommTimeoutError.__name__
    assert "rank 2 was silent too long" in first[1]
    assert third == ("", "")
    assert mask == [1, 1, 1]


def check_bad_expert_id_is_named_and_goes_nowhere(platform: str) -> None:
    """Above all experts, and below -1."""
    for value in (12, -2):
        errors = run_ranks(bad_expert, 3, platform, value, timeout_s=50)
        assert errors[0][0] == InvalidArgument.__name__
        assert f"got {value} at token 1, k 2" in errors[0][1]
        assert errors[1:] == [("", ""), ("", "")]


def check_different_calls_are_a_mismatch_on_every_rank(platform: str) -> None:
    """And leave the differing ranks out."""
    results = run_ranks(differing, 3, platform, timeout_s=50)
    for (name, text), _ in results:
        assert name == MismatchError.__name__
        assert "ranks disagree about the call" in text
    assert [got for _, got in results] == [[True, True, False], [True, True, False], [False, False, True]]


def check_refused_call_is_an_error_of_the_peers(platform: str) -> None:
    """Dispatch and combine."""
    for op in (OP_DISPATCH, OP_COMBINE):
        own, *peers = run_ranks(refused, 3, platform, op, timeout_s=50)
        assert own == ("", "")
        for name, text in peers:
            assert name == MismatchError.__name__, text
            assert "rank 0 refused the call" in text


def check_two_calls_may_be_in_flight_and_their_hooks_come_in_any_order(platform: str) -> None:
    """What else is tried is refused, and names the way out."""
    for errors in run_ranks(hooks, 3, platform, timeout_s=50):
        texts = ("call the oldest hook first", "call the oldest hook first", "already", "another epoch")
        for (name, text), part in zip(errors, texts, strict=True):
            assert name == InvalidState.__name__
            assert part in text


def check_agreed_view_brings_a_lost_rank_back(platform: str) -> None:
    """Bit for bit."""
    assert run_ranks(rejoined, 3, platform, timeout_s=50) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]


def check_words_of_calls_long_ago_are_not_believed(platform: str) -> None:
    """Words of calls whose number has the same low half, or one that seems higher, are those of earlier calls."""
    for step in ((1 << 31) + 16, (1 << 32) - 6, (1 << 32) - 2):
        run_ranks(far_on, 3, platform, step, timeout_s=200)


def check_graph_that_is_replayed_before_a_view_is_entered_ends_alone(platform: str) -> None:
    """Without a mask that is an error, with one the mask shows it; the view's calls are not touched."""
    for strict in (False, True):
        first, second, third = run_ranks(partial(replayed_before, strict=strict), 3, platform, timeout_s=200)
        assert [kind for kind, _ in first] == ["CommTimeoutError" if strict else ""] * 6 + ["MismatchError"]
        assert second == [("", "")]
        assert third[0][0] == "MismatchError"


def check_rank_that_is_far_behind_is_left_out_until_all_agree(platform: str) -> None:
    """Each of its misses is an error; its slots are not written over."""
    results = run_ranks(far_behind, 3, platform, timeout_s=50)
    assert results[2] == []
    for errors in results[:2]:
        assert [name for name, _ in errors] == [CommTimeoutError.__name__] * 5
        assert all("rank 2 was silent too long" in text for _, text in errors)


def check_abort_ends_a_wait(platform: str) -> None:
    """Long before the time-out."""
    assert run_ranks(aborted, 2, platform, timeout_s=50)[0][0] == "AbortedError"


def check_survivors_of_a_killed_rank_go_on(platform: str) -> None:
    """Killed before, in, between and after the halves of a dispatch; an emulated launch is over when it returns."""
    for point in ("before", "during", "between", "after") if platform == "cuda" else ("before", "between"):
        run_ranks(killed, 3, platform, point, timeout_s=200, dead={1})


CHECKS = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_missing_source_is_left_out_whole_and_not_awaited_again,
        check_masked_rank_is_neither_awaited_nor_served,
        check_silent_rank_without_a_mask_is_an_error_and_comes_back,
        check_bad_expert_id_is_named_and_goes_nowhere,
        check_different_calls_are_a_mismatch_on_every_rank,
        check_refused_call_is_an_error_of_the_peers,
        check_two_calls_may_be_in_flight_and_their_hooks_come_in_any_order,
        check_agreed_view_brings_a_lost_rank_back,
        check_words_of_calls_long_ago_are_not_believed,
        check_graph_that_is_replayed_before_a_view_is_entered_ends_alone,
        check_rank_that_is_far_behind_is_left_out_until_all_agree,
        check_abort_ends_a_wait,
        check_survivors_of_a_killed_rank_go_on,
    )
}
