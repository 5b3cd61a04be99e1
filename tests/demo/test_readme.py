"""The snippet of "Alive after a kill" in the README does what it says, with real processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import epee
from tests.harness import DEAD, run_mortal

README = Path(__file__).resolve().parents[2] / "README.md"


def snippet() -> str:
    (code,) = re.findall(r"<!-- tested: tests/demo/test_readme\.py -->\n```python\n(.*?)```", README.read_text(), re.S)
    return str(code)


def run_snippet(rank: int, num_ranks: int, folder: str) -> str:
    """Run it with the rendezvous over a file, which no rank hosts."""
    start = dist.init_process_group

    def init(backend: str, **kwargs: object) -> None:
        start(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, **kwargs)

    dist.init_process_group = init
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(
            compile(snippet(), str(README), "exec"),
            {"os": os, "signal": signal, "torch": torch, "dist": dist, "epee": epee},
        )
    dist.destroy_process_group()
    return output.getvalue()


def test_the_snippet_prints_what_its_comment_says() -> None:
    promised = snippet().rstrip().rpartition("# ")[2] + "\n"
    assert promised.startswith("sum 2.0")
    assert run_mortal(run_snippet, 3, dead={1}) == [promised, DEAD, promised]
