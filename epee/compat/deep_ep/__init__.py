"""DeepEP's Python interface on epee: import this package under the name `deep_ep` and scripts written for it run.

    import epee.compat.deep_ep as deep_ep          # in the script itself
    epee.compat.deep_ep.install_as_deep_ep()       # or before code that says `import deep_ep`
    python -m epee.compat --deep-ep -- CMD ...     # or for all processes below a command

Names, signatures, tuples and their order are those of DeepEP 2.1 (V1 `Buffer`, V2 `ElasticBuffer`), of its branch
hybrid-ep (`HybridEPBuffer`) and of 2.5 (`EPBuffer`); docs/deep_ep.md lists for each name whether it works, is ignored
or does not exist. Modules in here import each other by their full name, so that classes are the same whichever name the
package was imported under.
"""

from __future__ import annotations

import torch

from epee.compat.deep_ep import utils
from epee.compat.deep_ep.buffer import Buffer
from epee.compat.deep_ep.config import Config
from epee.compat.deep_ep.domain import get_logical_domain_size, get_physical_domain_size
from epee.compat.deep_ep.elastic import ElasticBuffer
from epee.compat.deep_ep.ep_handle import EPHandle
from epee.compat.deep_ep.event import EventHandle, EventOverlap
from epee.compat.deep_ep.hybrid import HybridEPBuffer
from epee.compat.deep_ep.v25 import (
    BucketBuffer,
    BucketSession,
    BufferAllocator,
    EngramBuffer,
    EPBuffer,
    PPBuffer,
    comm,
)
from epee.compat.names import take_place

__version__ = "2.1.0"  # of the interface

topk_idx_t = torch.int64


def install_as_deep_ep() -> None:
    """Let `import deep_ep` (its submodules, and `deep_ep_cpp`) find this package in this process.

    Raises:
        InvalidState: another `deep_ep` has been imported already.
    """
    take_place("deep_ep")
    take_place("deep_ep_cpp")


__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "comm",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install_as_deep_ep",
    "topk_idx_t",
    "utils",
]
