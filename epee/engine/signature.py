"""The signature of a collective call: the parameters that all ranks must agree on, packed into one 64-bit word.

The word is not a hash: operation, dtype, reduce op, root and element count are fields of it, so a rank that sees a
different word can name the call that the other rank made. Every header in an outbox carries it (`outbox.py`), every
rank compares all of them, hence every rank raises the same `MismatchError`.

Layout, low to high: op 6 bits, dtype 6, reduce op 4, root 7 (0 = none, else root + 1), count 41.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidArgument

OPS: tuple[str, ...] = (
    "refused",
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "all_to_all",
    "barrier",
    "point_to_point",
    "rows of a buffer's call",
    "dispatch",
    "combine",
    "device_meeting",
    "sparse_all_reduce",
)
OP_CODE = {name: code for code, name in enumerate(OPS)}
REFUSED = OP_CODE["refused"]

DTYPE_NAMES: tuple[str, ...] = (
    "none",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)
DTYPE_CODE = {name: code for code, name in enumerate(DTYPE_NAMES)}

# The values of torch's RedOpType, which travel on the wire; index 9 stands for "no reduction".
REDUCE_OPS: tuple[str, ...] = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "none")
NO_REDUCE = 9

MAX_COUNT = (1 << 41) - 1


class Signature(NamedTuple):
    """A signature in words."""

    op: str
    dtype: str
    reduce_op: str
    root: int  # -1 = none
    num_elements: int

    def __str__(self) -> str:
        parts = []
        if self.reduce_op != "none":
            parts.append(self.reduce_op)
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.dtype != "none":
            parts.append(f"{self.num_elements} elements of {self.dtype}")
        return f"{self.op}({', '.join(parts)})"


def pack(op: int, dtype: int = 0, reduce_op: int = NO_REDUCE, root: int = -1, count: int = 0) -> int:
    """Return the signature word of a call; codes index the tables above.

    Raises:
        InvalidArgument: `count` does not fit (2.2e12 elements).
    """
    if count > MAX_COUNT:
        raise InvalidArgument(f"a call moves at most {MAX_COUNT} elements, got {count}; split the tensor")
    return op | dtype << 6 | reduce_op << 12 | (root + 1) << 16 | count << 23


def unpack(word: int) -> Signature:
    """Return the call that `word` stands for; codes that no version of ours writes are shown as numbers."""
    op, dtype, reduce_op = word & 63, word >> 6 & 63, word >> 12 & 15
    return Signature(
        OPS[op] if op < len(OPS) else f"operation {op}",
        DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else f"dtype {dtype}",
        REDUCE_OPS[reduce_op] if reduce_op < len(REDUCE_OPS) else f"reduce op {reduce_op}",
        (word >> 16 & 127) - 1,
        word >> 23,
    )
