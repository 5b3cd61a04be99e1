"""epee: communication for Mixture-of-Experts models in PyTorch.

`Buffer` sends each token to the ranks that own its experts and brings the results back. `epee.nn` has the same as
differentiable functions and a whole MoE layer. Importing epee creates no CUDA context, starts no thread and opens no
socket.
"""

from __future__ import annotations

from . import errors, nn
from .backend import BackendOptions
from .backend import register as _register
from .ep import Buffer, Combined, Dispatched, Handle, LatencyBuffer
from .errors import (
    AbortedError,
    AuthError,
    CommTimeoutError,
    CompileError,
    EpeeError,
    EvictedError,
    ForkError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    NoQuorumError,
    PeerError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    SlotTakenError,
    StaleHandleError,
    UnsupportedError,
)
from .log import configure as _configure_log

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "AuthError",
    "BackendOptions",
    "Buffer",
    "Combined",
    "CommTimeoutError",
    "CompileError",
    "Dispatched",
    "EpeeError",
    "EvictedError",
    "ForkError",
    "Handle",
    "InvalidArgument",
    "InvalidState",
    "LatencyBuffer",
    "MismatchError",
    "NoQuorumError",
    "PeerError",
    "ProtocolError",
    "RankFailedError",
    "ResourceError",
    "SlotTakenError",
    "StaleHandleError",
    "UnsupportedError",
    "__version__",
    "errors",
    "nn",
]

_configure_log()
_register()
