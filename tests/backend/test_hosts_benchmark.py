"""`epee bench hosts` on tiny sizes over loopback: it runs, checks, and leaves nothing. No time is judged."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for _name in ("typer", "rich"):
    pytest.importorskip(_name, reason=f"the benchmark needs {_name}; the backend does not")

from benchmarks import common, hosts, two_hosts  # noqa: E402
from epee.backend.collectives import reduce  # noqa: E402
from epee.backend.collectives.reducing_hosts import plan_reduction  # noqa: E402
from epee.engine.outbox import sites_of  # noqa: E402
from epee.engine.plan import Sink  # noqa: E402
from epee.engine.tensors import carrier_of  # noqa: E402


@pytest.mark.slow
def test_a_short_run_checks_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.main(ranks="1", max_bytes=4, blocks=1, loopback=True, realtime=False, json=tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(row["op"], row["nbytes"]) for row in report["rows"]] == [
        ("all_to_all", 4),
        ("all_reduce", 4),
        ("send_recv", 4),
    ]
    for row in report["rows"]:
        assert min(row["epee_us"], row["gloo_us"], row["raw_us"]) > 0
        assert row["counted_bytes"] is None
    assert "two loopback addresses" in report["setting"]["hosts"]
    assert "send_recv" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not two_hosts.can_make_hosts(), reason="this user may not make network namespaces")
def test_what_crossed_the_veth_is_what_the_formula_says(tmp_path: Path) -> None:
    hosts.main(ranks="2", max_bytes=65536, blocks=1, loopback=False, realtime=False, json=tmp_path / "out.json")
    for row in json.loads((tmp_path / "out.json").read_text())["rows"]:
        counted = row["counted_bytes"]["epee"]
        assert row["out_bytes"] <= counted <= 1.08 * row["out_bytes"] + 65536


def fail_on_one(place: two_hosts.Place) -> None:
    """What a rank does whose benchmark is wrong; the other one waits for it."""
    if place.rank == 1:
        raise ValueError("the sums are wrong")
    place.barrier.wait()


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_run_and_says_why() -> None:
    setting = two_hosts.Setting(1, False, False, f"{__name__}:fail_on_one", [], timeout_s=50.0)
    with pytest.raises(common.RankError, match="the sums are wrong"):
        two_hosts.run(setting)


def bytes_exported(num_ranks: int, ranks_per_host: int, nbytes: int) -> int:
    """What the plans of the first host's ranks send to the ranks of the second."""
    there = range(ranks_per_host, num_ranks)
    carrier = carrier_of(torch.zeros(1, dtype=torch.float32, device="cpu"), "all_reduce")
    total = 0
    for rank in range(ranks_per_host):
        sites = sites_of(range(num_ranks), [int(rank >= ranks_per_host) for rank in range(num_ranks)])
        peer_regions: Any = types.SimpleNamespace(rank=rank, num_ranks=num_ranks, staging_bytes=16 << 20, sites=sites)
        reducer = reduce.Reducer(reduce.SUM, torch.float32, carrier)
        plan = plan_reduction(
            "all_reduce", 0, Sink(np.zeros(nbytes // 4, np.float32)), reducer, reduce.SUM, peer_regions
        )
        for k in range(plan.rounds):
            total += sum(length for _, length in plan.exports(peer_regions, k, there))
            if plan.merge_bytes:
                total += sum(length for _, length in plan.exports_merged(peer_regions, k, there))
    return total


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [4, 64 << 10, 16 << 20])
def test_the_formula_of_all_reduce_is_what_plans_export(ranks_per_host: int, nbytes: int) -> None:
    told = hosts.bytes_out_of_a_host("all_reduce", nbytes, ranks_per_host)
    assert bytes_exported(2 * ranks_per_host, ranks_per_host, nbytes) == told


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(Exception, match="nothing to measure with 3 ranks"):
        hosts.main(ranks="3", blocks=1, loopback=True)
