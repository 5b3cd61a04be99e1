"""Arguments that one rank's call refuses under DeepEP's and Mooncake's names: the peers raise at once, and all go on.

The first call of a buffer makes its memory, so a refusal of it reaches the peers otherwise than those of later calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat import deep_ep
from epee.compat.mooncake import ep, pg
from epee.errors import EpeeError, InvalidArgument, MismatchError, UnsupportedError
from tests.harness import run_ranks
from tests.hosts import run_on_loopbacks

HIDDEN, NUM_TOKENS, NUM_LOCAL, MOST = 128, 5, 2, 8
Call = Callable[..., Any]


def _given(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=gen).to(torch.bfloat16)
    idx = torch.rand(NUM_TOKENS, NUM_LOCAL * num_ranks, generator=gen).topk(2, dim=1)[1]
    return x, idx, torch.ones(NUM_TOKENS, 2)


class Padded:
    """Low-latency calls of DeepEP's V1, or of Mooncake's."""

    def __init__(self, rank: int, num_ranks: int, is_mooncake: bool) -> None:
        self.x, self.idx, self.weights = _given(rank, num_ranks)
        self.num_experts, self.is_mooncake = NUM_LOCAL * num_ranks, is_mooncake
        self.buffer: Any = (ep.Buffer if is_mooncake else deep_ep.Buffer)(dist.group.WORLD)

    def dispatch(self, **other: Any) -> Any:
        given: dict[str, Any] = {"x": self.x, "topk_idx": self.idx, "use_fp8": False}
        given |= {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": self.num_experts}
        if self.is_mooncake:
            return self.buffer.dispatch(**{**given, "active_ranks": None, "timeout_us": -1, **other})
        return self.buffer.low_latency_dispatch(**{**given, **other})

    def combine(self, rows: torch.Tensor, handle: Any, **other: Any) -> torch.Tensor:
        given = {"x": rows, "topk_idx": self.idx, "topk_weights": self.weights, "handle": handle}
        if self.is_mooncake:
            return self.buffer.combine(**{**given, "active_ranks": None, "timeout_us": -1, **other})[0]  # type: ignore[no-any-return]
        return self.buffer.low_latency_combine(**{**given, **other})[0]  # type: ignore[no-any-return]

    def whole(self) -> None:
        """Make a step that all can make; sums of two bfloat16 rows, each the token's, are exact."""
        rows, _, handle, _, _ = self.dispatch()
        assert torch.equal(self.combine(rows, handle), self.x * 2)

    def step(self, value: float, **other: Any) -> None:
        """Make a step with rows of one value on all ranks: what other ranks sent for another step has another."""
        rows, counts, _, _, _ = self.dispatch(x=torch.full_like(self.x, value), **other)
        assert int(counts.sum())
        for expert, count in enumerate(counts.tolist()):
            assert torch.equal(rows[expert, :count], torch.full_like(rows[expert, :count], value))

    def cases(self) -> list[tuple[str, Call, Call]]:
        """Return (words of the error, the refused call, the peers' call)."""
        _, _, handle, _, _ = self.dispatch()
        rows = torch.zeros(NUM_LOCAL, MOST * dist.get_world_size(), HIDDEN, dtype=torch.bfloat16)
        found = [
            (words, lambda other=other: self.dispatch(**other), self.dispatch) for words, other in self.wrong().items()
        ]
        found.append(("handle", lambda: self.combine(rows, (1, 2)), lambda: self.combine(rows, handle)))
        return found

    def wrong(self) -> dict[str, dict[str, Any]]:
        """Return words of the error, and arguments of a dispatch that it names."""
        wrong: dict[str, dict[str, Any]] = {
            "x must be": {"x": self.x[0]},
            "topk_idx must be": {"topk_idx": self.idx.double()},
            "num_max_dispatch_tokens_per_rank": {"num_max_dispatch_tokens_per_rank": -1},
            "num_experts": {"num_experts": "4"},
        }
        return {**wrong, "timeout_us": {"timeout_us": 0}} if self.is_mooncake else wrong


