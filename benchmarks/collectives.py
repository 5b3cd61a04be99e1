"""`epee bench collectives`: the collectives of the backend "epee" against gloo, on CPU tensors.

Both backends run in the same processes and in turns (`benchmarks/common.py`), one arithmetic thread each. Every
operation is checked on both sides before it is timed. In its turn a side makes a block of calls back to back, as
programs do; a time is the slowest rank's for the block, from a common barrier on, divided by the number of calls, with
results in the user's tensors (the copy at commit counts). send_recv is half of a ping-pong between ranks 0 and 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import epee

from . import common

NAME = "collectives"
OPS = ("all_reduce", "broadcast", "all_gather", "all_to_all", "send_recv", "barrier")
SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20)
# (ranks, op, bytes) -> how many times faster than gloo we promise to be, by medians, on two otherwise idle cores
TARGETS = {
    (2, "all_reduce", 4): 12.0,
    (2, "all_reduce", 64 << 10): 8.0,
    (2, "all_reduce", 16 << 20): 2.5,
    (2, "broadcast", 4): 8.0,
    (2, "broadcast", 16 << 20): 2.0,
    (2, "all_gather", 4): 8.0,
    (2, "all_gather", 16 << 20): 2.0,
    (2, "all_to_all", 4): 8.0,
    (2, "all_to_all", 16 << 20): 2.0,
    (2, "send_recv", 4): 5.0,
    (2, "send_recv", 16 << 20): 1.5,
    (4, "all_reduce", 4): 4.0,
    (4, "all_reduce", 16 << 20): 2.5,
}
FORMULAS = {
    "time": "per round: the slowest rank's time of a block of calls back to back, by the number of calls",
    "calls": "calls in a block: 50 up to 64 KiB, 10 up to 1 MiB, 4 above",
    "bytes": "all_reduce, broadcast, send_recv: the tensor; all_gather: a rank's input; all_to_all: what a rank sends",
    "speedup": "gloo median / epee median of the same rounds",
    "idle": "CPU time / wall time of a process that holds a group and sleeps for 10 s",
    "init": "new_group of the backend after imports, slowest rank",
}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Case:
    """One operation on one size: `call` does it, `check` compares a result with its closed form."""

    def __init__(self, op: str, nbytes: int, rank: int, num_ranks: int, group: Any) -> None:
        count = max(1, nbytes // 4)
        self._rank, self._num_ranks, self._group = rank, num_ranks, group
        self._x = torch.zeros(count)
        self.call: Callable[[], object] = getattr(self, f"_{op}")
        if op == "all_gather":
            self._out = torch.zeros(count * num_ranks)
        elif op == "all_to_all":
            self._count = max(1, count // num_ranks)
            self._x = torch.zeros(self._count * num_ranks)
            self._out = torch.zeros(self._count * num_ranks)
        self.check: Callable[[], None] = getattr(self, f"_check_{op}", lambda: None)

    def _all_reduce(self) -> object:
        return dist.all_reduce(self._x, group=self._group)

    def _check_all_reduce(self) -> None:
        self._x.fill_(self._rank + 1)
        self.call()
        assert bool((self._x == self._num_ranks * (self._num_ranks + 1) / 2).all())
        self._x.zero_()  # sums of zeros stay zero however often the call is repeated

    def _broadcast(self) -> object:
        return dist.broadcast(self._x, 0, group=self._group)

    def _check_broadcast(self) -> None:
        self._x.fill_(self._rank + 7)
        self.call()
        assert bool((self._x == 7).all())

    def _all_gather(self) -> object:
        return _all_gather(self._out, self._x, group=self._group)

    def _check_all_gather(self) -> None:
        self._x.fill_(self._rank)
        self.call()
        assert torch.equal(self._out.view(self._num_ranks, -1)[:, 0], torch.arange(float(self._num_ranks)))

    def _all_to_all(self) -> object:
        return dist.all_to_all_single(self._out, self._x, group=self._group)

    def _check_all_to_all(self) -> None:
        self._x.copy_(torch.arange(float(self._num_ranks)).repeat_interleave(self._count) + 100 * self._rank)
        self.call()
        wanted = (torch.arange(float(self._num_ranks)) * 100 + self._rank).repeat_interleave(self._count)
        assert torch.equal(self._out, wanted)

    def _send_recv(self) -> None:
        if self._rank == 0:
            dist.send(self._x, 1, group=self._group)
            dist.recv(self._x, 1, group=self._group)
        elif self._rank == 1:
            dist.recv(self._x, 0, group=self._group)
            dist.send(self._x, 0, group=self._group)

    def _check_send_recv(self) -> None:
        self._x.fill_(self._rank + 3)
        self.call()
        assert self._rank > 1 or bool((self._x == 3).all())

    def _barrier(self) -> object:
        return dist.barrier(group=self._group)


def num_calls(nbytes: int) -> int:
    """Return how many calls of a size make a block."""
    return 50 if nbytes <= 64 << 10 else 10 if nbytes <= 1 << 20 else 4


def block_of(call: Callable[[], object], count: int) -> Callable[[], object]:
    """Return a function that makes `count` calls back to back."""

    def block() -> None:
        for _ in range(count):
            call()

    return block


def measure(
    rank: int, num_ranks: int, barrier: common.SpinBarrier, ops: list[str], sizes: list[int], repeats: int
) -> dict[str, Any]:
    """Run on every rank: check, then time all operations and sizes; seconds per round, per side."""
    begin = time.perf_counter()
    ours = dist.new_group(list(range(num_ranks)), backend="epee")
    init_s = time.perf_counter() - begin
    groups = {"gloo": dist.group.WORLD, "epee": ours}
    times: dict[str, dict[str, list[float]]] = {}
    for op in ops:
        for nbytes in (4,) if op == "barrier" else sizes:
            cases = {side: Case(op, nbytes, rank, num_ranks, group) for side, group in groups.items()}
            for case in cases.values():
                case.check()
            count = num_calls(nbytes)
            sides = [common.Side(name, block_of(case.call, count)) for name, case in cases.items()]
            measured = common.interleave(barrier, sides, repeats)
            share = count * (2 if op == "send_recv" else 1)
            times[f"{op}/{nbytes}"] = {side: [t / share for t in values] for side, values in measured.items()}
    return {"init_s": init_s, "times": times}


def idle(rank: int, num_ranks: int, barrier: common.SpinBarrier, seconds: float) -> float:
    """Hold a group that has been used, sleep, and return the CPU time per wall time."""
    group = dist.new_group(list(range(num_ranks)), backend="epee")
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def report(num_ranks: int, by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn the ranks' times into rows."""
    rows = []
    for key in by_rank[0]["times"]:
        op, nbytes = key.split("/")
        sides = {side: common.summarise([ranks["times"][key][side] for ranks in by_rank]) for side in ("gloo", "epee")}
        target = TARGETS.get((num_ranks, op, int(nbytes)))
        speedup = sides["gloo"].median_us / sides["epee"].median_us
        rows.append(
            {
                "num_ranks": num_ranks,
                "op": op,
                "bytes": int(nbytes),
                "speedup": round(speedup, 2),
                "speedup_p10": round(sides["gloo"].p10_us / sides["epee"].p10_us, 2),
                "target": target,
                **{side: common.summary_dict(summary) for side, summary in sides.items()},
            }
        )
    return rows


