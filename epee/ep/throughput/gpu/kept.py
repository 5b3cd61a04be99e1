"""What a handle keeps of a rank-layout dispatch: where its rows came from, and their experts.

Both lie in the result's slot, written by the senders. A handle may outlive the slot, but most handles are never asked,
so nothing is copied until somebody asks or the slot is about to be used again: `Machine.take` calls `keep` then. A
graph owns its slot, and each replay writes it anew, so there the view is handed out itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class KeptRows:
    """Source tokens and experts of one dispatch's rows.

    Args:
        words: the slot as int64.
        places: where in it `topk_idx` (None without top-k routing) and `src_token` begin.
        shape: rows of the result, top-k.
        readers: raw streams that the slot's next user waits for; who copies on another one is added.
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

    def _views(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        (first, source), (rows, num_topk) = self._places, self._shape
        topk_idx = None if first is None else self._words[first : first + rows * num_topk].view(rows, num_topk)
        return topk_idx, self._words[source : source + rows]