class Elastic:
    """Calls of DeepEP's V2."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.x, self.idx, self.weights = _given(rank, num_ranks)
        self.num_experts = NUM_LOCAL * num_ranks
        self.buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST)

    def dispatch(self, **other: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.idx, "topk_weights": self.weights, "num_experts": self.num_experts}
        return self.buffer.dispatch(**{**given, **other})

    def whole(self) -> None:
        rows, _, weights, handle, _ = self.dispatch()
        assert torch.equal(self.buffer.combine(rows, handle, topk_weights=weights)[1], self.weights)

    def wrong(self) -> dict[str, dict[str, Any]]:
        return {
            "x must be": {"x": self.x[0]},
            "topk_idx must be": {"topk_idx": None},
            "num_max_tokens_per_rank": {"num_max_tokens_per_rank": "8"},
            "num_experts": {"num_experts": 1.5},
        }

    def cases(self) -> list[tuple[str, Call, Call]]:
        return [
            (words, lambda other=other: self.dispatch(**other), self.dispatch) for words, other in self.wrong().items()
        ]


class Hybrid:
    """Calls of HybridEP."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.x, idx, self.weights = _given(rank, num_ranks)
        self.routing_map = torch.zeros(NUM_TOKENS, NUM_LOCAL * num_ranks, dtype=torch.bool).scatter_(1, idx, True)
        self.probs = self.routing_map.float()
        self.buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, MOST, NUM_LOCAL)

    def dispatch(self, **other: Any) -> Any:
        given = {"hidden": self.x, "routing_map": self.routing_map, "probs": self.probs}
        return self.buffer.dispatch_with_permute(**{**given, **other})

    def combine(self, rows: object, probs: object, handle: Any) -> Any:
        return self.buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)  # type: ignore[arg-type]

    def whole(self) -> None:
        rows, probs, _, _, handle = self.dispatch()
        total, total_probs = self.combine(rows, probs, handle)
        assert torch.equal(total, self.x * 2)
        assert torch.equal(total_probs, self.probs)

    def wrong(self) -> dict[str, dict[str, Any]]:
        return {
            "x must be": {"hidden": None},
            "routing_map must be": {"routing_map": self.routing_map[1:]},
            "probs must be": {"probs": self.probs[:, 1:]},
            "topk_idx must be": {"topk_idx": self.probs},
            "num_of_experts must be": {"num_of_experts": 3},
            "pad_multiple must be": {"pad_multiple": "4"},
            "needs num_permuted_tokens": {"non_blocking": True},
            "beside a scaling_factor": {"scaling_factor": torch.ones(NUM_TOKENS, 1)},
        }

    def cases(self) -> list[tuple[str, Call, Call]]:
        rows, probs, _, _, handle = self.dispatch()
        right = lambda: self.combine(rows, probs, handle)  # noqa: E731
        found = [
            (words, lambda other=other: self.dispatch(**other), self.dispatch) for words, other in self.wrong().items()
        ]
        found += [
            ("handle must be", lambda: self.combine(rows, probs, None), right),
            ("hidden must have", lambda: self.combine(rows[1:], probs, handle), right),
            ("probs must be", lambda: self.combine(rows, probs[1:], handle), right),
            ("handle must be", lambda: self.dispatch(handle=1), lambda: self.dispatch(handle=handle)),
        ]
        return found


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "low latency": lambda *ranks: Padded(*ranks, False),
    "mooncake": lambda *ranks: Padded(*ranks, True),
    "elastic": Elastic,
    "hybrid": Hybrid,
}


def _refused(rank: int, words: str, wrong: Call, right: Call) -> None:
    if rank == 0:
        with pytest.raises(InvalidArgument, match=words):
            wrong()
    else:
        with pytest.raises(MismatchError, match="rank 0 refused") as caught:
            right()
        assert "InvalidArgument" in str(caught.value)


def later_calls(rank: int, num_ranks: int, name: str) -> None:
    calls = MAKERS[name](rank, num_ranks)
    calls.whole()
    for words, wrong, right in calls.cases():
        _refused(rank, words, wrong, right)
        calls.whole()


def first_calls(rank: int, num_ranks: int, name: str) -> None:
    for at, words in enumerate(MAKERS[name](rank, num_ranks).wrong()):
        calls = MAKERS[name](rank, num_ranks)
        other = list(calls.wrong().values())[at]
        _refused(rank, words, lambda calls=calls, other=other: calls.dispatch(**other), calls.dispatch)
        calls.whole()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("backend", ["gloo", "epee"])
@pytest.mark.parametrize("calls", [first_calls, later_calls], ids=["first", "later"])
def test_a_refusal_of_one_rank_reaches_all(calls: Call, backend: str, name: str) -> None:
    run_ranks(calls, 2, name, backend=backend, timeout_s=50)


def two_rooms(rank: int, num_ranks: int) -> None:
    """Refuse calls in the room that is not the one used last, dispatches and calls by handles; grow one of them."""
    calls = Elastic(rank, num_ranks)
    wide = torch.cat([calls.x, calls.x], 1)
    for other in ({"num_experts": 1.5}, {"num_max_tokens_per_rank": "8"}):
        _in_two_rooms(rank, calls, wide, other)


