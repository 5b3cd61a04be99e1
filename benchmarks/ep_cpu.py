"""`epee bench ep`: dispatch and combine between processes on CPUs, against the same exchange written with gloo.

The peer is `GlooExchange`: `all_to_all_single` of counts, then of rows and of (expert id, weight) pairs packed into one
message, staging memory allocated once, the reduction in the rows' own dtype where that is exact. It is as fast as we
could write it; what was tried and lost: fresh tensors for each call (1.6x slower), separate messages for ids and
weights, boolean gathers per destination. Indexing and summing count on both sides.

Both sides are checked bit for bit against `epee.reference` before anything is timed. `benchmarks/common.py` says how
the times are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer

import epee
from epee import reference

from . import common, ep_hosts

NAME = "ep"
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NUM_BACK_TO_BACK = 50
BACK_TO_BACK = "dispatch, back to back"
PLAIN = "gloo sums wide"
FORMULAS = {
    "time": "per round: the slowest rank's time from a common barrier to the return of its call; then median, p10, p99",
    "logical_gbps": "mean received rows per rank (own rows included) x hidden x element size / median time, 10^9 bytes",
    "wire_gbps": "the same with only the rows that come from another rank",
    "speedup": "gloo median / epee median of the same rounds",
    "back to back": f"per round: the time of {NUM_BACK_TO_BACK} calls without a barrier between them, per call",
    PLAIN: "the gloo side sums in a float32 accumulator, as one would write it, instead of epee's way (`reduce.py`)",
    "combine": "y is in ordinary memory; 'combine in place': y was written into combine_input() before the clock "
    "started, the time of the combine_input() call itself is included",
}


@dataclass(frozen=True)
class Shape:
    """One setting to measure; tokens are per rank."""

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return (
            f"{self.num_ranks} ranks, {self.num_tokens} x {self.hidden} {self.dtype}, "
            f"top-{self.num_topk} of {self.num_experts}"
        )


DEFAULT_SHAPES = (
    Shape(2, 1, 2048, 4, 32),
    Shape(2, 64, 2048, 4, 32),
    Shape(2, 512, 2048, 4, 32),
    Shape(2, 512, 2048, 4, 32, "float32"),
    Shape(2, 1024, 7168, 8, 256),
    Shape(4, 512, 2048, 4, 32),
)


class GlooHandle(NamedTuple):
    """What the gloo side remembers of a dispatch; lists are per rank."""

    tokens: torch.Tensor  # [num_send] token of each sent row, by destination rank
    send_counts: list[int]
    recv_counts: list[int]
    num_tokens: int


class GlooExchange:
    """Dispatch and combine in the rank layout by `all_to_all_single`, written as well as we can."""

    def __init__(self, shape: Shape) -> None:
        most = shape.num_ranks * shape.num_tokens
        dtype = DTYPES[shape.dtype]
        self._shape = shape
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._num_local = shape.num_experts // shape.num_ranks
        self._send = torch.empty(most, shape.hidden, dtype=dtype)
        self._recv = torch.empty(most, shape.hidden, dtype=dtype)
        self._send_meta = torch.empty(most, 2 * shape.num_topk, dtype=torch.int32)
        self._recv_meta = torch.empty(most, 2 * shape.num_topk, dtype=torch.int32)
        self._row = torch.empty(shape.num_tokens, shape.hidden, dtype=self._wide)
        self._sum = torch.empty(shape.num_tokens, shape.hidden, dtype=self._wide)
        self._first_expert = torch.arange(shape.num_ranks) * self._num_local

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], GlooHandle]:
        """Return x, local topk_idx, topk_weights, tokens per local expert, and the handle."""
        shape = self._shape
        owner = topk_idx // self._num_local
        goes = torch.zeros(x.shape[0], shape.num_ranks, dtype=torch.bool).scatter_(1, owner, True)
        per_expert = torch.bincount(topk_idx.view(-1), minlength=shape.num_experts)
        # one message of counts: rows for the rank, then pairs for each of its experts
        counts = torch.cat([goes.sum(0)[:, None], per_expert.view(shape.num_ranks, -1)], 1)
        recv_counts = torch.empty_like(counts)
        dist.all_to_all_single(recv_counts, counts)
        dst, tokens = goes.t().nonzero(as_tuple=True)
        handle = GlooHandle(tokens, counts[:, 0].tolist(), recv_counts[:, 0].tolist(), x.shape[0])
        num_send, num_recv = len(tokens), sum(handle.recv_counts)
        meta, recv_meta = self._send_meta[:num_send], self._recv_meta[:num_recv]
        local = topk_idx[tokens] - self._first_expert[dst, None]
        here = (local >= 0) & (local < self._num_local)
        meta[:, : shape.num_topk] = local.masked_fill_(~here, -1)
        meta[:, shape.num_topk :].view(torch.float32).copy_(topk_weights[tokens].masked_fill_(~here, 0))
        pending = dist.all_to_all_single(recv_meta, meta, handle.recv_counts, handle.send_counts, async_op=True)
        recv_x = self.dispatch_again(x, handle)
        pending.wait()
        idx = recv_meta[:, : shape.num_topk].to(torch.int64)
        weights = recv_meta[:, shape.num_topk :].view(torch.float32)
        return recv_x, idx, weights, recv_counts[:, 1:].sum(0).tolist(), handle

    def dispatch_again(self, x: torch.Tensor, handle: GlooHandle) -> torch.Tensor:
        """Send rows along a known routing; return `[num_recv, hidden]`."""
        send, recv = self._send[: len(handle.tokens)], self._recv[: sum(handle.recv_counts)]
        torch.index_select(x, 0, handle.tokens, out=send)
        dist.all_to_all_single(recv, send, handle.recv_counts, handle.send_counts)
        return recv

    def combine(self, y: torch.Tensor, handle: GlooHandle, is_plain: bool = False) -> torch.Tensor:
        """Send rows back and sum them in ascending rank order; return `[num_tokens, hidden]`.

        The sum uses epee's own trick (`_sum_narrow`) where it is exact; `is_plain` sums in an accumulator, as one
        would write it.
        """
        back = self._send[: len(handle.tokens)]
        dist.all_to_all_single(back, y, handle.send_counts, handle.recv_counts)
        tokens, rows = handle.tokens.split(handle.send_counts), back.split(handle.send_counts)
        if not is_plain and (y.dtype == self._wide or self._shape.num_ranks <= 2):
            return self._sum_narrow(tokens, rows)
        self._sum.zero_()
        for chosen, part in zip(tokens, rows, strict=True):
            self._sum.index_add_(0, chosen, self._row[: len(chosen)].copy_(part))
        return self._sum.to(y.dtype)

    def _sum_narrow(self, tokens: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Sum in the rows' own dtype, where that is exact: the first rank's rows by a gather, the others added."""
        num_tokens = self._shape.num_tokens
        out = torch.empty(num_tokens, self._shape.hidden, dtype=rows[0].dtype)
        source = torch.full((num_tokens,), -1).index_copy_(0, tokens[0], torch.arange(len(tokens[0])))
        if len(tokens[0]):
            torch.index_select(rows[0], 0, source.clamp(min=0), out=out)
        out.index_fill_(0, (source < 0).nonzero().view(-1), 0.0)
        for chosen, part in zip(tokens[1:], rows[1:], strict=True):
            out.index_add_(0, chosen, part)
        return out


