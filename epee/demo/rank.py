"""The whole story of one rank: join, train, write a sample, prove the step, report.

Rank 0 sends what the parent shows and writes; the other ranks contribute through the process group and send nothing
but `done` or their error (see `launch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .check import TOLERANCE, compare_one_step
from .group import gather, process_group
from .launch import Message, Send
from .machine import num_cores
from .model import named
from .sample import write
from .settings import Settings
from .setup import make_buffer, make_model
from .text import split_text
from .traffic import FORMULA, bytes_per_link
from .train import Trainer


@dataclass(frozen=True)
class Job:
    """What a rank is given: the settings, the text as a file and the file through which the ranks meet."""

    settings: Settings
    text_path: str
    store_path: str


def run_rank(rank: int, job: Job, send: Send) -> None:
    """Train on one rank from start to end; rank 0 sends the result as a `result` message."""
    settings = job.settings
    torch.set_num_threads(max(1, num_cores() // settings.num_ranks))
    text = split_text(bytearray(Path(job.text_path).read_bytes()))

    def phase(name: str) -> None:
        if rank == 0:
            send({"kind": "phase", "text": name})

    with process_group(settings.backend, job.store_path, rank, settings.num_ranks) as group:
        with make_buffer(settings, group, torch.float32) as buffer:
            trainer = Trainer(rank, settings, make_model(settings, buffer, torch.float32), text, send)
            phase("training")
            trainer.run()
            phase("writing a sample")
            sample = write(trainer.model, settings)
            phase("checking one step against one dense process")
            result = _result(trainer, settings)
            result["sample"] = sample
            result["check"] = _check(rank, settings, group, trainer)
        if rank == 0:
            send({"kind": "result", **result})


def _check(rank: int, settings: Settings, group: dist.ProcessGroup, trainer: Trainer) -> Message | None:
    deviation = compare_one_step(rank, settings, group, trainer.model, trainer.next_batch())
    if deviation is None:
        return None
    return {
        "passed": deviation.passed,
        "tolerance": TOLERANCE,
        "max_deviation": deviation.worst,
        **deviation._asdict(),
        "dtype": "float64",
    }


def _result(trainer: Trainer, settings: Settings) -> Message:
    """Bring the ranks' counters together; collective."""
    dispatched = gather(trainer.traffic.rows)
    row_bytes = settings.size.hidden * torch.float32.itemsize
    num_tokens = trainer.num_steps * settings.tokens_per_rank * settings.num_ranks
    return {
        "steps": trainer.history.steps,
        "valid": trainer.history.valid,
        "train_s": trainer.train_s,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / trainer.train_s,
        "expert_load": gather(trainer.expert_load).sum(0).tolist(),
        "dispatched_rows": dispatched.tolist(),
        "bytes_per_link": bytes_per_link(dispatched, row_bytes).tolist(),
        "bytes_formula": FORMULA,
        "row_bytes": row_bytes,
        "num_parameters": _num_parameters(trainer, settings),
    }


def _num_parameters(trainer: Trainer, settings: Settings) -> int:
    shared = sum(parameter.numel() for _, parameter in named(trainer.model, experts=False))
    return shared + settings.num_ranks * sum(parameter.numel() for _, parameter in named(trainer.model, experts=True))
