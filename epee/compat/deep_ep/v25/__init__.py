"""Additions of DeepEP 2.5: `EPBuffer`, an `ElasticBuffer` with other arguments; other buffers are not supported."""

from epee.compat.deep_ep.v25 import comm
from epee.compat.deep_ep.v25.absent import (
    BucketBuffer,
    BucketSession,
    BufferAllocator,
    EngramBuffer,
    PPBuffer,
)
from epee.compat.deep_ep.v25.ep_buffer import EPBuffer

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "BufferAllocator",
    "EPBuffer",
    "EngramBuffer",
    "PPBuffer",
    "comm",
]
