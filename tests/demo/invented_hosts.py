"""A rank of the demo on an invented host: as `epee.demo.rank`, over memory that all ranks share (`stand_in.py`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from epee.demo import rank as story
from epee.demo.launch import Send
from epee.demo.settings import Settings
from epee.ep import base
from epee.link.topology import Topology
from tests.hosts.stand_in import invent_hosts

run = story.run_rank


def run_rank(rank: int, send: Send, settings: Settings, folder: Path, joins: bool = False) -> None:
    """As `epee.demo.rank.run_rank`."""
    invent_hosts([settings.host_of(one) for one in range(settings.num_ranks)], length=128)

    def topology_of(group: Any, num_ranks: int) -> Topology | None:
        keys = [str(settings.host_of(member)) for member in dist.get_process_group_ranks(group)]
        return Topology(group.rank(), keys) if len(set(keys)) > 1 else None

    base.topology_of = topology_of  # type: ignore[assignment]
    story.env = SimpleNamespace(put=dict)  # type: ignore[assignment]
    run(rank, send, settings, folder, joins)
