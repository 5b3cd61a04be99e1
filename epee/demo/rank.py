"""The whole story of one rank: join, train, write a sample, prove the step, report.

Rank 0 sends what the parent shows and writes; the other ranks contribute through the process group and send nothing
but how they ended (see `launch.py`).
"""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import EvictedError
from .check import compare_one_step
from .launch import Send
from .model import is_expert
from .settings import TIMEOUT_S, Settings
from .survive import Survivor, backend_options, event
from .train import Trainer, gather


def run_rank(rank: int, send: Send, settings: Settings, folder: Path, joins: bool = False) -> None:
    """Train on one rank; rank 0 sends the result. `folder` has the text, and files through which ranks meet.

    With `joins` it takes the place of a lost rank.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.num_ranks))
    dist.init_process_group(
        "epee",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=settings.num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=None if settings.victim is None else backend_options(settings, joins),
    )
    trainer = Trainer(rank, settings, (folder / "text").read_bytes(), send)
    try:
        if settings.victim is None:
            trainer.train()
        else:
            Survivor(trainer, folder / "state.npz", joins).train()
    except EvictedError as exc:  # lost on purpose (`--stall`), and awake again: it has no part in this any more
        send(event("evicted", f"the old rank {rank} woke up and was told that it is out: {exc}"))
        return
    with closing(trainer.buffer):
        members = trainer.members
        num_parameters = sum(
            value.numel() * (len(members) if is_expert(name) else 1) for name, value in trainer.model.named_parameters()
        )
        result = {
            "kind": "result",
            "began": trainer.began,
            "steps": trainer.steps,
            "valid": trainer.valid,
            "tokens": trainer.num_tokens,
            "tokens_per_s": trainer.num_tokens / trainer.valid[-1][1],
            "expert_load": gather(trainer.expert_load, members).sum(0).tolist(),
            "bytes_per_link": trainer.traffic,
            "num_parameters": num_parameters,
            "sample": trainer.model.write(),
            "check": compare_one_step(trainer),
        }
    if rank == 0:
        send(result)
    dist.destroy_process_group()  # on a normal end only: it waits for the peers
