"""The tensors over the slots of results, and the data that their handles may be asked for later.

Making tensors over raw memory is the most expensive part of a call on the CPU. So it is done once for each slot and
kind of tensor, over one storage, and the tensors of a result are aliases of those. They share the storage, and with it
the count of its users: when only these originals are left, the result has died. Nothing is called then; `Machine.take`
checks when it needs a slot.

Views that users make of a result, and what autograd saves of it, count as well, in whichever thread they are made.

A handle of a rank-layout dispatch refers to the sources of its rows, and their experts. Both lie in the result's slot,
written by the senders. A handle may outlive the slot, but most handles are never asked for them, so nothing is copied
until they are read or the slot is about to be used again: `Machine.take` calls `keep` then. A graph owns its slot, and
each replay writes it anew, so there the view is returned itself.

A slot serves calls of several shapes in alternation. The offsets of a slot's fields are passed in once, and no object
here depends on the shape in use later.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch

from ....memory.fresh import first_rows
from ....torch_private import count_storage_users

_MOST_ORIGINALS = 256  # of a slot: callers may bring new shapes all the time
# The location of a matrix in a slot: its dtype, bytes from the slot's beginning, rows and columns.
FieldAt: TypeAlias = "tuple[torch.dtype, int, tuple[int, int]]"


class SlotViews:
    """Tensors over a slot.

    Args:
        base: its bytes, as a tensor from which no other is made.
        words: the same as int64, over another storage: its users do not count.

    Attributes:
        words: as the argument.
        kept: what the handle of the slot's last result may be asked for; None if nothing is to be saved.
    """

    def __init__(self, base: torch.Tensor, words: torch.Tensor) -> None:
        self.words = words
        self.kept: weakref.ref[KeptRows] | None = None
        self._base = base
        self._storage = base.untyped_storage()
        self._address: int = self._storage._cdata
        self._originals: dict[FieldAt, torch.Tensor] = {}
        self._num_others = count_storage_users(self._address)
        # All of Python has one object for a storage. It is one user, however many names refer to it.
        self._num_names = sys.getrefcount(self._storage)

    def alias(self, at: FieldAt, num_rows: int) -> torch.Tensor:
        """Return the first `num_rows` rows of a matrix in the slot.

        It is a tensor of its own over the memory: no gradient reaches the original.
        """
        original = self._originals.get(at)
        if original is None:
            original = self._make(*at)
        return first_rows(original, at[2], num_rows)

    def is_idle(self) -> bool:
        """Return whether all aliases have died."""
        num_own = self._num_others + len(self._originals)
        return count_storage_users(self._address) == num_own and sys.getrefcount(self._storage) == self._num_names

    def _make(self, dtype: torch.dtype, offset: int, shape: tuple[int, int]) -> torch.Tensor:
        assert offset + shape[0] * shape[1] * dtype.itemsize <= self._base.nbytes, (dtype, offset, shape)
        with torch.inference_mode(False), torch.no_grad():  # an original is not of the mode of its first user
            empty = torch.empty(0, dtype=dtype, device=self._base.device)
            place = offset // dtype.itemsize
            original = empty.set_(self._storage, place, shape, (shape[1], 1))
        if len(self._originals) >= _MOST_ORIGINALS:
            self._originals.clear()  # those whose aliases live keep their own storage counted
        self._originals[dtype, offset, shape] = original
        return original


class KeptRows:
    """Source tokens and experts of one dispatch's rows.

    Args:
        words: the slot as int64.
        places: the offsets in it of `topk_idx` (None without top-k routing) and `src_token`.
        shape: rows of the result, top-k.
        readers: raw streams that the slot's next user waits for; a stream that copies is added.
        current_stream: returns the current raw stream; None in a graph.
    """

    __slots__ = ("__weakref__", "_copies", "_current_stream", "_places", "_readers", "_shape", "_words")

    def __init__(
        self,
        words: torch.Tensor,
        places: tuple[int | None, int],
        shape: tuple[int, int],
        readers: list[int],
        current_stream: Callable[[], int] | None,
    ) -> None:
        self._words = words
        self._places = places
        self._shape = shape
        self._readers = readers
        self._current_stream = current_stream
        self._copies: tuple[torch.Tensor | None, torch.Tensor] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the slot may be written again without loss."""
        return self._copies is not None

    def keep(self) -> None:
        """Copy both out of the slot, on the current stream, unless that has been done or a graph owns the slot."""
        if self._copies is None and self._current_stream is not None:
            stream = self._current_stream()
            if stream not in self._readers:
                self._readers.append(stream)
            topk_idx, src_token = self._views()
            self._copies = None if topk_idx is None else topk_idx.clone(), src_token.clone()

    @property
    def src_token(self) -> torch.Tensor:
        """`[num_rows]` int64: the token's number on its rank."""
        self.keep()
        return (self._copies or self._views())[1]

    @property
    def topk_idx(self) -> torch.Tensor | None:
        """`[num_rows, num_topk]` int64, local ids or -1; None without top-k routing."""
        self.keep()
        return (self._copies or self._views())[0]

    def peek_topk_idx(self) -> torch.Tensor | None:
        """Return `topk_idx` for work that is put on the current stream before the next call: not copied for that."""
        if self._copies is None and self._current_stream is not None:
            stream = self._current_stream()
            if stream not in self._readers:
                self._readers.append(stream)
        return (self._copies or self._views())[0]

    def _views(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        (first, source), (rows, num_topk) = self._places, self._shape
        topk_idx = None if first is None else self._words[first : first + rows * num_topk].view(rows, num_topk)
        return topk_idx, self._words[source : source + rows]
