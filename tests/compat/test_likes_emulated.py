"""Calls of V1 and V2 that look like earlier ones: plans are remembered, and forgotten when the memory is another."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

import epee.compat.deep_ep as deep_ep
from epee.ep.pool import needs, pool
from epee.ep.pool import throughput as rooms
from epee.ep.throughput.gpu_path import CudaPath
from epee.errors import InvalidArgument, MismatchError, RankFailedError
from tests.compat import test_deep_ep_buffer as v1
from tests.compat.deep_ep_cases import world
from tests.compat.test_deep_ep_emulated import _Asked, _run
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import EmulatedBuffer
from tests.ep.test_latency_rejoin import die, start
from tests.harness import DEAD, run_mortal

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


class _Seen:
    """Counts the calls that were made as one like an earlier one, and those that were to be and could not."""

    def __init__(self) -> None:
        self.made, self.failed, original = 0, 0, CudaPath.dispatch_like

        def dispatch(path: CudaPath, *args: Any) -> Any:
            """Dispatch, and count."""
            got = original(path, *args)
            self.made, self.failed = self.made + (got is not None), self.failed + (got is None)
            return got

        CudaPath.dispatch_like = dispatch  # type: ignore[method-assign]


def _same(rank: int, num_ranks: int) -> None:
    buffer, seen = deep_ep.Buffer(world()), _Seen()
    for num_worst_tokens in (0, 16):
        results = []
        for turn in range(4):
            given = v1._tokens(rank, 3)
            given["topk_weights"] = given["topk_weights"] + turn // 3
            recv_x, idx, weights, listed, handle, event = buffer.dispatch(**given, num_worst_tokens=num_worst_tokens)
            assert isinstance(recv_x, torch.Tensor)
            assert idx is not None
            assert weights is not None
            assert event.event is None
            chosen = idx >= 0
            back = buffer.combine(recv_x, handle)[0]  # type: ignore[arg-type]
            num_recv = int((buffer._known(handle).handle.recv_counts)[0])
            weights = torch.where(chosen, weights - turn // 3, weights)
            parts = [part[:num_recv].clone() for part in (recv_x, idx, weights, handle[3])] + [back]
            results.append((parts, listed, len(recv_x)))
        for parts, listed, length in results[1:]:
            assert (listed, length) == results[0][1:]
            for part, other in zip(parts, results[0][0], strict=True):
                assert torch.allclose(part.float(), other.float())
    assert seen.made >= 4
    before = seen.made
    given = v1._tokens(rank, 3)
    for config in (deep_ep.Config(2), deep_ep.Config(4)):
        buffer.dispatch(**given, config=config)
        assert seen.made == before, "other multiprocessors, another key"
    buffer.dispatch(**given, config=deep_ep.Config(2))
    assert seen.made == before + 1
    buffer.dispatch(**given, async_finish=True)
    event = buffer.capture()
    buffer.dispatch(**given, previous_event=event)
    assert seen.made == before + 3, "events change nothing of the call"
    buffer._pool().cpu_barrier()


def test_a_call_like_an_earlier_one_gives_the_same() -> None:
    _run(2, _same)


def _same_v2(rank: int, num_ranks: int, do_expand: bool) -> None:
    """V2's calls like earlier ones, in its own order of additions; the caller changes `topk_idx` behind each."""
    buffer, seen, combined = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=8), _Seen(), []
    original = CudaPath.combine_again

    def combine_again(*args: Any) -> Any:
        """Combine, and count."""
        got = original(*args)
        combined.append(got is not None)
        return got

    CudaPath.combine_again = combine_again  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    wanted = torch.stack([torch.randperm(4 * num_ranks, generator=generator)[:3] for _ in range(5)])
    wanted[1, 2] = -1
    weights = torch.rand(5, 3, generator=generator)
    for do_cpu_sync in (True, False):
        results = []
        for _ in range(4):
            idx = wanted.clone()
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                x, idx, weights, num_experts=4 * num_ranks, do_cpu_sync=do_cpu_sync, do_expand=do_expand
            )
            idx.fill_(-1)  # the handle has a copy
            assert isinstance(recv_x, torch.Tensor)
            assert recv_weights is not None
            assert event.event is None
            back = buffer.combine(recv_x, handle)[0]
            assert torch.equal(handle.topk_idx, wanted)
            num_rows = int(handle.core.recv_counts[0])
            parts = [part[:num_rows].clone() for part in (recv_x, recv_idx, recv_weights) if part is not None]
            listed = handle.num_recv_tokens_per_expert_list
            psum = handle.psum_num_recv_tokens_per_expert.clone()
            results.append(([*parts, back, psum, handle.dst_buffer_slot_idx], listed, len(recv_x)))
        for parts, *others in results[1:]:
            assert others == list(results[0][1:])
            for part, other in zip(parts, results[0][0], strict=True):
                assert torch.equal(part.float(), other.float())
    assert seen.made >= 4
    assert do_expand or sum(combined) >= 4
    buffer._pool().cpu_barrier()


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_v2_calls_like_earlier_ones_give_the_same(num_ranks: int, do_expand: bool) -> None:
    _run(num_ranks, _same_v2, do_expand)


