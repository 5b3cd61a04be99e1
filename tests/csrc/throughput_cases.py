"""Cases of the throughput kernels, run on any platform (emulation or GPUs), compared with `epee.reference` bit for bit.

A `Case` is a few numbers. Every rank makes its own inputs from the seed, runs fresh and cached dispatches and two
combines on poisoned memory, and sends everything it got to the parent, which knows all ranks' inputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from epee import reference
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, ThroughputHandle
from epee.gpu.platform import CudaPlatform
from epee.gpu.shapes import ThroughputConfig
from epee.reference import Received, Routed
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes
from tests.csrc.throughput_end import ThroughputEnd
from tests.harness import run_ranks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Case:
    """One fresh dispatch, one cached dispatch, and combines with and without a copy.

    Attributes:
        num_tokens: per rank.
        routing: "random" (a tenth of the entries is -1), "repeats" (experts stand twice), "one expert", "nowhere",
            "mask" (is_token_in_rank).
        payload: a dtype's name, or "fp8" (float32 scales; by columns on even ranks).
        num_bias: 0 ... 2; float32 ones for a bfloat16 payload when `is_bias_wide`.
        is_permuted: experts are anywhere, as many at each rank, not in contiguous blocks.
    """

    num_tokens: tuple[int, ...]
    num_local_experts: int = 4
    num_topk: int = 3
    hidden: int = 64
    dtype: str = "bfloat16"
    layout: str = "rank"
    expert_alignment: int = 1
    routing: str = "random"
    payload: str = "bfloat16"
    with_weights: bool = True
    num_bias: int = 0
    is_bias_wide: bool = False
    num_sms: int | None = None
    is_permuted: bool = False
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """One per entry of `num_tokens`."""
        return len(self.num_tokens)

    @property
    def num_experts(self) -> int:
        """Over all ranks."""
        return self.num_ranks * self.num_local_experts


def inputs_of(case: Case, rank: int) -> Routed:
    """What `rank` sends."""
    gen = torch.Generator().manual_seed(1000 * case.seed + rank)
    num_tokens, num_topk = case.num_tokens[rank], case.num_topk
    x: Any = torch.randn(num_tokens, case.hidden, generator=gen)
    if case.payload == "fp8":
        scales = torch.rand(case.hidden // 128, num_tokens, generator=gen).t()
        if rank % 2:  # both forms that callers have
            scales = scales.contiguous()
        x = (x.to(torch.float8_e4m3fn), scales)
    else:
        x = x.to(DTYPES[case.payload])
    if case.routing == "mask":
        return Routed(x, is_token_in_rank=torch.rand(num_tokens, case.num_ranks, generator=gen) < 0.5)
    scores = torch.rand(num_tokens, case.num_experts, generator=gen)
    if case.routing == "repeats":
        idx = torch.randint(0, case.num_experts, (num_tokens, num_topk), generator=gen)
    elif case.routing == "one expert":
        idx = torch.full((num_tokens, num_topk), case.num_experts - 1)
    elif case.routing == "nowhere":
        idx = torch.full((num_tokens, num_topk), -1)
    else:
        idx = scores.topk(num_topk, dim=1)[1]
        idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
    weights = torch.randn(num_tokens, num_topk, generator=gen) if case.with_weights else None
    return Routed(x, idx, weights)


def seen_by(case: Case, members: Collection[int] | None) -> tuple[Case, list[Routed]]:
    """The case, and what all ranks send in it, as a view of `members` sees them (None: all): others send nothing, and
    nothing goes to them."""
    members = range(case.num_ranks) if members is None else members
    seen = replace(case, num_tokens=tuple(n if rank in members else 0 for rank, n in enumerate(case.num_tokens)))
    inputs = []
    for rank in range(case.num_ranks):
        given = inputs_of(seen, rank)
        topk_idx, mask = given.topk_idx, given.is_token_in_rank
        for other in set(range(case.num_ranks)) - set(members):
            if topk_idx is not None:
                topk_idx = topk_idx.masked_fill(
                    topk_idx.div(case.num_local_experts, rounding_mode="floor") == other, -1
                )
            if mask is not None:
                mask = mask.clone()
                mask[:, other] = False
        inputs.append(replace(given, topk_idx=topk_idx, is_token_in_rank=mask))
    return seen, inputs


def permutation(num_experts: int) -> torch.Tensor:
    """A table of physical experts in which hardly any id is at the rank of its contiguous block."""
    return torch.randperm(num_experts, generator=torch.Generator().manual_seed(num_experts))


def renamed(topk_idx: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The ids that `table` gives to the experts of `topk_idx`; -1 stays."""
    return torch.where(topk_idx < 0, topk_idx, table[topk_idx.clamp(min=0)])