def _in_two_rooms(rank: int, calls: Elastic, wide: torch.Tensor, other: dict[str, Any]) -> None:
    buffer = calls.buffer
    rows, _, _, handle, _ = calls.dispatch()
    wide_rows, _, _, wide_handle, _ = calls.dispatch(x=wide)
    _refused(rank, "must be", lambda: calls.dispatch(**other), calls.dispatch)
    calls.whole()
    assert torch.equal(buffer.combine(wide_rows, wide_handle)[0][:, :HIDDEN], buffer.combine(rows, handle)[0])
    _refused(rank, "must be", lambda: buffer.combine(rows, 1), lambda: buffer.combine(wide_rows, wide_handle))
    calls.whole()
    again = lambda **others: buffer.dispatch(wide, handle=wide_handle, **others)  # noqa: E731
    _refused(rank, "must be", lambda: again(num_experts=99), again)
    _refused(rank, "must be", lambda: calls.dispatch(x=None), lambda: calls.dispatch(num_max_tokens_per_rank=1000))
    got = calls.dispatch(x=wide, num_max_tokens_per_rank=500)[0]
    assert torch.equal(got[:, :HIDDEN], calls.dispatch()[0])


def other_rooms(rank: int, num_ranks: int) -> None:
    """Make calls for which the ranks need different rooms: they say so at once."""
    calls = Elastic(rank, num_ranks)
    wide = torch.cat([calls.x, calls.x], 1)
    calls.dispatch(x=wide)
    calls.whole()
    wrong = {"x": wide} if rank == 0 else {"x": wide[:, :64]}
    with pytest.raises(MismatchError, match="another one; all ranks must make the same calls"):
        calls.dispatch(**wrong)
    calls.whole()


@pytest.mark.parametrize("backend", ["gloo", "epee"])
@pytest.mark.parametrize("calls", [two_rooms, other_rooms])
def test_a_refusal_reaches_calls_in_all_rooms(calls: Call, backend: str) -> None:
    run_ranks(calls, 2, backend=backend, timeout_s=50)


def after_update(rank: int, num_ranks: int) -> None:
    """Refuse the first call after the members were to meet again; steps are told apart by their values."""
    calls = Padded(rank, num_ranks, True)
    for _ in range(2):
        calls.whole()
        calls.buffer.update_ep_member()
        _refused(rank, "timeout_us", lambda: calls.dispatch(timeout_us=0), calls.dispatch)
        for step in (1, 2):
            calls.step(float(step))
        calls.whole()


def growth(rank: int, num_ranks: int, sizes: tuple[int, ...] = (3000, 9000, 16384)) -> None:
    """Refuse a call for which the others make more memory: they meet this rank in its next such call, in step.

    An argument that is checked in the new memory is refused when all have made that.
    """
    calls = Padded(rank, num_ranks, False)
    calls.whole()
    wrong = [("x must be", {"x": calls.x[0]}), ("topk_idx", {"topk_idx": calls.idx + calls.num_experts})]
    for at, most in enumerate(sizes):
        words, other = wrong[at % 2]
        if rank == 0:
            with pytest.raises(InvalidArgument, match=words):
                calls.dispatch(**other, num_max_dispatch_tokens_per_rank=most)
        else:
            with pytest.raises(MismatchError, match=r"rank 0 refused (its|the) call"):
                calls.dispatch(num_max_dispatch_tokens_per_rank=most)
        calls.step(float(at + 1), num_max_dispatch_tokens_per_rank=most)
        calls.whole()


def growth_out_of_step(rank: int, num_ranks: int) -> None:
    """Make a call that fits after one that was refused while the others grow: no call is paired with a wrong one."""
    with pytest.MonkeyPatch.context() as settings:
        settings.setenv("EPEE_TIMEOUT_S", "0.5")
        calls = Padded(rank, num_ranks, False)
        calls.whole()
    grow = lambda **other: calls.dispatch(num_max_dispatch_tokens_per_rank=4096, **other)  # noqa: E731
    if rank == 0:
        with pytest.raises(InvalidArgument, match="x must be"):
            grow(x=calls.x[0])
        with pytest.raises(EpeeError, match="rank"):
            calls.dispatch()
    else:
        with pytest.raises(EpeeError, match=r"because it refused this call|calls apart"):
            grow()
    with pytest.raises(EpeeError, match="rank"):
        grow()


