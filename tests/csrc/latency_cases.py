"""Rounds of `LatencyBuffer`'s GPU core on any platform (emulation or GPUs), compared with `epee.reference.latency`.

A `Plan` is one buffer and several rounds over it; a round is a dispatch and a combine. Every rank makes the inputs of
all ranks from the seed, so each compares its own results bit for bit and no result has to travel.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epee.ep.latency.gpu.core import LatencyCore
from epee.ep.latency.gpu.shapes import LatencyConfig
from epee.ep.latency.gpu.types import CoreCombined, CoreOptions, CoreReceived
from epee.gpu.platform import CudaPlatform
from epee.reference import latency as reference
from epee.reference.latency import Packed, Sent
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes
from tests.csrc.throughput_cases import permutation, renamed

TIMEOUT_S = 20.0
NAN = float("nan")


@dataclass(frozen=True)
class Round:
    """A dispatch and a combine.

    Attributes:
        num_tokens: of each rank.
        routing: "random" (a tenth of the entries is -1), "repeats", "one expert", "nowhere".
        weights: "none", "dispatch" (given there), "combine" (given there).
        is_split: the halves apart.
    """

    num_tokens: tuple[int, ...]
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    routing: str = "random"
    weights: str = "dispatch"
    is_wide: bool = False
    is_split: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A buffer and what happens over it; with `is_permuted` experts are anywhere, not in contiguous blocks."""

    rounds: tuple[Round, ...]
    num_local_experts: int = 4
    num_topk: int = 3
    hidden: int = 256
    max_tokens: int = 16
    packet_tokens: int = 4
    num_sms: int = 3
    stall_one_in: int = 0
    is_permuted: bool = False

    @property
    def num_ranks(self) -> int:
        """As the rounds say."""
        return len(self.rounds[0].num_tokens)


