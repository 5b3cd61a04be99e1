"""Random sequences of operations on random shapes against a model, found by hypothesis, run in one set of ranks.

Hypothesis draws the programs here; the ranks stay up for the whole test and run each program over a pipe of files, so a
hundred programs cost one start.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import run_ranks

from . import cases
from .cases import reduced, same, values

NUM_RANKS = 3
DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "reduce", "ring")

step = st.fixed_dictionaries(
    {
        "op": st.sampled_from(OPS),
        "dtype": st.integers(0, len(DTYPES) - 1),
        "rows": st.integers(0, 6) | st.sampled_from([700, 9_000]),
        "cols": st.integers(1, 4),
        "root": st.integers(0, NUM_RANKS - 1),
        "strided": st.booleans(),
        "async_op": st.booleans(),
        "group": st.integers(0, 1),
        "salt": st.integers(0, 50),
    }
)


class Model:
    """Runs one step on this rank and knows what must come out."""

    def __init__(self, rank: int, groups: list[Any]) -> None:
        self.rank = rank
        self.groups = groups
        self.pending: list[tuple[Any, Any]] = []

    def run(self, spec: dict[str, Any]) -> None:
        dtype = DTYPES[spec["dtype"]]
        shape = (spec["rows"], spec["cols"])
        group = self.groups[spec["group"]]
        options = {"group": group, "async_op": spec["async_op"]}
        check = getattr(self, f"_{spec['op']}")(spec, dtype, shape, group, options)
        work, verify = check
        if work is None or not spec["async_op"]:
            verify()
        else:
            self.pending.append((work, verify))

    def finish(self) -> None:
        for work, verify in self.pending:
            work.wait()
            verify()
        self.pending.clear()

    def _placed(self, content: torch.Tensor, spec: dict[str, Any]) -> cases.Placed:
        return cases.Placed(content, spec["strided"])

    def _parts(self, spec: dict[str, Any], shape: Any, dtype: Any) -> list[torch.Tensor]:
        return [values(r, shape, dtype, spec["salt"]) for r in range(NUM_RANKS)]

    def _all_reduce(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        x = self._placed(parts[self.rank], spec)
        work = dist.all_reduce(x.tensor, **options)
        return work, lambda: x.check(reduced(parts, dist.ReduceOp.SUM), str(spec))

    def _reduce(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        x = self._placed(parts[self.rank], spec)
        work = dist.reduce(x.tensor, spec["root"], **options)
        wanted = reduced(parts, dist.ReduceOp.SUM) if self.rank == spec["root"] else parts[self.rank]
        return work, lambda: x.check(wanted, str(spec))

    def _broadcast(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        x = self._placed(parts[self.rank], spec)
        work = dist.broadcast(x.tensor, spec["root"], **options)
        return work, lambda: x.check(parts[spec["root"]], str(spec))

    def _all_gather(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        out = self._placed(torch.zeros((NUM_RANKS * shape[0], shape[1]), dtype=dtype), spec)
        work = cases.all_gather_single(out.tensor, parts[self.rank], **options)
        return work, lambda: out.check(torch.cat(parts), str(spec))

    def _reduce_scatter(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, (NUM_RANKS * shape[0], shape[1]), dtype)
        out = self._placed(torch.zeros(shape, dtype=dtype), spec)
        work = cases.reduce_scatter_single(out.tensor, parts[self.rank], **options)
        mine = [p[self.rank * shape[0] : (self.rank + 1) * shape[0]] for p in parts]
        return work, lambda: out.check(reduced(mine, dist.ReduceOp.SUM), str(spec))

    def _all_to_all(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        rows = [[(shape[0] * (i + 1) + 3 * j + spec["salt"]) % 11 for j in range(NUM_RANKS)] for i in range(NUM_RANKS)]
        inputs = [values(i, (sum(rows[i]), shape[1]), dtype, spec["salt"]) for i in range(NUM_RANKS)]
        expected = [rows[i][self.rank] for i in range(NUM_RANKS)]
        out = self._placed(torch.zeros((sum(expected), shape[1]), dtype=dtype), spec)
        work = dist.all_to_all_single(out.tensor, inputs[self.rank], expected, rows[self.rank], **options)
        wanted = torch.cat([inputs[i].split(rows[i])[self.rank] for i in range(NUM_RANKS)])
        return work, lambda: out.check(wanted, str(spec))

    def _gather(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        is_root = self.rank == spec["root"]
        outs = [self._placed(torch.zeros(shape, dtype=dtype), spec) for _ in range(NUM_RANKS if is_root else 0)]
        work = dist.gather(parts[self.rank], [o.tensor for o in outs] or None, dst=spec["root"], **options)
        return work, lambda: [o.check(p, str(spec)) for o, p in zip(outs, parts, strict=False)]

    def _scatter(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        out = self._placed(torch.zeros(shape, dtype=dtype), spec)
        given = parts if self.rank == spec["root"] else None
        work = dist.scatter(out.tensor, given, src=spec["root"], **options)
        return work, lambda: out.check(parts[self.rank], str(spec))

    def _ring(self, spec: Any, dtype: Any, shape: Any, group: Any, options: Any) -> Any:
        parts = self._parts(spec, shape, dtype)
        left, right = (self.rank - 1) % NUM_RANKS, (self.rank + 1) % NUM_RANKS
        out = self._placed(torch.zeros(shape, dtype=dtype), spec)
        sent = dist.isend(parts[self.rank], right, group=group, tag=spec["salt"])
        dist.recv(out.tensor, left, group=group, tag=spec["salt"])
        sent.wait()
        same(out.tensor, parts[left], str(spec))
        return None, lambda: None


def play(rank: int, num_ranks: int, folder: str) -> int:
    """Run every program that appears in the folder until one says stop."""
    cases.init(rank, num_ranks, folder, staging_bytes=64 << 10)
    other = dist.new_group(list(range(num_ranks)), backend="epee")
    model = Model(rank, [dist.group.WORLD, other])
    for program in json.loads(Path(f"{folder}/programs").read_text()):
        for spec in program:
            model.run(spec)
        model.finish()
    dist.barrier()
    time.sleep(0.01)
    dist.destroy_process_group()
    return 1


def test_random_programs_give_what_the_model_says(tmp_path: Path) -> None:
    programs: list[list[dict[str, Any]]] = []

    @settings(max_examples=120, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(step, min_size=1, max_size=12))
    def draw(program: list[dict[str, Any]]) -> None:
        programs.append(program)

    draw()
    (tmp_path / "programs").write_text(json.dumps(programs))
    assert run_ranks(play, NUM_RANKS, str(tmp_path), backend=None, timeout_s=55) == [1] * NUM_RANKS
