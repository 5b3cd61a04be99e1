"""The figures of docs/performance.md and of the README's table, from the raw files in `benchmarks/results`.

    python -m benchmarks.page

writes each table anew between `<!-- figures: NAME -->` and `<!-- end of figures -->`, and draws the plots of the page.
`tests/test_performance_page.py` fails where the page differs from the raw files. Times are microseconds: the median,
and in brackets the 10th and 90th percentile. Where several runs were kept, times are those of the run that met the
least load (CPUs) or the median over the runs (GPUs), and a ratio is the range over all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->)", re.S)
SIZES = {4: "4 B", 4096: "4 KiB", 65536: "64 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 256 << 20: "256 MiB"}
CALLS = {  # of `calls_gpu.py`, as the page names them
    "tensor.add_": "`tensor.add_` of one element",
    "NCCL all_to_all_single": "NCCL's all_to_all_single",
    "LatencyBuffer pair, FP8": "`LatencyBuffer` dispatch FP8 and combine, 128 tokens",
    "Buffer dispatch, 128": "`Buffer.dispatch`, 128 tokens, `sync=False`",
    "Buffer dispatch, CPU sync, 128": "`Buffer.dispatch`, 128 tokens",
    "Buffer combine, 128": "`Buffer.combine`, 128 tokens",
    "V1 layout + dispatch + combine, 128": "DeepEP V1 layout, dispatch and combine, 128 tokens",
    "V1 layout + dispatch + combine, 4096": "4096 tokens",
    "V2 dispatch + combine, 128, do_cpu_sync=0": "DeepEP V2 dispatch and combine, 128 tokens",
    "V2 dispatch + combine, 4096, do_cpu_sync=0": "4096 tokens",
}
SHOWN = (4, 65536, 16 << 20, 256 << 20)  # sizes in the tables; the raw files and the plots have more
MUCH_LOAD = 6.0  # processes that want to run, on machines with two cores
Row = dict[str, Any]
Table = list[list[str]]


def load(pattern: str) -> list[Row]:
    """Return the raw files whose names fit, by name."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{pattern}.json"))]


def quietest(runs: list[Row]) -> Row:
    """Return the run that met the least load."""
    return min(runs, key=load_of)


def load_of(run: Row) -> float:
    """Return the processes that wanted to run before a run on CPUs."""
    return float(run["machine"]["load_average_1min_before"])


def by_load(runs: list[Row]) -> list[list[Row]]:
    """Return the runs on a machine with little to do, and those on one with many more processes than cores."""
    return [[run for run in runs if (load_of(run) > MUCH_LOAD) == is_much] for is_much in (False, True)]


def heads(runs: list[Row]) -> list[str]:
    """Return the heads of the columns with ratios: how many runs, and the least and the largest load that they met."""
    found = []
    for some in by_load(runs):
        met = sorted(map(load_of, some))
        ends = dict.fromkeys(f"{value:.0f}" for value in (met[0], met[-1]))
        found.append(f"load {'-'.join(ends)}, {plural(len(met), 'run')}")
    return found


def plural(count: int, word: str) -> str:
    """Return a number of things."""
    return f"{count} {word}{'s' * (count != 1)}"


def all_ratios(runs: list[Row], rows: str, is_same: Callable[[Row], bool]) -> list[str]:
    """Return the columns with ratios of one row of the page; nothing where no run has it."""
    found = [[row["speedup"] for run in some for row in run[rows] if is_same(row)] for some in by_load(runs)]
    return [ratios(some) if some else "" for some in found]