def placed_inputs(case: Case) -> list[Routed]:
    """What all ranks send, with ids by which a contiguous map finds the same experts."""
    inputs = [inputs_of(case, rank) for rank in range(case.num_ranks)]
    if not case.is_permuted:
        return inputs
    table = permutation(case.num_experts)
    return [replace(given, topk_idx=renamed(given.topk_idx, table)) for given in inputs if given.topk_idx is not None]


def biases_of(case: Case, rank: int) -> list[torch.Tensor]:
    """What `rank` adds."""
    gen = torch.Generator().manual_seed(77 + rank)
    shape = (case.num_tokens[rank], case.hidden)
    dtype = torch.float32 if case.is_bias_wide else DTYPES[case.dtype]
    return [torch.randn(shape, generator=gen).to(dtype) for _ in range(case.num_bias)]


def expert_output(x: torch.Tensor, rank: int, case: Case) -> torch.Tensor:
    """What `rank`'s experts make of the rows: something that tells the ranks apart."""
    return (x.float() * (1.0 + 0.37 * rank)).to(DTYPES[case.dtype])


def device_of(rank: int) -> torch.device:
    """The GPU of a rank; several ranks may share one."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_buffer(
    case: Case,
    rank: int,
    platform_name: str,
    num_slots: int = 2,
    max_recv_rows: int = 0,
    stall_one_in: int = 0,
    num_sms: int = 3,
) -> ThroughputEnd:
    """The rank's end of a buffer, its memory filled with 0xFF; for `stall_one_in` see `kernel_head`. `num_sms` are the
    multiprocessors of an emulated GPU."""
    platform = EmulatedPlatform(num_sms) if platform_name == "emulated" else CudaPlatform(device_of(rank))
    platform.limits = replace(platform.limits, stall_one_in=stall_one_in)
    most = max(1, *case.num_tokens)
    rows = math.ceil(1.5 * case.num_ranks * most * case.num_topk)  # half as many again as a balanced routing brings
    rows += case.num_local_experts * (case.expert_alignment - 1)
    config = ThroughputConfig(
        rank, case.num_ranks, case.num_experts, case.hidden, case.num_topk, most, DTYPES[case.dtype],
        max_recv_rows or case.num_ranks * most, rows, num_slots,
    )  # fmt: skip
    buffer = ThroughputEnd(platform, config, all_gather_bytes)
    if case.is_permuted:
        buffer.machine.experts[: case.num_experts] = permutation(case.num_experts).to(buffer.machine.experts)
    poison(buffer)
    return buffer


def poison(buffer: ThroughputEnd) -> None:
    """Fill this rank's receive slots with 0xFF; the ranks meet before and after."""
    all_gather_bytes(b"before")
    region = buffer.machine.slots[buffer.config.rank]
    region.lease(0, region.nbytes, None).fill_(255)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    all_gather_bytes(b"after")


def run_case(rank: int, num_ranks: int, case: Case, platform_name: str) -> dict[str, Any]:
    """One rank of a case."""
    if platform_name == "cuda":
        torch.cuda.set_device(device_of(rank))
    buffer = make_buffer(case, rank, platform_name)
    device = buffer.machine.platform.device
    given = inputs_of(case, rank)
    x, scales = given.x if isinstance(given.x, tuple) else (given.x, None)
    x = x.to(device)
    scales = None if scales is None else scales.to(device)
    route = given.topk_idx if given.topk_idx is not None else given.is_token_in_rank
    assert route is not None
    weights = None if given.topk_weights is None else given.topk_weights.to(device)
    options = DispatchOptions(case.layout, case.expert_alignment, num_sms=case.num_sms, timeout_s=TIMEOUT_S)
    back = CombineOptions(num_sms=case.num_sms, timeout_s=TIMEOUT_S)
    d = buffer.dispatch(x, scales, route.contiguous().to(device), weights, None, options)
    got: dict[str, Any] = {name: getattr(d, name) for name in ("x", "scales", "topk_idx", "topk_weights", "src_token")}
    got |= {"src_rank": d.src_rank, "src_k": d.src_k, "num_tokens_per_expert": d.handle.num_tokens_per_expert}
    got |= ends_of(buffer, d.handle)
    got = {name: _copy(value) for name, value in got.items()}
    y = expert_output(d.x, rank, case)
    bias = [tensor.to(device) for tensor in biases_of(case, rank)]
    returned = d.topk_weights
    got["combined"], got["weights_back"] = (
        _copy(value) for value in buffer.combine(y, d.handle, returned, bias, None, back)
    )
    place = buffer.combine_input(d.handle, y.dtype)
    assert place is not None
    place.copy_(y)
    out = torch.full((case.num_tokens[rank], case.hidden), float("nan"), dtype=y.dtype, device=device)
    got["combined_in_place"] = _copy(buffer.combine(place, d.handle, None, bias, out, back)[0])
    handle = d.handle
    del d, place, returned
    again = buffer.dispatch(_flipped(x), scales, None, None, handle, options)
    got["again"] = _copy(again.x)
    buffer.barrier(TIMEOUT_S)
    if platform_name == "cuda":
        torch.cuda.synchronize()
    buffer.check()
    return got


