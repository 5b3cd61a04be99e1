"""The signature of a call: a few bits that every rank sends along and all ranks compare.

The bits are fields, not a hash, so that a rank that receives other bits than its own can report which field differs. A
dispatch has two words of 32 bits, a combine has 16 bits. The first word of a dispatch names the handle of a cached
call, or else the shape: the sizes that determine the fields of a slot, the number of counts that are sent, and the
capacity. Only that word is a hash. Neither a cached dispatch nor a combine sends its shape: its handle implies it, as
all ranks had one shape when the handle was made. The kernels add the handle in use, as the number of the dispatch that
made it, and which calls have failed: kernels count all calls, the cpu does not see those of graphs.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from .params import COMBINE_FACT_BITS
from .payload import DTYPE_CODES, LAYOUTS

SCALE_KINDS = {None: 0, torch.float32: 1, torch.int32: 2}
_CALL = "the handle in use (number of the dispatch that made it, 0 where a call brings its routing)"
_SHAPE = (
    "the shape or the capacity (a number made of hidden, num_experts, num_topk, max_tokens_per_rank, dtype, the rows "
    "that there is room for, and capacity)"
)
_WEIGHTS = "topk_weights (1 with, 0 without)"
# (name of the field for users, bits), from the lowest bit on
_DISPATCH_FIELDS = (
    ("layout", 1),
    ("expert_alignment", 13),
    ("dtype", 3),
    ("the width of the FP8 scales", 10),
    ("the dtype of the FP8 scales (0 none, 1 float32, 2 packed int32)", 2),
    ("routing by topk_idx (1) or otherwise (0)", 1),
    (_WEIGHTS, 1),
)
_COMBINE_FACTS = (
    ("layout", 1),
    ("dtype", 3),
    (_WEIGHTS, 1),
    ("the order of the additions (1 another library's, 0 epee's)", 1),
    ("the memory that expert-layout rows are pulled from (0 in the rank layout; record the graph again)", 3),
)
_LOSS_BITS = 2  # the highest; the kernels store there which calls have failed before
_COMBINE_FIELDS = (*_COMBINE_FACTS, (_CALL, 16 - COMBINE_FACT_BITS))
_SHAPE_BIT = 1 << 31  # distinguishes a shape from the number of a handle
# The word that differs, in kernels' reports; other values: a combine's.
WHERE_CALL, WHERE_FACTS, WHERE_LOSSES = range(3)


def shape_signature(*sizes: int) -> int:
    """Return the first word of a dispatch without a handle: 31 bits made of all sizes of its shape, capacity last."""
    text = ",".join(map(str, sizes)).encode()
    return _SHAPE_BIT | int.from_bytes(hashlib.sha256(text).digest()[:4], "little")


@lru_cache(maxsize=1024)
def dispatch_signature(
    layout: str,
    expert_alignment: int,
    dtype: torch.dtype,
    num_scales: int,
    scale_dtype: torch.dtype | None,
    has_topk: bool,
    has_weights: bool,
) -> int:
    """Return the second word of a dispatch."""
    checked = (
        LAYOUTS.index(layout),
        expert_alignment,
        DTYPE_CODES.index(dtype),
        num_scales,
        SCALE_KINDS[scale_dtype],
        int(has_topk),
        int(has_weights),
    )
    return _pack(_DISPATCH_FIELDS, checked)


@lru_cache(maxsize=1024)
def combine_signature(layout: str, dtype: torch.dtype, has_weights: bool, is_ordered: bool, place: int) -> int:
    """Return the bits of a combine without its handle's; of `place`, a number, they hold the lowest 3."""
    kind = LAYOUTS.index(layout), DTYPE_CODES.index(dtype)
    return _pack(_COMBINE_FACTS, (*kind, int(has_weights), int(is_ordered), place & 7))


def describe_difference(where: int, mine: int, other: int) -> tuple[str, str, str]:
    """Return the first difference between two words, and both values, in the user's terms."""
    if where == WHERE_CALL and mine & other & _SHAPE_BIT:
        return _SHAPE, str(mine ^ _SHAPE_BIT), str(other ^ _SHAPE_BIT)
    if where == WHERE_CALL:
        first, second = (0 if word & _SHAPE_BIT else word for word in (mine, other))
        return _CALL, str(first), str(second)
    for name, bits in _DISPATCH_FIELDS if where == WHERE_FACTS else _COMBINE_FIELDS:
        first, second = mine & (1 << bits) - 1, other & (1 << bits) - 1
        if first != second:
            return name, _words(name, first), _words(name, second)
        mine, other = mine >> bits, other >> bits
    return "something", str(mine), str(other)


def is_of_losses(where: int, mine: int, other: int) -> bool:
    """Whether two words differ in which calls have failed before; of a combine, whether in nothing else."""
    if where in (WHERE_CALL, WHERE_FACTS):
        return False
    return where == WHERE_LOSSES or (mine ^ other) & ((1 << 16 - _LOSS_BITS) - 1) == 0


def _pack(fields: tuple[tuple[str, int], ...], checked: tuple[int, ...]) -> int:
    word = at = 0
    for (name, bits), fact in zip(fields, checked, strict=True):
        assert 0 <= fact < 1 << bits, (name, fact)
        word |= fact << at
        at += bits
    return word


def _words(name: str, value: int) -> str:
    if name == "dtype":
        return str(DTYPE_CODES[value]) if value < len(DTYPE_CODES) else f"unknown dtype {value}"
    return repr(LAYOUTS[value]) if name == "layout" else str(value)
