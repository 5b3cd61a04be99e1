"""A `torch.distributed` backend for CPU tensors of ranks on one host or on several.

The main path in four files: `group.py` (the methods that torch calls), `collectives/arguments.py` (arguments to plans),
`engine/engine.py` (order, waiting), `engine/operation.py` (the protocol of a call). Memory is in `engine/outbox.py`,
point-to-point in `engine/p2p/channel.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..link.address import preferred_device, set_device_filter, set_host_ip
from ..link.topology import placement
from ..view.job import set_death_window
from .options import BackendOptions

__all__ = [
    "BackendOptions",
    "create",
    "placement",
    "preferred_device",
    "register",
    "set_death_window",
    "set_device_filter",
    "set_host_ip",
]


def register(name: str = "epee", creator: Any = None) -> None:
    """Make `init_process_group(name)` known to torch; idempotent, starts no thread and opens nothing."""
    if not dist.is_available() or name.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(name, creator or create, extended_api=True, devices=["cpu", "cuda"])


def create(dist_opts: Any, options: Any, default: Callable[[], BackendOptions] = BackendOptions) -> Any:
    """Make a group, called by torch with its own description of it and the user's `BackendOptions` or None.

    `default` makes the options if the user gave none; an error that it raises is reported to the other ranks.
    """
    from .group import ProcessGroup  # the data path is imported when a group is made, not at `import epee`

    return ProcessGroup(dist_opts, options, default)