def inputs_of(plan: Plan, this: Round, rank: int) -> Sent:
    """What `rank` sends; its weights stand in there also when the combine gets them."""
    gen = torch.Generator().manual_seed(1000 * this.seed + rank)
    n, k, num_experts = this.num_tokens[rank], plan.num_topk, plan.num_ranks * plan.num_local_experts
    sizes = torch.rand(n, plan.hidden // 8, 1, generator=gen).mul(12).sub(9).exp2().expand(-1, -1, 8)
    x = (torch.randn(n, plan.hidden, generator=gen) * sizes.reshape(n, plan.hidden)).to(torch.bfloat16)
    if n:
        x[0, : plan.hidden // 2] = 0.0  # whole blocks of zeros take the least scale
    if this.routing == "repeats":
        idx = torch.randint(0, num_experts, (n, k), generator=gen)
    elif this.routing == "one expert":
        idx = torch.full((n, k), num_experts - 1)
        idx[:, 1:] = -1
    elif this.routing == "nowhere":
        idx = torch.full((n, k), -1)
    else:
        idx = torch.rand(n, num_experts, generator=gen).topk(min(k, num_experts), dim=1)[1]
        idx = torch.cat([idx, torch.full((n, k - idx.shape[1]), -1)], dim=1)
        idx[torch.rand(idx.shape, generator=gen) < 0.1] = -1
    weights = None if this.weights == "none" else torch.randn(n, k, generator=gen)
    return Sent(x, idx.contiguous(), weights)


def expert_output(plan: Plan, packed: Packed, rank: int) -> torch.Tensor:
    """What `rank`'s experts make of their rows; NaN behind them."""
    x = packed.x[0] if isinstance(packed.x, tuple) else packed.x
    local = torch.arange(plan.num_local_experts)[:, None, None]
    y = (x.float() * (1.0 + 0.37 * rank) + 0.11 * local).to(torch.bfloat16)
    for expert, count in enumerate(packed.num_tokens_per_expert.tolist()):
        y[expert, count:] = NAN
    return y


def options_of(this: Round, timeout_s: float = TIMEOUT_S) -> CoreOptions:
    """How its calls run."""
    return CoreOptions(timeout_s, False, this.is_split, this.use_fp8, this.round_scale, this.use_ue8m0)


def make_core(plan: Plan, rank: int, platform_name: str) -> LatencyCore:
    """The rank's end of a buffer, with poison where rows and packets will lie."""
    platform: Any
    if platform_name == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())  # ranks may share one: they take turns then
        torch.cuda.set_device(device)
        platform = CudaPlatform(device)
    else:
        platform = EmulatedPlatform(plan.num_sms, shared_bytes=128 << 10)
    platform.limits = replace(platform.limits, stall_one_in=plan.stall_one_in)
    config = LatencyConfig(
        rank, plan.num_ranks, plan.num_ranks * plan.num_local_experts, plan.hidden, plan.num_topk, plan.max_tokens,
        packet_tokens=plan.packet_tokens,
    )  # fmt: skip
    core = LatencyCore(platform, config, all_gather_bytes)
    if plan.is_permuted:
        core.experts[: config.num_experts] = permutation(config.num_experts).to(core.experts)
    layout = config.region_layout
    for name in ("dispatch_rows", "combine_rows", "dispatch_packets", "combine_packets"):
        if layout[name].nbytes:
            core.memory._own.lease(layout.offset(name), layout[name].nbytes, None).fill_(0xFF)
    wait_for(core)
    all_gather_bytes(b"poisoned")
    return core


def wait_for(core: LatencyCore) -> None:
    """Until the GPU has done everything."""
    if core.platform.device.type == "cuda":
        torch.cuda.synchronize()


def send(core: LatencyCore, this: Round, given: Sent, options: CoreOptions, **more: Any) -> CoreReceived:
    """Dispatch what `given` says."""
    device = core.platform.device
    weights = given.topk_weights if this.weights == "dispatch" else None
    x = given.x.to(device)
    plan = core.plans.dispatch(len(x), x.stride(0) * x.itemsize, options)
    return core.dispatch(plan, x, given.topk_idx.to(device), None if weights is None else weights.to(device), **more)


def bring(
    core: LatencyCore, this: Round, y: torch.Tensor, given: Sent, d: CoreReceived, options: CoreOptions,
    **more: Any,
) -> CoreCombined:  # fmt: skip
    """Combine into memory full of NaN."""
    device = core.platform.device
    weights = given.topk_weights if this.weights == "combine" else None
    out = torch.full(given.x.shape, NAN, dtype=torch.bfloat16, device=device)
    plan = core.plans.combine(d.handle.num_tokens, options, this.is_wide, weights is not None)
    return core.combine(plan, y.to(device), d.handle, None if weights is None else weights.to(device), out, **more)


def expected(plan: Plan, this: Round, got: Sequence[Sequence[bool]] | None = None) -> tuple[list[Sent], list[Packed]]:
    """All ranks' inputs, with ids by which a contiguous map finds the experts, and what their dispatch must bring."""
    num_experts = plan.num_ranks * plan.num_local_experts
    inputs = [inputs_of(plan, this, rank) for rank in range(plan.num_ranks)]
    if plan.is_permuted:
        table = permutation(num_experts)
        inputs = [replace(given, topk_idx=renamed(given.topk_idx, table)) for given in inputs]
    packed = reference.dispatch(
        inputs, num_experts, plan.max_tokens, use_fp8=this.use_fp8,
        round_scale=this.round_scale or this.use_ue8m0, use_ue8m0=this.use_ue8m0, got=got,
    )  # fmt: skip
    return inputs, packed


def expected_sums(
    plan: Plan, this: Round, inputs: list[Sent], packed: list[Packed], got: Sequence[Sequence[bool]] | None = None
) -> list[torch.Tensor]:
    """What all ranks' combine must bring."""
    ys = [expert_output(plan, there, rank) for rank, there in enumerate(packed)]
    dtype = torch.float32 if this.is_wide else torch.bfloat16
    return reference.combine(inputs, packed, ys, partial_dtype=dtype, got=got)


def check_received(d: CoreReceived, want: Packed, who: str) -> None:
    """Compare a dispatch, bit for bit; nobody looks behind the counts."""
    handle = d.handle
    counts = want.num_tokens_per_expert
    same(handle.got.cpu(), want.got, f"{who}: got")
    waits = handle.wait_us.cpu()
    assert bool(((waits >= 0) & (waits < 2e8)).all()), f"{who}: {waits}"  # an hour would be a word that nobody wrote
    same(handle.num_tokens_per_expert.cpu(), counts, f"{who}: counts")
    same(handle.layout_range.cpu(), want.layout_range, f"{who}: layout_range")
    values = want.x if isinstance(want.x, torch.Tensor) else want.x[0]
    x, src_token = d.x.cpu(), handle.src_token.cpu()
    for expert, count in enumerate(counts.tolist()):
        same(x[expert, :count], values[expert, :count], f"{who}: x of expert {expert}")
        same(src_token[expert, :count], want.src_token[expert, :count], f"{who}: src_token of expert {expert}")
        if isinstance(want.x, tuple):
            assert d.scales is not None
            assert d.scales.stride() == want.x[1].stride(), who
            same(d.scales.cpu()[expert, :count], want.x[1][expert, :count], f"{who}: scales of expert {expert}")


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Fail unless every bit is equal."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    plain = torch.contiguous_format  # one element may have any stride otherwise
    got_bytes, want_bytes = (part.flatten().clone(memory_format=plain).view(torch.uint8) for part in (got, want))
    differs = got_bytes != want_bytes
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} bytes differ, first byte {first} of {tuple(got.shape)}"
        )