def number(value: float) -> str:
    """Return a time with three digits, as the page shows it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread_of(row: Row, side: str = "") -> tuple[float, float, float]:
    """Return median, p10 and p90 of a row: those of `row[side]`, or of its columns `SIDE_us`, `SIDE_p10_us` ...

    Files of 2026-11-21 have no p90 but p99, which stands in its place.
    """
    found = row[side] if isinstance(row.get(side), dict) else row
    middle = found["median_us"] if "median_us" in found else found[f"{side}_us"]
    prefix = f"{side}_" if f"{side}_p10_us" in found else ""
    return middle, found[f"{prefix}p10_us"], found[f"{prefix}p90_us" if f"{prefix}p90_us" in found else "p99_us"]


def time_of(row: Row, side: str = "") -> str:
    """Return median and percentiles of a row as the page shows them; the median alone where the file has no more."""
    if f"{side}_us" in row and f"{side}_p10_us" not in row:
        return number(row[f"{side}_us"])
    middle, low, high = map(number, spread_of(row, side))
    return f"{middle} ({low}-{high})"


def ratios(values: Iterable[float]) -> str:
    """Return the least and the largest of ratios."""
    found = sorted(values)
    low, high = (f"{value:.2f}" if value < 2 else f"{value:.1f}" for value in (found[0], found[-1]))
    return f"{low}x" if low == high else f"{low}-{high}x"


def all_reduce() -> Table:
    """Calls of all_reduce back to back, CPU tensors."""
    runs = load("all_reduce_2cores*")
    shown = quietest(runs)["rows"]
    table = [["bytes", "epee", "gloo", *heads(runs)]]
    for row in shown:
        found = all_ratios(runs, "rows", lambda other, row=row: other["bytes"] == row["bytes"])
        table.append([SIZES[row["bytes"]], time_of(row, "epee"), time_of(row, "gloo"), *found])
    return table


def collectives() -> Table:
    """Blocks of collectives, CPU tensors."""
    runs = load("collectives_2cores*")
    table = [["operation, ranks", "bytes", "epee", "gloo", *heads(runs)]]
    for row in quietest(runs)["rows"]:
        key = row["num_ranks"], row["op"], row["bytes"]
        if row["bytes"] not in (4, 16 << 20) or (row["num_ranks"] > 2 and row["op"] != "all_reduce"):
            continue
        found = all_ratios(
            runs, "rows", lambda other, key=key: (other["num_ranks"], other["op"], other["bytes"]) == key
        )
        size = SIZES[row["bytes"]]
        table.append([f"{row['op']}, {row['num_ranks']}", size, time_of(row, "epee"), time_of(row, "gloo"), *found])
    return table


def ep_cpu() -> Table:
    """Dispatch and combine, CPU tensors."""
    runs = load("ep_2cores*")
    table = [["ranks, tokens x hidden", "call", "epee", "gloo", *heads(runs)]]
    names = {"dispatch": "dispatch", "dispatch, handle": "cached dispatch", "combine": "combine"}
    names["combine in place"] = "combine in place"
    for row in quietest(runs)["results"]:
        shape = row["shape"]
        is_usual = shape["num_ranks"] == 2 and shape["num_tokens"] == 512 and shape["dtype"] == "bfloat16"
        is_other = shape["num_tokens"] < 512 or shape["dtype"] != "bfloat16" or row["operation"] not in names
        if is_other or not (is_usual or row["operation"] in ("dispatch", "combine")):
            continue
        key = row["shape"], row["operation"]
        found = all_ratios(runs, "results", lambda other, key=key: (other["shape"], other["operation"]) == key)
        experts = "" if shape["num_experts"] == 32 else f", top-{shape['num_topk']} of {shape['num_experts']}"
        what = f"{shape['num_ranks']}, {shape['num_tokens']} x {shape['hidden']}{experts}"
        table.append([what, names[row["operation"]], time_of(row, "epee"), time_of(row, "gloo"), *found])
    return table


def collectives_gpu() -> Table:
    """Collectives on CUDA tensors, in graphs."""
    runs = load("collectives_gpu_2xh200_2*")
    table = [
        [
            "operation",
            "bytes",
            "epee",
            "NCCL",
            f"NCCL / epee, {plural(len(runs), 'run')}",
            "in a pool",
            "symmetric memory",
        ]
    ]
    for row in (row for row in runs[0]["rows"] if "nccl_us" in row and row["bytes"] in SHOWN):
        found = [
            other["nccl_us"] / other["epee_us"]
            for run in runs
            for other in run["rows"]
            if "nccl_us" in other and (other["op"], other["bytes"]) == (row["op"], row["bytes"])
        ]
        more = [number(row[f"{side}_us"]) if f"{side}_us" in row else "" for side in ("pool", "symm_best")]
        table.append([row["op"], SIZES[row["bytes"]], time_of(row, "epee"), time_of(row, "nccl"), ratios(found), *more])
    return table


def messages_gpu() -> Table:
    """Messages between CUDA tensors, eager."""
    runs = load("collectives_gpu_2xh200_2*")
    table = [["messages", "bytes", "epee", "NCCL", f"NCCL / epee, {plural(len(runs), 'run')}"]]
    for row in (
        row
        for row in runs[0]["rows"]
        if row["op"] in ("round trip", "exchange") and row["bytes"] in (4, 16 << 20, 256 << 20)
    ):
        found = [
            other["nccl_eager_us"] / other["epee_eager_us"]
            for run in runs
            for other in run["rows"]
            if (other["op"], other["bytes"]) == (row["op"], row["bytes"])
        ]
        table.append(
            [row["op"], SIZES[row["bytes"]], time_of(row, "epee_eager"), time_of(row, "nccl_eager"), ratios(found)]
        )
    return table


def mask_gpu() -> Table:
    """Collectives of mode "mask" beside those of mode "raise"."""
    rows = load("collectives_mask_2xh*")[-1]["rows"]
    table = [["operation", "bytes", '"raise"', '"mask"', "NCCL"]]
    for row in (row for row in rows if row["bytes"] in SHOWN and row["op"] in ("all_reduce", "all_gather")):
        table.append([row["op"], SIZES[row["bytes"]], *(time_of(row, way) for way in ("raise", "mask", "nccl"))])
    return table


def ep_gpu() -> Table:
    """`Buffer` on GPUs."""
    runs = load("ep_gpu_2xh200_2*")
    rows = runs[0]["rows"]
    table = [["call", "128 tokens", "4096 tokens", f"4096 tokens, {plural(len(runs), 'run')}", "wire GB/s"]]
    for name in dict.fromkeys(row["name"] for row in rows):
        few, many = (next(row for row in rows if (row["name"], row["tokens"]) == (name, n)) for n in (128, 4096))
        found = [
            row["median_us"] for run in runs for row in run["rows"] if (row["name"], row["tokens"]) == (name, 4096)
        ]
        wire = f"{many['wire_gbps']:.0f}" if "wire_gbps" in many else ""
        table.append([name, time_of(few), time_of(many), f"{number(min(found))}-{number(max(found))}", wire])
    return table


def ep_gpu_4() -> Table:
    """`Buffer` on four GPUs, 24 SMs, and 8 at 4096 tokens."""
    rows = load("ep_gpu_4xh200")[0]["rows"]
    at = {(row["name"], row["tokens"], row.get("num_sms", 24)): row["median_us"] for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    table = [["call", "128 tokens", "4096", "8192", "4096, 8 SMs"]]
    for name in names:
        found = [at.get((name, *key)) for key in ((128, 24), (4096, 24), (8192, 24), (4096, 8))]
        table.append([name, *("" if us is None else number(us) for us in found)])
    return table


def latency_gpu() -> Table:
    """`LatencyBuffer` on GPUs."""
    runs = load("latency_gpu_2xh200_2*")
    rows = runs[0]["rows"]
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    table = [["call", *(f"{count} token{'s' * (count > 1)}" for count in tokens)]]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for row in (row for row in rows if row["name"] == name):
            cells.append(
                f"{number(row['send_us'])} + {number(row['receive_us'])}" if "send_us" in row else time_of(row)
            )
        table.append([name, *cells])
    return table


def calls_gpu() -> Table:
    """Eager calls from Python: the best of five blocks, over the runs."""
    runs = load("calls_gpu_2xh200_2*")
    table = [["call", f"{plural(len(runs), 'run')}"]]
    for name, label in CALLS.items():
        found = sorted(run["elapsed_and_host_us"][name][0] for run in runs if name in run["elapsed_and_host_us"])
        table.append([label, f"{number(found[0])}-{number(found[-1])}"])
    return table


def readme() -> Table:
    """The four figures of the README."""
    reduced = [row["speedup"] for run in load("all_reduce_2cores*") for row in run["rows"] if row["bytes"] == 4]
    shape = {"num_ranks": 2, "num_tokens": 512, "hidden": 2048, "num_topk": 4, "num_experts": 32, "dtype": "bfloat16"}
    rows = [row for run in load("ep_2cores*") for row in run["results"] if row["operation"] == "dispatch"]
    sent = [row["speedup"] for row in rows if row["shape"] == shape]
    (fp8,) = (
        row["median_us"]
        for row in load("ep_gpu_4xh200")[0]["rows"]
        if (row["name"], row["tokens"], row.get("num_sms")) == ("dispatch fp8", 4096, 24)
    )
    campaigns = [run["parts"]["kills"]["latency_ms"] for run in load("survive")[0]["runs"] if "kills" in run["parts"]]
    runs = [load_of(run) for run in load("all_reduce_2cores*") + load("ep_2cores*")]
    met = f"2 cores, load {min(runs):.0f} to {max(runs):.0f}"
    kill = min(campaigns, key=lambda found: float(found["p50"]))
    return [
        [f"[machines, clocks, more figures](docs/performance.md); {met}", "epee", "command"],
        ["all_reduce of 4 B, 2 CPU ranks", f"{factor(reduced)} gloo", "`epee bench all-reduce`"],
        ["dispatch of 512 x 2048 bfloat16, 2 CPU ranks", f"{factor(sent)} gloo", "`epee bench ep`"],
        [
            "dispatch of 4096 x 7168 FP8, 4x H200",
            f"{fp8:.0f} us; DeepEP V2 360, earlier",
            "`python benchmarks/ep_gpu.py --nccl`",
        ],
        [
            "from a kill to the end of the survivors' call, 4 CPU ranks",
            f"{kill['p50']:.0f} ms; p99 {kill['p99']:.0f} ms",
            "`python -m tests.survive.campaign --kills 1000`",
        ],
    ]


def factor(speedups: list[float]) -> str:
    """Return the range of ratios in words."""
    return f"{min(speedups):.1f} to {max(speedups):.1f} times as fast as"


TABLES: dict[str, Callable[[], Table]] = {
    "readme": readme,
    "all-reduce": all_reduce,
    "collectives": collectives,
    "ep": ep_cpu,
    "ep-gpu": ep_gpu,
    "ep-gpu-4": ep_gpu_4,
    "latency-gpu": latency_gpu,
    "calls-gpu": calls_gpu,
    "collectives-gpu": collectives_gpu,
    "messages-gpu": messages_gpu,
    "mask-gpu": mask_gpu,
}


def as_markdown(table: Table) -> str:
    """Return a table whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def written(text: str) -> str:
    """Return a page with its tables as the raw files have them."""
    return MARKED.sub(lambda found: found[1] + as_markdown(TABLES[found[2]]()) + found[4], text)