def growth_of_one_rank(rank: int, num_ranks: int, is_mooncake: bool) -> None:
    """Make calls for which the memory of one rank alone is too small: no later call is taken for the refused one."""
    calls = Padded(rank, num_ranks, is_mooncake)
    calls.whole()
    (memory,) = calls.buffer._padded._pool._latency.wholes
    for other in ({"num_max_dispatch_tokens_per_rank": 4096}, {"x": torch.ones(NUM_TOKENS, 1 << 17).bfloat16()}):
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory, "_timeout", 0.5)  # it waits in vain for rank 1, which does not grow
                with pytest.raises(InvalidArgument, match=r"calls of .* need \d+ bytes of memory, the buffer has \d+"):
                    calls.dispatch(**other)
        else:
            with pytest.raises(MismatchError, match=r"rank 0 refused its call: InvalidArgument: calls of .* need \d+"):
                calls.dispatch()
        for step in (1, 2):
            calls.step(float(step))
        calls.whole()


@pytest.mark.parametrize("backend", ["gloo", "epee"])
@pytest.mark.parametrize("is_mooncake", [False, True], ids=["deep_ep", "mooncake"])
def test_a_low_latency_call_that_does_not_fit_on_one_rank_is_refused_on_all(backend: str, is_mooncake: bool) -> None:
    run_ranks(growth_of_one_rank, 2, is_mooncake, backend=backend, timeout_s=50)


@pytest.mark.parametrize("backend", ["gloo", "epee"])
@pytest.mark.parametrize("calls", [after_update, growth])
def test_a_refusal_reaches_low_latency_calls_that_begin_with_a_meeting(calls: Call, backend: str) -> None:
    run_ranks(calls, 2, backend=backend, timeout_s=50)


@pytest.mark.parametrize("backend", ["gloo", "epee"])
def test_a_refusal_reaches_low_latency_calls_that_grow_over_hosts(backend: str) -> None:
    run_on_loopbacks(growth, (0, 1, 1), backend=backend, timeout_s=50)


def test_low_latency_calls_that_are_out_of_step_raise() -> None:
    run_ranks(growth_out_of_step, 2, backend="gloo", timeout_s=25)


def by_handle(rank: int, num_ranks: int) -> None:
    """Refuse rows without memory beside a handle, and take statistics beside `zero_copy`, which reads no x."""
    calls = Hybrid(rank, num_ranks)
    handle = calls.dispatch()[4]
    again = lambda **other: calls.buffer.dispatch_with_permute(**{"hidden": calls.x, "handle": handle, **other})  # noqa: E731
    if rank == 0:
        with pytest.raises(UnsupportedError, match="x must be on"):
            again(hidden=calls.x.to("meta"))
    else:
        with pytest.raises(MismatchError, match="rank 0 refused"):
            again()
    calls.whole()
    padded = Padded(rank, num_ranks, False)
    rows, _, handle, _, _ = padded.dispatch()
    padded.buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    stats = torch.zeros(num_ranks, dtype=torch.int64)
    got = padded.combine(torch.empty(0, device="meta"), handle, zero_copy=True, combine_wait_recv_cost_stats=stats)
    assert torch.equal(got, padded.x * 2)


@pytest.mark.parametrize("backend", ["gloo", "epee"])
def test_rows_without_memory(backend: str) -> None:
    run_ranks(by_handle, 2, backend=backend, timeout_s=50)


def _settings(rank: int, num_ranks: int) -> None:
    group: Any = dist.group.WORLD
    for ranks in (None, 3, ["a"], [1.5], [None], [64], [-1], [1 << 70]):
        for call in (pg.get_peer_state, pg.activate_ranks, pg.deactivate_ranks):
            with pytest.raises(InvalidArgument, match="ranks must"):
                call(group, ranks)  # type: ignore[arg-type]
    for size in (None, "a", -1, 0, 65, 1 << 70, 1.5):
        with pytest.raises(InvalidArgument, match="size must be a number of ranks from 1 to 64"):
            pg.extend_group_size_to(group, size)  # type: ignore[arg-type]
    for backend in (None, "mooncake", object()):
        for read in (pg.get_active_ranks, pg.get_num_synced_ranks, pg.get_current_epoch, pg.join_group):
            with pytest.raises(InvalidArgument, match=r"backend must be a process group of the backend mooncake"):
                read(backend)
    with pytest.raises(InvalidArgument, match="async_op=True"):
        pg.get_local_success(dist.all_reduce(torch.ones(1)))


def test_ranks_sizes_and_groups_that_cannot_be_are_refused_under_mooncakes_names() -> None:
    run_ranks(_settings, 2, backend="mooncake-cpu")