def ends_of(buffer: ThroughputEnd, handle: ThroughputHandle) -> dict[str, torch.Tensor]:
    """What the kernel of a dispatch has summed up for readers on the GPU."""
    lengths = dict.fromkeys(("slot_ends", "recv_slots"), buffer.config.num_local_experts)
    lengths["token_ends"] = buffer.config.num_ranks
    return {name: handle.part(name, length) for name, length in lengths.items()}


def ends_by_counting(case: Case, inputs: Sequence[Routed], rank: int) -> dict[str, torch.Tensor]:
    """The same for `rank`, from everybody's routing, one token at a time."""
    slots, tokens = [0] * case.num_local_experts, [0] * case.num_ranks
    for src, given in enumerate(inputs):
        if given.topk_idx is None:
            assert given.is_token_in_rank is not None
            tokens[src] = int(given.is_token_in_rank[:, rank].sum())
            continue
        for experts in given.topk_idx.tolist():
            here = [expert % case.num_local_experts for expert in experts if expert // case.num_local_experts == rank]
            tokens[src] += bool(here)
            for expert in here:
                slots[expert] += 1
    ends, start = [], 0
    for count in slots:
        padded = -(-count // case.expert_alignment) * case.expert_alignment
        ends.append(start + (count if case.layout == "expert" else padded))
        start += padded
    values = {"slot_ends": ends, "recv_slots": slots, "token_ends": list(accumulate(tokens))}
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in values.items()}


def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).flip(1).view(x.dtype) if x.element_size() == 1 else x.flip(1)


def _copy(value: Any) -> Any:
    return value.cpu().clone() if isinstance(value, torch.Tensor) else value


def check_case(case: Case, platform_name: str, timeout_s: float = 50.0) -> None:
    """Run a case on all ranks and compare everything with the reference."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    results = run_ranks(run_case, case.num_ranks, case, platform_name, timeout_s=timeout_s)
    inputs = placed_inputs(case)
    want = reference.dispatch(inputs, case.num_experts, layout=case.layout, expert_alignment=case.expert_alignment)
    ys = [expert_output(_values(there.x), rank, case) for rank, there in enumerate(want)]
    biases = [biases_of(case, rank) for rank in range(case.num_ranks)]
    combined = reference.combine(inputs, want, ys, bias=biases)
    flipped = [Routed(_flipped(_values(given.x)), given.topk_idx, None, given.is_token_in_rank) for given in inputs]
    again = reference.dispatch(flipped, case.num_experts, layout=case.layout, expert_alignment=case.expert_alignment)
    back = None
    if want[0].topk_weights is not None:
        back = reference.combine_weights(inputs, want, [there.topk_weights for there in want])  # type: ignore[misc]
    for rank, got in enumerate(results):
        _check_received(got, want[rank], f"rank {rank}")
        for name, ends in ends_by_counting(case, inputs, rank).items():
            expect_equal(got[name], ends, f"rank {rank}: {name}")
        for name in ("combined", "combined_in_place"):
            expect_equal(got[name], combined[rank], f"rank {rank}: {name}")
        expect_equal(got["again"], _values(again[rank].x), f"rank {rank}: cached dispatch")
        if back is not None:
            expect_equal(got["weights_back"], back[rank], f"rank {rank}: weights that came back")


def _values(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


def _check_received(got: dict[str, Any], want: Received, who: str) -> None:
    expect_equal(got["x"], _values(want.x), f"{who}: x")
    if isinstance(want.x, tuple):
        expect_equal(got["scales"].view(torch.float32), want.x[1], f"{who}: scales")
    for name in ("topk_idx", "topk_weights", "src_token"):
        expected = getattr(want, name)
        if expected is None:
            assert got[name] is None, f"{who}: {name} should be None"
        else:
            expect_equal(got[name], expected, f"{who}: {name}")
    if want.layout == "expert":
        expect_equal(got["src_rank"], want.src_rank, f"{who}: src_rank")
        expect_equal(got["src_k"], want.src_k, f"{who}: src_k")
    if want.num_tokens_per_expert:
        assert got["num_tokens_per_expert"] == want.num_tokens_per_expert, who


def expect_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless every bit is equal (also the sign of zero)."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    same = got.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8)
    if not bool(same.all()):
        at = tuple((got != want).nonzero()[0].tolist()) if bool((got != want).any()) else "a sign of zero"
        raise AssertionError(f"{what}: {int((~same).sum())} of {same.numel()} bytes differ, first at {at}")
