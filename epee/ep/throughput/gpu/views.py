"""The tensors over one slot, made once; what users get are aliases of them.

To make tensors over raw memory costs more than all else on the host's side of a call. So it is done once for each slot
and kind of tensor, over one storage, and a result is aliases of those. They share the storage, and with it the count
of its users: when nobody but these originals is left, the result has died. Nothing is called then; `Machine.take`
looks when it needs a slot.

Views that users make of a result, and what autograd saves of it, count as well, in whichever thread they are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_count_users: Callable[[int], int] = torch._C._storage_Use_Count


class SlotViews:
    """Tensors over a slot.

    Args:
        base: its bytes, as a tensor from which no other is made.
    """

    def __init__(self, base: torch.Tensor) -> None:
        self._base = base
        self._storage = base.untyped_storage()
        self._address: int = self._storage._cdata
        self._originals: dict[tuple[torch.dtype, int, tuple[int, int]], torch.Tensor] = {}
        self._num_others = _count_users(self._address)
        # All of Python has one object for a storage. It is one user, however many names users give it.
        self._num_names = sys.getrefcount(self._storage)

    def alias(self, at: tuple[torch.dtype, int, tuple[int, int]], num_rows: int) -> torch.Tensor:
        """Return the first `num_rows` rows of a matrix: its dtype, bytes from the slot's beginning, shape.

        It is a tensor of its own over the memory: no gradient finds its way into the original.
        """
        original = self._originals.get(at)
        if original is None:
            original = self._make(*at)
        alias = original.detach()
        return alias if num_rows == at[2][0] else alias.narrow(0, 0, num_rows)

    def is_idle(self) -> bool:
        """Tell whether all aliases have died."""
        num_own = self._num_others + len(self._originals)
        return _count_users(self._address) == num_own and sys.getrefcount(self._storage) == self._num_names

    def _make(self, dtype: torch.dtype, offset: int, shape: tuple[int, int]) -> torch.Tensor:
        assert offset + shape[0] * shape[1] * dtype.itemsize <= self._base.nbytes, (dtype, offset, shape)
        with torch.inference_mode(False), torch.no_grad():  # an original is not of the mode of its first user
            empty = torch.empty(0, dtype=dtype, device=self._base.device)
            place = offset // dtype.itemsize
            original = empty.set_(self._storage, place, shape, (shape[1], 1))
        self._originals[dtype, offset, shape] = original
        return original
