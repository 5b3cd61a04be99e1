"""Additions of DeepEP 2.5: `EPBuffer`, an `ElasticBuffer` with other arguments; other buffers are not supported: each
constructor raises `UnsupportedError`, in one sentence.
"""

from typing import Any, ClassVar

from epee.compat.deep_ep.low_latency import unsupported
from epee.compat.deep_ep.v25 import comm
from epee.compat.deep_ep.v25.ep_buffer import EPBuffer


class _Absent:
    """A class whose constructor only raises the reason."""

    _why: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unsupported(type(self).__name__, self._why)


class BufferAllocator(_Absent):
    """Raises `UnsupportedError`: there are no redundant experts and no buckets to plan memory for."""

    _why = "epee's buffers hold no weights and no buckets to plan memory for; leave it out"


class BucketBuffer(_Absent):
    """Raises `UnsupportedError`: buckets are reduced by torch.distributed."""

    _why = "epee's buffers do not reduce buckets; use torch.distributed (the backend epee, or NCCL)"


class BucketSession(_Absent):
    """Raises `UnsupportedError`: as `BucketBuffer`."""

    _why = BucketBuffer._why


class EngramBuffer(_Absent):
    """Raises `UnsupportedError`: there is no remote storage."""

    _why = "epee has no remote storage; keep the table on each rank"


class PPBuffer(_Absent):
    """Raises `UnsupportedError`: messages between pipeline stages are calls of `ElasticBuffer`."""

    _why = "epee has these messages in ElasticBuffer; use its pp_set_config, pp_send and pp_recv"


__all__ = [
    "BucketBuffer",
    "BucketSession",
    "BufferAllocator",
    "EPBuffer",
    "EngramBuffer",
    "PPBuffer",
    "comm",
]