def _wrong(rank: int, num_ranks: int) -> None:
    """Arguments that are wrong behind calls that are remembered are told as ever."""
    buffer, seen = deep_ep.Buffer(world()), _Seen()
    given = v1._tokens(rank, 3)
    for _ in range(3):
        buffer.dispatch(**given)
    before = seen.made
    assert before
    wide = torch.zeros(3 * given["x"].shape[1] + 1, dtype=given["x"].dtype)[1:].view(given["x"].shape)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": wide}, "multiples of 16 bytes"),
        ({"x": "rows"}, "x must be"),
        ({"topk_idx": given["topk_idx"][:2]}, "topk_idx must"),
        ({"topk_weights": None}, "both or neither"),
        ({"topk_weights": given["topk_weights"].double()}, "topk_weights must"),
        ({"is_token_in_rank": given["is_token_in_rank"][:2]}, "is_token_in_rank must"),
        ({"num_tokens_per_rank": None}, "num_tokens_per_rank"),
        ({"expert_alignment": True}, "expert_alignment must"),
        ({"num_tokens_per_expert": torch.zeros(num_ranks + 1, dtype=torch.int32)}, "multiple of"),
    ]
    for change, words in wrong:
        with pytest.raises(InvalidArgument if rank == 0 else MismatchError, match=words if rank == 0 else "refused"):
            buffer.dispatch(**{**given, **(change if rank == 0 else {})})
        buffer.dispatch(**given)
    assert seen.made > before


def test_what_is_wrong_behind_remembered_calls_is_told_as_ever() -> None:
    _run(2, _wrong)


def _grows(rank: int, num_ranks: int) -> None:
    needs._LEAST_TOKENS = 4
    buffer, seen = deep_ep.Buffer(world()), _Seen()
    asked, few = _Asked(buffer), v1._tokens(rank, 3)
    for _ in range(3):
        buffer.dispatch(**few)
    assert (asked.times, seen.made) == (1, 1)
    pool = buffer._pool()
    first = pool._rooms.whole
    # of one rank the call fits, and it has made one like it; the other's does not: all hear of it in that call
    many = v1._tokens(rank, 33)
    buffer.dispatch(**(few if rank == 0 else many))
    assert asked.times == 2
    assert pool._rooms.whole is not first
    assert not pool._rooms._likes, "over memory that is not used any more"
    got = buffer.dispatch(**few)
    assert (asked.times, seen.made) == (2, 1)
    again = buffer.dispatch(**few)
    assert (asked.times, seen.made) == (2, 2)
    assert torch.equal(got[0], again[0])  # type: ignore[arg-type]
    buffer._pool().cpu_barrier()


def test_what_is_remembered_goes_with_the_memory_and_a_peer_without_room_is_heard() -> None:
    _run(2, _grows)


def _few_calls(rank: int, num_ranks: int) -> int:
    """Return how many Python functions a dispatch and a combine like earlier ones enter."""
    buffer, given = deep_ep.Buffer(world()), v1._tokens(rank, 3)
    entered: list[str] = []

    def step() -> None:
        """Dispatch and combine."""
        recv_x, *_, handle, _ = buffer.dispatch(**given)
        buffer.combine(recv_x, handle)  # type: ignore[arg-type]

    for _ in range(4):
        step()
    sys.setprofile(lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(entered)


def test_a_step_like_an_earlier_one_enters_few_functions() -> None:
    entered = max(_run(2, _few_calls))
    assert entered <= 72, "each costs a call on a GPU 0.1 to 0.3 us"


def _by_turns(rank: int, num_ranks: int) -> None:
    """Calls of several hidden sizes in turn are found by what their tensors look like, each its own."""
    buffer, seen = deep_ep.Buffer(world()), _Seen()
    given = [v1._tokens(rank, 3, hidden) for hidden in (8, 16, 32)]
    first = [buffer.dispatch(**one) for one in given for _ in range(2)][::2]
    pool = buffer._pool()
    found, latest = [], pool.latest

    def look(*args: Any) -> Any:
        """Look, and note what was found."""
        found.append(latest(*args))
        return found[-1]

    pool.latest = look
    before = seen.made
    for _ in range(4):
        for one, was in zip(given, first, strict=True):
            got = buffer.dispatch(**one)
            assert torch.equal(got[0], was[0])  # type: ignore[arg-type]
            assert torch.equal(buffer.combine(got[0], got[4])[0], buffer.combine(was[0], was[4])[0])  # type: ignore[arg-type]
    assert seen.made == before + 12
    assert None not in found[3:], "a kind of calls was forgotten between two others"
    buffer._pool().cpu_barrier()


def test_calls_of_several_hidden_sizes_by_turns_are_like_earlier_ones() -> None:
    _run(2, _by_turns)


def _bounded(rank: int, num_ranks: int) -> None:
    rooms._MOST_LIKES = 3
    buffer = deep_ep.Buffer(world())
    for num_tokens in (*range(1, 8), *range(1, 8)):
        buffer.dispatch(**v1._tokens(rank, num_tokens))
        assert len(buffer._pool()._rooms._likes) <= 3
    buffer._pool().cpu_barrier()


def test_shapes_are_not_remembered_for_ever() -> None:
    _run(2, _bounded)


def _death(rank: int, num_ranks: int, folder: str) -> None:
    rooms.Buffer = EmulatedBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    group = start(rank, num_ranks, folder)
    os.environ.pop("EPEE_POISON")  # with it each call looks around
    buffer, seen = deep_ep.Buffer(group), _Seen()
    given = v1._tokens(rank, 3)
    for _ in range(3):
        buffer.dispatch(**given)
    assert seen.made
    if rank == 1:
        die()
    with pytest.raises(RankFailedError, match="make a new one"):
        _dispatch_on(buffer, given)
    made = seen.made
    for _ in range(3):
        with pytest.raises(RankFailedError):
            buffer.dispatch(**given)
    assert seen.made == made, "a call after a death looks around"


def _dispatch_on(buffer: deep_ep.Buffer, given: dict[str, Any]) -> None:
    for _ in range(1000):
        buffer.dispatch(**given)


def test_a_death_is_met_by_a_remembered_call() -> None:
    assert run_mortal(_death, 2, dead={1}, timeout_s=45) == [None, DEAD]