def play(core: LatencyCore, plan: Plan, this: Round, who: str) -> None:
    """One round on one rank."""
    rank = core.config.rank
    inputs, packed = expected(plan, this)
    options = options_of(this)
    d = send(core, this, inputs_of(plan, this, rank), options)
    if d.hook is not None:
        d.hook()
    wait_for(core)
    core.check()
    check_received(d, packed[rank], f"{who}: dispatch")
    same(d.handle.own_ids.cpu(), inputs[rank].topk_idx.to(torch.int32), f"{who}: experts that were sent to")
    y = expert_output(plan, packed[rank], rank)
    c = bring(core, this, y, inputs[rank], d, options)
    if c.hook is not None:
        c.hook()
    wait_for(core)
    core.check()
    same(c.got.cpu(), torch.ones(plan.num_ranks, dtype=torch.bool), f"{who}: got of combine")
    same(c.x.cpu(), expected_sums(plan, this, inputs, packed)[rank], f"{who}: combine")
    assert core.lost() == (), who
    assert bool(((c.wait_us >= 0) & (c.wait_us < 2e8)).all()), f"{who}: {c.wait_us}"


def run_plan(rank: int, num_ranks: int, plan: Plan, platform_name: str) -> None:
    """All rounds on one rank."""
    core = make_core(plan, rank, platform_name)
    for number, this in enumerate(plan.rounds):
        play(core, plan, this, f"rank {rank}, round {number} ({this})")
    all_gather_bytes(b"done")
    core.close()


def random_rounds(seed: int, count: int, num_ranks: int, max_tokens: int, hidden: int) -> tuple[Round, ...]:
    """Rounds of any kind, the same on all ranks."""
    rng = random.Random(seed)
    rounds = []
    for number in range(count):
        fp8 = hidden % 128 == 0 and rng.random() < 0.6
        kind = rng.randrange(3) if fp8 else 0
        rounds.append(
            Round(
                tuple(rng.choice([0, 1, max_tokens, rng.randint(0, max_tokens)]) for _ in range(num_ranks)),
                use_fp8=fp8,
                round_scale=kind >= 1,
                use_ue8m0=kind == 2 and hidden % 512 == 0,
                routing=rng.choice(["random", "random", "random", "repeats", "one expert", "nowhere"]),
                weights=rng.choice(["none", "dispatch", "dispatch", "combine"]),
                is_wide=rng.random() < 0.3,
                is_split=rng.random() < 0.4,
                seed=seed * 1000 + number,
            )
        )
    return tuple(rounds)
