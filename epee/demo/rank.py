"""The program of one rank: join, train, prove the step, report.

Rank 0 sends what the parent shows and writes; the other ranks contribute through the process group and send only how
they ended (see `launch.py`).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .. import env
from ..memory.signals import usable_cores
from .check import compare_one_step
from .launch import Send
from .networks import enter
from .settings import TIMEOUT_S, Settings
from .survive import Survivor, backend_options
from .train import Trainer


def run_rank(rank: int, send: Send, settings: Settings, folder: Path, joins: bool = False) -> None:
    """Train on one rank; rank 0 sends the result. `folder` has the text, and the files of the rendezvous.

    With `joins` it replaces a lost rank.
    """
    if settings.num_hosts > 1:
        host = settings.host_of(rank)
        env.put(EPEE_TEST="1", EPEE_HOST_KEY=f"demo {host}", EPEE_HOST_IP=enter(host, folder))
    torch.set_num_threads(max(1, len(usable_cores()) // settings.num_ranks))
    dist.init_process_group(
        "epee",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=settings.num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
        pg_options=None if not settings.victims else backend_options(settings, joins),
    )
    trainer = Trainer(rank, settings, (folder / "text").read_bytes(), send)
    if not settings.victims:
        while trainer.progress < 1.0:
            trainer.step()
    elif not Survivor(trainer, folder / "state.npz", joins).train():
        return  # lost on purpose (`--stall`), and running once more: it takes no part any more
    with trainer.buffer:
        result = {
            "kind": "result",
            "steps": trainer.steps,
            "valid": trainer.validate(),
            "rows_per_expert": trainer.rows_per_expert(),
            "tokens": trainer.num_tokens,
            "bytes_per_link": trainer.traffic,
            "bytes_between_hosts": trainer.network,
            "check": compare_one_step(trainer),
        }
    if rank == 0:
        send(result)
    dist.destroy_process_group()  # on a normal end only: it waits for the peers
