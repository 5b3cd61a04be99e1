"""`epee bench hosts`: the backend "epee" against gloo and raw TCP between two hosts, on CPU tensors.

The hosts are namespaces of this machine with a veth between them, or, without root, two loopback addresses
(`two_hosts.py`). gloo's sockets use the same interface. Every operation is checked with its closed form on both sides,
before and after, and all sides run in turns in the same processes (`hosts_rank.py`). Both ends of the network share
this machine's cores, so a real pair of hosts has more arithmetic and less network.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import epee
from epee.backend.collectives.reducing_hosts import AllReduce, is_less

from . import common, two_hosts

NAME = "hosts"
KIB, MIB = 1 << 10, 1 << 20
FORMULAS = {
    "time": "time of a call on rank 0, median of a block's calls, then of the blocks; send_recv: half a round trip",
    "nixl": "epee with EPEE_LINK=nixl, over UCX's TCP; only where the extra `nixl` is installed, no bar",
    "ratio": "median over the blocks of gloo's time / epee's",
    "bytes": "all_reduce, send_recv: the tensor; all_to_all: what a rank sends to each other rank",
    "raw": "the bytes of `out` / ranks of a host, each way at once between each pair of ranks, over a Python socket; "
    "large ones vary by a third with where memory lies",
    "out": "bytes that leave a host: all_to_all n^2 bytes; all_reduce the tensor where hosts add up first, else n "
    "bytes up to 256 KiB, above (n + 1) / 2 bytes; "
    "send_recv the tensor per round trip; n = ranks of a host",
    "counted": "what the interface of the first host has sent per call, headers and acknowledgements included, as the "
    "interface counts (segments of up to 64 KiB have one header)",
}


class Row(NamedTuple):
    """An operation of a size, on so many ranks per host.

    Attributes:
        num_calls: in a block.
        bar, goal: gloo's time / epee's; of send_recv epee's microseconds.
    """

    ranks_per_host: int
    op: str
    nbytes: int
    num_calls: int
    bar: float
    goal: float


ROWS = (
    Row(1, "all_to_all", 4, 100, 8, 12),
    Row(1, "all_to_all", 4 * KIB, 100, 8, 12),
    Row(1, "all_to_all", 64 * KIB, 100, 4, 6),
    Row(1, "all_to_all", MIB, 30, 1.7, 2),
    Row(1, "all_to_all", 16 * MIB, 8, 1.8, 2.5),
    Row(1, "all_reduce", 4, 100, 3, 8),
    Row(1, "all_reduce", 64 * KIB, 100, 3.5, 6),
    Row(1, "all_reduce", 16 * MIB, 8, 1.8, 2.5),
    Row(1, "send_recv", 4, 100, 25, 18),
    Row(2, "all_reduce", 4, 60, 3, 7),
    Row(2, "all_reduce", 64 * KIB, 40, 10, 20),
    Row(2, "all_reduce", 16 * MIB, 8, 1.8, 2.5),
)


def bytes_out_of_a_host(op: str, nbytes: int, ranks_per_host: int) -> int:
    """Return what must leave each of two hosts in a call of the backend."""
    if op == "all_to_all":
        return ranks_per_host**2 * nbytes
    if op == "all_reduce":
        if is_less([tuple(range(ranks_per_host))] * 2, nbytes):
            return nbytes
        return ranks_per_host * nbytes if nbytes <= AllReduce.one_step_bytes else (ranks_per_host + 1) * nbytes // 2
    return ranks_per_host * nbytes


def report(row: Row, measured: dict[str, Any], has_counters: bool) -> dict[str, Any]:
    """Turn what rank 0 has measured into a row of the report."""
    share = 2 if row.op == "send_recv" else 1
    seconds, sent = measured["seconds"], measured["sent"]
    ratios = [gloo / ours for gloo, ours in zip(seconds["gloo"], seconds["epee"], strict=True)]
    found: dict[str, Any] = row._asdict()
    for side, values in seconds.items():
        found[f"{side}_us"] = round(1e6 * statistics.median(values) / share, 1)
    found["ratio"] = round(statistics.median(ratios), 2)
    found["ratios"] = [round(ratio, 2) for ratio in ratios]
    is_met = found["epee_us"] <= row.bar if row.op == "send_recv" else found["ratio"] >= row.bar
    found["is_met"] = is_met
    found["out_bytes"] = bytes_out_of_a_host(row.op, row.nbytes, row.ranks_per_host)
    found["counted_bytes"] = {side: round(statistics.median(sent[side])) for side in sent} if has_counters else None
    return found


def show(rows: list[dict[str, Any]], title: str, notes: list[str]) -> None:
    """Print the table."""
    columns = (
        "operation",
        "hosts",
        "bytes",
        "epee us",
        "nixl us",
        "gloo us",
        "ratio",
        "of each block",
        "bar (goal)",
        "raw us",
        "out",
        "counted: epee",
        "gloo",
    )
    table = []
    for row in rows:
        unit = "us " if row["op"] == "send_recv" else ""
        counted = row["counted_bytes"] or {"epee": "-", "gloo": "-"}
        table.append(
            (
                row["op"],
                f"{two_hosts.NUM_HOSTS}x{row['ranks_per_host']}",
                str(row["nbytes"]),
                f"{row['epee_us']:.1f}",
                f"{row['nixl_us']:.1f}" if "nixl_us" in row else "-",
                f"{row['gloo_us']:.1f}",
                f"{row['ratio']:.1f}",
                f"{min(row['ratios']):.1f}-{max(row['ratios']):.1f}",
                f"{row['bar']:g} {unit}({row['goal']:g}){'' if row['is_met'] else ' MISSED'}",
                f"{row['raw_us']:.1f}",
                str(row["out_bytes"]),
                str(counted["epee"]),
                str(counted["gloo"]),
            )
        )
    common.print_table(title, columns, table, notes)


def measure(rows: list[Row], has_network: bool, is_realtime: bool, num_blocks: int) -> list[dict[str, Any]]:
    """Run the rows of one number of ranks per host on two new hosts."""
    told = [
        (row.op, row.nbytes, row.num_calls, bytes_out_of_a_host(row.op, row.nbytes, row.ranks_per_host)) for row in rows
    ]
    ranks_per_host = rows[0].ranks_per_host
    args: list[Any] = [
        [(op, nbytes, calls, out // ranks_per_host) for op, nbytes, calls, out in told],
        num_blocks,
    ]
    setting = two_hosts.Setting(
        ranks_per_host, has_network, is_realtime, "benchmarks.hosts_rank:measure", args, timeout_s=600.0
    )
    by_rank = two_hosts.run(setting)
    return [report(row, found, has_network) for row, found in zip(rows, by_rank[0], strict=True)]


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks per host, separated by commas.")] = "1,2",
    max_bytes: Annotated[int, typer.Option(min=4, help="Leave out larger sizes.")] = 16 * MIB,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each side.")] = 5,
    loopback: Annotated[bool, typer.Option(help="Two loopback addresses, even where namespaces can be made.")] = False,
    realtime: Annotated[
        bool, typer.Option(help="Run the ranks under SCHED_RR, so that other programs do not disturb them (root).")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
) -> None:
    """Compare calls between two hosts of this machine with gloo's and with raw TCP."""
    facts = common.machine() | {"epee": epee.__version__}
    has_network = not loopback and two_hosts.can_make_hosts()
    hosts = (
        "two network and PID namespaces, a veth between them"
        if has_network
        else "two loopback addresses of one network; bytes are not counted"
    )
    how = "ranks under SCHED_RR, priority 1" if realtime else "ranks scheduled as other programs are"
    rows: list[dict[str, Any]] = []
    for ranks_per_host in (int(text) for text in ranks.split(",")):
        chosen = [row for row in ROWS if row.ranks_per_host == ranks_per_host and row.nbytes <= max_bytes]
        if not chosen:
            raise typer.BadParameter(f"there is nothing to measure with {ranks_per_host} ranks per host")
        rows += measure(chosen, has_network, realtime, blocks)
    notes = [common.machine_line(facts), f"hosts: {hosts}; {how}"]
    notes += [f"{name}: {formula}" for name, formula in FORMULAS.items()]
    show(rows, "between two hosts: epee, gloo and raw TCP, float32", notes)
    if json is not None:
        setting = {"hosts": hosts, "scheduling": how, "num_blocks": blocks}
        common.write_json(json, {"machine": facts, "setting": setting, "formulas": FORMULAS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
