"""The engine: the ordered calls of one group of ranks. It knows neither torch's process groups nor experts.

`create_engine` makes a group with all its ranks, `join_engine` and `come_in` take this process into one that runs, and
`alone` makes an engine of one rank that may join later. An `EngineMeeting` makes one of processes that share a job
already and exchange the rest by themselves. The calls are methods of `Engine`. Beside the data types of calls
(`operation`, `plan`, `outbox`, `tensors`, `p2p`) this is all that the parts above need to make an engine.
"""

from .bootstrap.attempt import attempt
from .bootstrap.bounded_store import BoundedStore
from .bootstrap.creation import EngineOptions, close_at_exit, create_engine
from .bootstrap.group_note import Home, pack_home, parse_home
from .bootstrap.job_handle import meeting_place, own_job
from .bootstrap.joining import (
    Place,
    alone,
    come_in,
    find_place,
    is_newcomer,
    join_engine,
    joins_job,
    leave_note,
    place_of,
)
from .bootstrap.meeting import EngineMeeting
from .engine import Engine, LatestOfThread

__all__ = [
    "BoundedStore",
    "Engine",
    "EngineMeeting",
    "EngineOptions",
    "Home",
    "LatestOfThread",
    "Place",
    "alone",
    "attempt",
    "close_at_exit",
    "come_in",
    "create_engine",
    "find_place",
    "is_newcomer",
    "join_engine",
    "joins_job",
    "leave_note",
    "meeting_place",
    "own_job",
    "pack_home",
    "parse_home",
    "place_of",
]
