"""The benchmarks on GPUs, each by its `main`, with tiny sizes and emulated kernels: they run, check and report."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ep_gpu
from tests.csrc.cuda_stand_in import run_main
from tests.csrc.emulated import has_compiler

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
EP = {"NUM_EXPERTS": 4, "NUM_TOPK": 2, "HIDDEN": 256}


def test_dispatch_and_combine_are_checked_and_timed(tmp_path: Path) -> None:
    module = "benchmarks.ep_gpu"
    sizes = {
        **EP,
        "FLUSH_BYTES": 64,
        "GRAPH_TOKENS": 4,
        "CHECKED_SMS": (3, 1),
        "WARM_UP": 1,
        "HOST_WARM_UP": 1,
        "GRAPH_PAIRS": 2,
    }
    arguments = ["--num-ranks=2", "--tokens=5", "--check=0,3", "--sms=2", "--graph-sms=0", "--calls=2", "--nccl"]
    report = run_main(module, arguments, {module: sizes}, tmp_path / "out.json")
    kinds = ["dispatch bf16", "dispatch fp8", "combine bf16", "combine bf16 from ordinary memory"]
    kinds += [f"expert dispatch{padding} {dtype}" for padding in ("", ", no padding,") for dtype in ("bf16", "fp8")]
    kinds += ["nccl all_to_all_single bf16"]
    assert [row["name"] for row in report["rows"]] == kinds
    assert all(0 < row["median_us"] <= row["p99_us"] for row in report["rows"])
    assert list(report["host_us"]) == ["4", "5"]
    assert report["graph_default_sms"].keys() == {"pair_cold_us", "pair_us", "barrier_us"}


def test_a_result_file_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, image = Path(ep_gpu.__file__).with_name("results") / "ep_gpu_4xh200.json", tmp_path / "out.svg"
    monkeypatch.setattr("sys.argv", ["ep_gpu.py", "--plot", str(results), str(image)])
    ep_gpu.main()
    assert "<svg" in image.read_text()


def test_kernels_of_a_combine_are_profiled(tmp_path: Path) -> None:
    module = "benchmarks.ep_gpu"
    arguments = ["--num-ranks=2", "--tokens=4", "--check=", "--sms=2", "--calls=2", "--profile", "--only=combine bf16"]
    report = run_main(module, arguments, {module: {**EP, "FLUSH_BYTES": 64}}, tmp_path / "out.json")
    assert any("combine_throughput" in kernel for kernel in report["kernels_us"]["combine bf16 4"])


def test_latency_calls_are_checked_and_timed(tmp_path: Path) -> None:
    module = "benchmarks.latency_gpu"
    sizes = {
        "NUM_EXPERTS": 4, "NUM_TOPK": 2, "HIDDEN": 512, "MAX_TOKENS": 6, "CALLS": (1, 2), "REPLAYS": 1, "HALVES": 4,
    }  # fmt: skip
    arguments = ["--num-ranks=2", "--tokens=1,6", "--check=0,3", "--packets=2,0"]
    rows = run_main(module, arguments, {module: sizes}, tmp_path / "out.json")["rows"]
    assert [row["name"] for row in rows[:8]] == [
        "dispatch fp8", "dispatch bf16", "combine bf16", "combine bf16, weights given", "combine f32",
        "pair fp8 + bf16", "dispatch fp8, halves", "combine bf16, halves",
    ]  # fmt: skip
    halves = [row for row in rows if "send_us" in row]
    assert all(row["send_us"] > 0 and row["receive_us"] > 0 for row in halves), "the kernels have other names"


def test_calls_by_all_names_are_checked_and_timed(tmp_path: Path) -> None:
    module = "benchmarks.calls_gpu"
    sizes = {**EP, "FEW": 4, "MANY": 6, "BLOCKS": 2, "WARM_UP": 1}
    report = run_main(module, ["--num-ranks=2", "--calls=4"], {module: sizes}, tmp_path / "out.json")
    names = list(report["elapsed_and_host_us"])
    groups = ("tensor.add_", "NCCL", "V2 names", "LatencyBuffer", "low_latency", "Buffer dispatch", "V1", "V2 dispatch")
    for group in groups:
        assert any(name.startswith(group) for name in names), group


FEW_CALLS = {
    "GRAPH_CALLS": ((1, 2),) * 3, "MESSAGE_CALLS": (2, 2, 2), "EAGER_CALLS": 2, "HOST_CALLS": 2, "EAGER_BLOCKS": 2,
    "HOST_BLOCKS": 2, "REPLAYS": 1,
}  # fmt: skip
COLLECTIVES = {
    **FEW_CALLS, "SIZES": (4, 4096, 65536), "CHECKED_COUNTS": (0, 1, 1023), "GRAPH_COUNT": 4000, "GRAPH_REPLAYS": 2,
    "BACK_TO_BACK": 20, "SILENT_COUNTS": (500,), "POOL_BYTES": 1 << 20, "POOL_ABOVE_BYTES": 4096, "EAGER": (4,),
    "SYMMETRIC_FROM_BYTES": 1 << 30, "MESSAGE_SIZES": (4, 4096), "CHECKED_MESSAGES": (0, 1, 4097), "MIDDLE": (4096,),
    "LARGE": (6000,), "EXCHANGED": (8000,), "CHUNKS": ((16, 1),),
    "PIPELINED": ("all_reduce",),
}  # fmt: skip


def test_ep_gpu_passes_groups_of_calls_on(tmp_path: Path) -> None:
    sizes = {"benchmarks.calls_gpu": {**EP, "FEW": 4, "MANY": 6, "BLOCKS": 2, "WARM_UP": 1}}
    report = run_main("benchmarks.ep_gpu", ["--num-ranks=1", "--v2"], sizes, tmp_path / "out.json")
    assert any(name.startswith("V2 dispatch") for name in report["elapsed_and_host_us"])


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        (["--skip-times", "--skip-messages"], set()),
        (
            ["--skip-checks", "--skip-messages"],
            {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"},
        ),
        (["--skip-checks", "--skip-times"], {"round trip", "exchange"}),
        pytest.param(
            ["--skip-checks", "--skip-times", "--skip-messages", "--sweep"], {"all_reduce"}, marks=pytest.mark.slow
        ),
    ],
)
def test_collectives(tmp_path: Path, arguments: list[str], ops: set[str]) -> None:
    module = "benchmarks.collectives_gpu"
    report = run_main(module, ["--num-ranks=2", *arguments], {module: COLLECTIVES}, tmp_path / "out.json", True)
    assert ops <= {row["op"] for row in report["rows"]}


def test_collectives_mask(tmp_path: Path) -> None:
    module = "benchmarks.collectives_mask"
    sizes = {"SIZES": (4, 4096), "CHECKED_COUNTS": (1, 500), "REPLAYS": 1, "EAGER_BLOCKS": 1, "EAGER_CALLS": 2}
    constants = {module: sizes, "benchmarks.collectives_gpu": FEW_CALLS}
    rows = run_main(module, ["--num-ranks=2"], constants, tmp_path / "out.json", True)["rows"]
    assert {"op", "bytes", "raise_us", "mask_us", "nccl_us"} <= set(rows[0])