def make_inputs(shape: Shape) -> list[reference.Routed]:
    """Make all ranks' inputs: random rows, random distinct experts, random weights; the seed is the rank."""
    inputs = []
    for rank in range(shape.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(shape.num_tokens, shape.hidden, generator=generator).to(DTYPES[shape.dtype])
        scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
        weights, idx = scores.topk(shape.num_topk, dim=1)
        inputs.append(reference.Routed(x, idx, weights))
    return inputs


def make_outputs(received: list[reference.Received]) -> list[torch.Tensor]:
    """Make all ranks' expert outputs, one row per received row."""
    outputs = []
    for rank, there in enumerate(received):
        assert isinstance(there.x, torch.Tensor)
        generator = torch.Generator().manual_seed(1000 + rank)
        outputs.append(torch.randn(there.x.shape, generator=generator).to(there.x.dtype))
    return outputs


def measure_rank(
    rank: int, num_ranks: int, barrier: common.SpinBarrier, shapes: list[Shape], num_repeats: int
) -> list[dict[str, Any]]:
    """Check, then time every shape on this rank; return per shape the rows received and the seconds per operation."""
    return [_measure_shape(rank, barrier, shape, num_repeats) for shape in shapes]


def _measure_shape(rank: int, barrier: common.SpinBarrier, shape: Shape, num_repeats: int) -> dict[str, Any]:
    inputs = make_inputs(shape)
    expected = reference.dispatch(inputs, shape.num_experts)
    outputs = make_outputs(expected)
    sums = reference.combine(inputs, expected, outputs)
    gloo = GlooExchange(shape)
    with epee.Buffer(
        dist.group.WORLD,
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        max_tokens_per_rank=shape.num_tokens,
        dtype=DTYPES[shape.dtype],
    ) as buffer:
        mine, y = inputs[rank], outputs[rank]
        handles = _check(buffer, gloo, mine, y, expected[rank], sums[rank])
        sides = _sides(buffer, gloo, mine, y, *handles)
        seconds = {operation: common.interleave(barrier, pair, num_repeats) for operation, pair in sides.items()}
        if shape.num_tokens == 1:
            seconds[BACK_TO_BACK] = _back_to_back(barrier, sides["dispatch"], num_repeats)
    return {
        "num_recv": len(expected[rank].src_rank),
        "num_remote": int((expected[rank].src_rank != rank).sum()),
        "seconds": seconds,
    }


def _back_to_back(barrier: common.SpinBarrier, sides: list[common.Side], num_repeats: int) -> dict[str, list[float]]:
    """Time runs of `NUM_BACK_TO_BACK` calls and return seconds per call: what a call costs a host that only calls."""

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(NUM_BACK_TO_BACK):
                call()

        return run

    runs = [common.Side(side.name, repeated(side.call)) for side in sides]
    times = common.interleave(barrier, runs, max(50, num_repeats // 4))
    return {name: [seconds / NUM_BACK_TO_BACK for seconds in each] for name, each in times.items()}


def _check(
    buffer: epee.Buffer,
    gloo: GlooExchange,
    mine: reference.Routed,
    y: torch.Tensor,
    expected: reference.Received,
    sums: torch.Tensor,
) -> tuple[epee.Handle, GlooHandle]:
    """Run every operation of both sides once and compare it bit for bit; return the handles."""
    got = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    assert isinstance(mine.x, torch.Tensor)
    assert mine.topk_idx is not None
    assert mine.topk_weights is not None
    x, idx, weights, counts, handle = gloo.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    for side, parts in (
        ("epee", (got.x, got.topk_idx, got.topk_weights, got.num_tokens_per_expert)),
        ("gloo", (x, idx, weights, counts)),
    ):
        wanted = (expected.x, expected.topk_idx, expected.topk_weights, expected.num_tokens_per_expert)
        for name, part, want in zip(("x", "topk_idx", "topk_weights", "counts"), parts, wanted, strict=True):
            _require(side, f"dispatch {name}", part, want)
    _require("epee", "cached dispatch", buffer.dispatch(mine.x, handle=got.handle).x, expected.x)
    _require("gloo", "cached dispatch", gloo.dispatch_again(mine.x, handle), expected.x)
    _require("epee", "combine", buffer.combine(y, got.handle).x, sums)
    _require("gloo", "combine", gloo.combine(y, handle), sums)
    _require("gloo", "plain combine", gloo.combine(y, handle, is_plain=True), sums)
    in_place = buffer.combine_input(got.handle)
    in_place.copy_(y)
    _require("epee", "combine in place", buffer.combine(in_place, got.handle).x, sums)
    return got.handle, handle


def _require(side: str, what: str, got: Any, want: Any) -> None:
    same = torch.equal(got, want) if isinstance(want, torch.Tensor) else list(got) == list(want)
    if not same:
        raise AssertionError(f"{side}: {what} differs from the reference; nothing was measured")


def _sides(
    buffer: epee.Buffer,
    gloo: GlooExchange,
    mine: reference.Routed,
    y: torch.Tensor,
    handle: epee.Handle,
    gloo_handle: GlooHandle,
) -> dict[str, list[common.Side]]:
    """Return what to time: operation -> its sides."""
    x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
    lease: list[torch.Tensor] = []

    def fill() -> float:
        begin = time.perf_counter()
        lease.append(buffer.combine_input(handle))
        elapsed = time.perf_counter() - begin
        lease[0].copy_(y)
        return elapsed

    side = common.Side
    return {
        "dispatch": [
            side("epee", lambda: buffer.dispatch(x, idx, weights)),
            side("gloo", lambda: gloo.dispatch(x, idx, weights)),
        ],
        "dispatch, handle": [
            side("epee", lambda: buffer.dispatch(x, handle=handle)),
            side("gloo", lambda: gloo.dispatch_again(x, gloo_handle)),
        ],
        "combine": [
            side("epee", lambda: buffer.combine(y, handle)),
            side("epee in place", lambda: buffer.combine(lease.pop(), handle), fill),
            side("gloo", lambda: gloo.combine(y, gloo_handle)),
            side(PLAIN, lambda: gloo.combine(y, gloo_handle, is_plain=True)),
        ],
    }


def summarise(shape: Shape, by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn what the ranks of one shape measured into report rows, one per operation and epee side."""
    row_bytes = shape.hidden * DTYPES[shape.dtype].itemsize
    num_recv = sum(each["num_recv"] for each in by_rank) / shape.num_ranks
    num_remote = sum(each["num_remote"] for each in by_rank) / shape.num_ranks
    rows = []
    for operation, sides in by_rank[0]["seconds"].items():
        found = {name: common.summarise([each["seconds"][operation][name] for each in by_rank]) for name in sides}
        pairs = [(name, "gloo") for name in sides if name not in ("gloo", PLAIN)]
        pairs += [("epee", PLAIN)] if PLAIN in sides else []
        for name, peer in pairs:
            median_s = found[name].median_us * 1e-6
            label = "combine in place" if name == "epee in place" else operation
            rows.append(
                {
                    "shape": asdict(shape),
                    "operation": label if peer == "gloo" else f"{label}, {peer}",
                    "epee": common.summary_dict(found[name]),
                    "gloo": common.summary_dict(found[peer]),
                    "speedup": round(found[peer].median_us / found[name].median_us, 2),
                    "logical_gbps": round(num_recv * row_bytes / median_s / 1e9, 3),
                    "wire_gbps": round(num_remote * row_bytes / median_s / 1e9, 3),
                }
            )
    return rows


def run(shapes: list[Shape], num_repeats: int) -> dict[str, Any]:
    """Measure the shapes and return the report that is written as JSON."""
    report: dict[str, Any] = {
        "benchmark": NAME,
        "machine": {**common.machine(), "epee": epee.__version__},
        "formulas": FORMULAS,
        "num_repeats": num_repeats,
        "results": [],
    }
    for num_ranks in sorted({shape.num_ranks for shape in shapes}):
        chosen = [shape for shape in shapes if shape.num_ranks == num_ranks]
        measured = common.run_ranks(measure_rank, num_ranks, chosen, num_repeats)
        for shape_idx, shape in enumerate(chosen):
            report["results"] += summarise(shape, [by_shape[shape_idx] for by_shape in measured])
    return report


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    rows = []
    for result in report["results"]:
        times = [f"{result[side][key]:.0f}" for side in ("epee", "gloo") for key in ("median_us", "p10_us", "p99_us")]
        rows.append(
            [
                str(Shape(**result["shape"])),
                result["operation"],
                *times,
                f"{result['speedup']:.1f}x",
                f"{result['logical_gbps']:.2f}",
                f"{result['wire_gbps']:.2f}",
            ]
        )
    columns = ["setting", "operation", "epee us", "p10", "p99", "gloo us", "p10", "p99", "gloo/epee", "logical", "wire"]
    notes = [common.machine_line(report["machine"]), f"{report['num_repeats']} repeats, interleaved."]
    notes += [f"{name}: {text}." for name, text in report["formulas"].items()]
    common.print_table("Dispatch and combine on CPU; GB/s of epee", columns, rows, notes)


def main(
    ranks: Annotated[int | None, typer.Option(help="Number of local processes.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank.", min=1)] = None,
    hidden: Annotated[int | None, typer.Option(help="Elements per token, a multiple of 8.", min=8)] = None,
    topk: Annotated[int | None, typer.Option(help="Experts per token, 1 to 32.", min=1, max=32)] = None,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks, a multiple of --ranks.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32 or float64.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds per operation.", min=50)] = 100,
    hosts: Annotated[int, typer.Option(help="2: over two hosts of this machine (ep_hosts.py).", min=1, max=2)] = 1,
    realtime: Annotated[bool, typer.Option(help="With --hosts: run the ranks under SCHED_RR (root).")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the numbers to ep.json in this folder.")] = None,
) -> None:
    """Dispatch and combine on CPU against gloo's all_to_all_single. Without options: a list of settings."""
    if hosts > 1:
        shape = {
            "ranks_per_host": (ranks or 4) // hosts,
            "num_tokens": tokens or 1024,
            "hidden": hidden or 4096,
            "num_topk": topk or 4,
            "num_experts": experts or 32,
        }
        path = json or (out / f"{NAME}_hosts.json" if out is not None else None)
        ep_hosts.main(shape, max(10, repeats // 10), 5, realtime, path)
        return
    given = (ranks, tokens, hidden, topk, experts, dtype)
    shapes = list(DEFAULT_SHAPES)
    if any(value is not None for value in given):
        shapes = [Shape(ranks or 2, tokens or 512, hidden or 2048, topk or 4, experts or 32, dtype or "bfloat16")]
        _check_shape(shapes[0])
    report = run(shapes, repeats)
    show(report)
    for path in (json, out / f"{NAME}.json" if out is not None else None):
        if path is not None:
            common.write_json(path, report)


def _check_shape(shape: Shape) -> None:
    if shape.dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, got {shape.dtype!r}")
    if shape.num_experts % shape.num_ranks:
        raise typer.BadParameter(f"--experts must be a multiple of --ranks {shape.num_ranks}, got {shape.num_experts}")
    if shape.num_topk > shape.num_experts:
        raise typer.BadParameter(f"--topk must not be above --experts {shape.num_experts}, got {shape.num_topk}")
    if shape.hidden % 8:
        raise typer.BadParameter(f"--hidden must be a multiple of 8, got {shape.hidden}")


if __name__ == "__main__":
    typer.run(main)
