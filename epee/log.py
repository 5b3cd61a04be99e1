"""The one tree of loggers, below `epee`, and the switch that shows it: EPEE_LOG=info or debug.

A program that configures logging itself gets epee's records through the logger `epee`, like any other's. With EPEE_LOG
they are written to stderr, each with its time, rank and process, and to no other handler.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from . import env

_FORMAT = "%(asctime)s epee[rank %(rank)s, pid %(process)d] %(levelname)s %(name)s: %(message)s"


class _Ranked(logging.Filter):
    """Adds this process's rank in the default process group, "-" before there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        record.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else "-"
        return True


def configure() -> None:
    """Show the records of the level that EPEE_LOG names; do nothing where it is not set. Repeating it is harmless.

    Raises:
        InvalidArgument: EPEE_LOG names no level.
    """
    level = env.get("EPEE_LOG")
    logger = logging.getLogger("epee")
    if not level or any(isinstance(each, _Ranked) for handler in logger.handlers for each in handler.filters):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_Ranked())
    logger.addHandler(handler)
    logger.setLevel(str(level).upper())
    logger.propagate = False
