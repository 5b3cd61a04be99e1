"""What each rank of `epee bench ep --hosts` does: check, then time all sides in turns, and count bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import epee

from .hosts_rank import Raw, block
from .two_hosts import Place

_ROWS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}


class Step:
    """The tokens of one rank, and each side's way with them.

    Args:
        place: of this rank.
        shape: as of `ep_hosts.run`.
    """

    def __init__(self, place: Place, shape: dict[str, int]) -> None:
        self.place, self.shape = place, shape
        self.num_ranks = place.num_ranks
        self.hidden, tokens = shape["hidden"], shape["num_tokens"]
        self.ranks_on_host = shape["ranks_per_host"]
        self.idx = self.routing(place.rank)
        self.x = (torch.arange(tokens, device="cpu").remainder(61)[:, None] + place.rank).expand(-1, self.hidden)
        self.x = self.x.to(torch.bfloat16).contiguous()
        self.out = torch.zeros(tokens, self.hidden, **_ROWS)
        self.buffer = epee.Buffer(
            num_experts=shape["num_experts"],
            hidden=self.hidden,
            num_topk=shape["num_topk"],
            max_tokens_per_rank=tokens,
        )
        self.groups = {"gloo": dist.group.WORLD, "flat": dist.new_group(backend="epee")}
        self.sends = [int(self.goes_to(place.rank, rank).sum()) for rank in range(self.num_ranks)]
        self.gets = [int(self.goes_to(rank, place.rank).sum()) for rank in range(self.num_ranks)]
        self.there = torch.zeros(sum(self.sends), self.hidden, **_ROWS)
        self.here = torch.zeros(sum(self.gets), self.hidden, **_ROWS)

    def routing(self, rank: int) -> torch.Tensor:
        """Return the experts of a rank's tokens."""
        generator = torch.Generator(device="cpu").manual_seed(rank)
        scores = torch.rand(self.shape["num_tokens"], self.shape["num_experts"], generator=generator, device="cpu")
        return scores.topk(self.shape["num_topk"], dim=1).indices

    def goes_to(self, source: int, rank: int) -> torch.Tensor:
        """Return `[num_tokens]` bool: which tokens of a source go to a rank."""
        return (self.routing(source) // (self.shape["num_experts"] // self.num_ranks) == rank).any(1)

    def rows(self) -> tuple[float, float, float]:
        """Return the rows per token of this rank that leave its host: by expert, by rank, by host."""
        owner = self.idx // (self.shape["num_experts"] // self.num_ranks)
        host = owner // self.ranks_on_host
        mine = self.place.rank // self.ranks_on_host
        by_rank = sum(
            int((owner == rank).any(1).sum()) for rank in range(self.num_ranks) if rank // self.ranks_on_host != mine
        )
        tokens = len(self.idx)
        return float((host != mine).sum()) / tokens, by_rank / tokens, float((host != mine).any(1).sum()) / tokens

    # ---- sides

    def epee(self) -> Any:
        """Dispatch, and combine what has come as it is."""
        got = self.buffer.dispatch(self.x, self.idx)
        return got, self.buffer.combine(got.x, got.handle, out=self.out)

    def once_per_rank(self, group: Any) -> None:
        """Send the rows once to each of their ranks, and back."""
        dist.all_to_all_single(self.here, self.there, self.gets, self.sends, group=group)
        dist.all_to_all_single(self.there, self.here, self.sends, self.gets, group=group)

    def raw_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank's partner gets of our records, and those that it sends."""
        size, rank, partner = 2 * self.hidden, self.place.rank, self.place.partner
        return tuple(size * self.on_host(a, b) for a, b in ((rank, partner), (partner, rank)))  # type: ignore[return-value]

    def on_host(self, source: int, rank: int) -> int:
        """Return how many tokens of a source go to the host of a rank."""
        first = rank // self.ranks_on_host * self.ranks_on_host
        ranks = range(first, first + self.ranks_on_host)
        return int(torch.stack([self.goes_to(source, each) for each in ranks]).any(0).sum())

    def check(self) -> None:
        """Compare a dispatch and a combine with what they must be."""
        got, combined = self.epee()
        rows = []
        for source in range(self.num_ranks):
            tokens = self.goes_to(source, self.place.rank).nonzero()[:, 0]
            rows.append((tokens.remainder(61) + source).to(torch.bfloat16))
        want = torch.cat(rows)[:, None].expand(-1, self.hidden)
        assert torch.equal(got.x, want)
        times = torch.stack([self.goes_to(self.place.rank, rank) for rank in range(self.num_ranks)]).sum(0)
        # at most 64 times 4: exact in float32, and rounded once where a host's sum is exact in bfloat16
        assert torch.equal(combined.x.float(), (self.x.float() * times[:, None]).to(torch.bfloat16).float())


def measure(place: Place, shape: dict[str, int], num_steps: int, num_blocks: int) -> dict[str, Any]:
    """Run on every rank: seconds of each block and side, rows per token, bytes per step."""
    step = Step(place, shape)
    raw = Raw(place)
    out, into = (memoryview(bytearray(b"\x55") * nbytes) for nbytes in step.raw_bytes())

    def move() -> None:
        raw.exchange(out, into)
        raw.exchange(into, out)

    calls: dict[str, Callable[[], object]] = {
        "epee": step.epee,
        "flat": lambda: step.once_per_rank(step.groups["flat"]),
        "gloo": lambda: step.once_per_rank(step.groups["gloo"]),
        "raw": move,
    }
    step.check()
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    sent: dict[str, list[float]] = {side: [] for side in calls}
    sides = list(calls)
    for idx in range(num_blocks):
        for position in range(len(sides)):
            side = sides[(idx + position) % len(sides)]
            taken, nbytes = block(place, calls[side], num_steps)
            seconds[side].append(taken)
            sent[side].append(nbytes)
    step.check()
    raw.close()
    step.buffer.close()
    dist.destroy_process_group(step.groups["flat"])
    rows = step.rows()
    return {"seconds": seconds, "rows": rows, "sent": {side: round(min(values)) for side, values in sent.items()}}