def draw(path: Path, rows: list[Row], sides: tuple[str, str], ops: list[str]) -> None:
    """Draw the times of both sides against bytes, an axis for each operation, bars from p10 to p90."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(ops), 3), layout="constrained")
    axes = figure.subplots(1, len(ops), sharey=True)
    for axis, op in zip(axes, ops, strict=True):
        for side in sides:
            points = sorted((row["bytes"], *spread_of(row, side)) for row in rows if row["op"] == op)
            sizes, middles, low, high = (list(column) for column in zip(*points, strict=True))
            down = [max(0.0, middle - least) for middle, least in zip(middles, low, strict=True)]
            up = [max(0.0, most - middle) for middle, most in zip(middles, high, strict=True)]
            axis.errorbar(sizes, middles, yerr=(down, up), marker="o", capsize=3, label=side)
        axis.set(xscale="log", yscale="log", xlabel="bytes", title=op)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds")
    axes[0].legend()
    figure.savefig(path, dpi=90)


def draw_all() -> None:
    """Draw the plots of the page."""
    docs = PAGES[0].parent
    cpu = [row for row in quietest(load("collectives_2cores*"))["rows"] if row["num_ranks"] == 2]
    draw(docs / "performance-cpu.png", cpu, ("epee", "gloo"), ["all_reduce", "broadcast", "all_gather", "all_to_all"])
    gpu = [row for row in load("collectives_gpu_2xh200_2*")[0]["rows"] if "nccl_us" in row]
    draw(docs / "performance-gpu.png", gpu, ("epee", "nccl"), ["all_reduce", "broadcast", "all_gather", "all_to_all"])


def main() -> None:
    """Write the tables of the pages and draw the plots."""
    for page in PAGES:
        page.write_text(written(page.read_text()))
    draw_all()


if __name__ == "__main__":
    main()
