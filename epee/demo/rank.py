"""The whole story of one rank: join, train, write a sample, prove the step, report.

Rank 0 sends what the parent shows and writes; the other ranks contribute through the process group and send nothing
but `done` or their error (see `launch.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import EvictedError
from .check import TOLERANCE, compare_one_step
from .group import gather, process_group
from .launch import Message, Send
from .machine import num_cores
from .model import named
from .sample import write
from .settings import Settings
from .setup import make_buffer, make_model
from .survive import SurvivingTrainer, backend_options
from .text import Text, split_text
from .traffic import FORMULA, bytes_per_link
from .train import Trainer


@dataclass(frozen=True)
class Job:
    """What a rank is given: the settings, the text as a file, the file through which the ranks meet.

    With `joins` it takes the place of a lost rank.
    """

    settings: Settings
    text_path: str
    store_path: str
    joins: bool = False


def run_rank(rank: int, job: Job, send: Send) -> None:
    """Train on one rank from start to end; rank 0 sends the result as a `result` message."""
    try:
        _run(rank, job, send)
    except EvictedError as exc:  # lost on purpose (`--stall`), and awake again: it has no part in this any more
        send({"kind": "event", "what": "evicted", "clock": time.perf_counter(), "step": 0, "told": str(exc)})


def _run(rank: int, job: Job, send: Send) -> None:
    settings = job.settings
    torch.set_num_threads(max(1, num_cores() // settings.num_ranks))
    text = split_text(bytearray(Path(job.text_path).read_bytes()))

    def phase(name: str) -> None:
        if rank == 0:
            send({"kind": "phase", "text": name})

    options = None if settings.victim is None else backend_options(settings, job.joins)
    with process_group(settings.backend, job.store_path, rank, settings.num_ranks, options) as group:
        with _trainer(rank, job, group, text, send) as trainer:
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


@contextmanager
def _trainer(rank: int, job: Job, group: dist.ProcessGroup, text: Text, send: Send) -> Iterator[Trainer]:
    """Make the trainer with its buffer, and close that in the end; collective."""
    settings = job.settings
    if settings.victim is None:
        with make_buffer(settings, group, torch.float32) as buffer:
            yield Trainer(rank, settings, make_model(settings, buffer, torch.float32), text, send)
    else:
        with closing(SurvivingTrainer(rank, settings, text, send, job.joins)) as trainer:
            yield trainer


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
    return {
        "began": trainer.began,
        "steps": trainer.history.steps,
        "valid": trainer.history.valid,
        "train_s": trainer.train_s,
        "tokens": trainer.num_tokens,
        "tokens_per_s": trainer.num_tokens / trainer.train_s,
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