def show(rows: list[dict[str, Any]], facts: dict[str, Any], notes: list[str]) -> None:
    """Print the table."""
    columns = ("operation", "ranks", "bytes", "gloo us", "[p10]", "epee us", "[p10]", "speedup", "promised")
    table = [
        (
            row["op"],
            str(row["num_ranks"]),
            str(row["bytes"]),
            f"{row['gloo']['median_us']:.1f}",
            f"[{row['gloo']['p10_us']:.1f}]",
            f"{row['epee']['median_us']:.1f}",
            f"[{row['epee']['p10_us']:.1f}]",
            f"{row['speedup']:.1f}",
            "" if row["target"] is None else f"{row['target']:g}{'' if row['speedup'] >= row['target'] else ' MISSED'}",
        )
        for row in rows
    ]
    common.print_table("collectives: epee against gloo, medians", columns, table, [common.machine_line(facts), *notes])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw latency against size, a panel per operation, and write it to `path` (png or svg)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ops = list(dict.fromkeys(row["op"] for row in rows if row["op"] != "barrier"))
    figure, panels = plt.subplots(1, len(ops), figsize=(3.4 * len(ops), 3.4), sharey=True, squeeze=False)
    styles = {"gloo": "tab:orange", "epee": "tab:blue"}
    for panel, op in zip(panels[0], ops, strict=True):
        for num_ranks in sorted({row["num_ranks"] for row in rows}):
            chosen = [row for row in rows if row["op"] == op and row["num_ranks"] == num_ranks]
            for side, colour in styles.items():
                panel.loglog(
                    [row["bytes"] for row in chosen],
                    [row[side]["median_us"] for row in chosen],
                    "o-" if num_ranks == 2 else "s--",
                    color=colour,
                    label=f"{side}, {num_ranks} ranks",
                )
        panel.set_title(op)
        panel.set_xlabel("bytes")
        panel.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("median latency (us)")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Sizes in bytes, separated by commas.")] = ",".join(map(str, SIZES)),
    ops: Annotated[str, typer.Option(help="Operations, separated by commas.")] = ",".join(OPS),
    repeats: Annotated[int, typer.Option(min=10, help="Rounds (blocks per side) of each operation and size.")] = 40,
    idle_s: Annotated[float, typer.Option(min=0.0, help="Seconds for the idle test; 0 leaves it out.")] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Draw latency against size into this file.")] = None,
) -> None:
    """Compare the backend's collectives with gloo's."""
    chosen = [op for op in ops.split(",") if op]
    unknown = sorted(set(chosen) - set(OPS))
    if unknown:
        raise typer.BadParameter(f"operations are {', '.join(OPS)}, got {', '.join(unknown)}")
    facts = common.machine() | {"epee": epee.__version__}
    rows: list[dict[str, Any]] = []
    notes = []
    inits = {}
    for num_ranks in (int(text) for text in ranks.split(",")):
        by_rank = common.run_ranks(
            measure, num_ranks, chosen, [int(text) for text in sizes.split(",")], repeats, timeout_s=1200.0
        )
        rows += report(num_ranks, by_rank)
        inits[num_ranks] = max(result["init_s"] for result in by_rank)
        notes.append(f"init of {num_ranks} ranks: {1000 * inits[num_ranks]:.0f} ms")
    idle_share = None
    if idle_s:
        idle_share = max(common.run_ranks(idle, 2, idle_s))
        notes.append(f"idle: {100 * idle_share:.3f} % of a core")
    show(rows, facts, notes)
    if json is not None:
        extra = {"init_s": inits, "idle_share": idle_share}
        common.write_json(json, {"machine": facts, "formulas": FORMULAS, "rows": rows, **extra})
    if plot_to is not None:
        plot(rows, plot_to)


if __name__ == "__main__":
    typer.run(main)
