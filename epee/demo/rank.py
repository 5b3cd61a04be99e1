"""The whole story of one rank: join, train, write a sample, prove the step, report.

Rank 0 sends what the parent shows and writes; the other ranks contribute through the process group and send nothing
but `done` or their error (see `launch.py`).
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import EvictedError
from .check import compare_one_step
from .launch import Message, Send
from .model import is_expert
from .settings import TIMEOUT_S, Settings
from .state import gather
from .survive import Survivor, backend_options
from .text import split_text
from .train import Trainer, bytes_per_link, row_bytes


def run_rank(rank: int, send: Send, settings: Settings, folder: Path, joins: bool = False) -> None:
    """Train on one rank; rank 0 sends the result. `folder` has the text, and files through which ranks meet.

    With `joins` it takes the place of a lost rank.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.num_ranks))
    _join(rank, settings, folder, joins)
    trainer = Trainer(rank, settings, split_text((folder / "text").read_bytes()), send)
    try:
        if settings.victim is None:
            trainer.train()
        else:
            Survivor(trainer, folder / "state.npz", joins).train()
    except EvictedError as exc:  # lost on purpose (`--stall`), and awake again: it has no part in this any more
        text = f"the old rank {rank} woke up and was told that it is out: {exc}"
        send({"kind": "event", "what": "evicted", "text": text, "clock": time.perf_counter()})
        return
    with closing(trainer.buffer):
        sample = trainer.model.write(settings.sample_bytes, seed=settings.seed)
        result = {**_counters(trainer), "sample": sample, "check": compare_one_step(trainer)}
    if rank == 0:
        send({"kind": "result", **result})
    dist.destroy_process_group()  # on a normal end only: it waits for the peers


def _join(rank: int, settings: Settings, folder: Path, joins: bool) -> None:
    """Open the default process group over a file; it sums the gradients of everything that is not an expert."""
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=settings.num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=None if settings.victim is None else backend_options(settings, joins),
    )


def _counters(trainer: Trainer) -> Message:
    """Bring the ranks' counters together; collective of all ranks."""
    dispatched, size_of_row = gather(trainer.rows, trainer.members), row_bytes(trainer.settings)
    numbers = [
        value.numel() * (trainer.settings.num_ranks if is_expert(name) else 1)
        for name, value in trainer.model.named_parameters()
    ]
    return {
        "began": trainer.began,
        "steps": trainer.steps,
        "valid": trainer.valid,
        "train_s": trainer.train_s,
        "tokens": trainer.num_tokens,
        "tokens_per_s": trainer.num_tokens / trainer.train_s,
        "expert_load": gather(trainer.expert_load, trainer.members).sum(0).tolist(),
        "dispatched_rows": dispatched.tolist(),
        "bytes_per_link": bytes_per_link(dispatched, size_of_row),
        "row_bytes": size_of_row,
        "num_parameters": sum(numbers),
    }
