"""V1's handle: the six tensors of DeepEP's tuple, and what stands behind them.

A combine needs none of the six, so each is worked out when it is first read (`LateTuple`), by its closed form
(`shared/layout.py`), from what the epee handle keeps, from what the ranks told each other before the dispatch, and from
the caller's `is_token_in_rank`, which is kept as it is, no copy. Nothing here communicates; on GPUs the host does not
wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epee.compat.deep_ep.config import Config
from epee.compat.deep_ep.shared import layout
from epee.compat.deep_ep.shared.rows import filled_up
from epee.ep import Handle, Room, Wish

NUM_ENTRIES = 6


@dataclass(eq=False)
class V1Handle:
    """What stands behind a handle's tuple, and makes its entries.

    Attributes:
        room, handle: epee's own.
        num_worst_tokens: rows that the dispatch was asked to give, 0 for as many as came.
        wishes: of all ranks; where nobody was asked, as on GPUs, only this one's is known, and nothing is read of them.
        is_token_in_rank: as it was given.
        config: of the dispatch; its channels are those of the matrices.
        stream: the communication stream, where the dispatch was asked for an event.
    """

    room: Room
    handle: Handle
    num_worst_tokens: int
    wishes: Sequence[Wish]
    is_token_in_rank: torch.Tensor
    config: Config
    stream: torch.cuda.Stream | None

    @property
    def num_rows(self) -> int:
        """Rows that the dispatch's results have."""
        return self.num_worst_tokens or self.handle.num_recv

    def entry(self, idx: int) -> torch.Tensor:
        """Return an entry of DeepEP's tuple; where the dispatch ran on a stream of its own, it is worked out there."""
        if self.stream is None:
            for tensor in self.handle.tensors:
                if tensor is not None and tensor.is_cuda:  # it may be read on another stream than it was made on
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return _ENTRIES[idx](self)
        reader = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(reader)
        with torch.cuda.stream(self.stream):  # rows may have been copied out of their slot there
            made = _ENTRIES[idx](self)
        reader.wait_stream(self.stream)
        made.record_stream(reader)
        return made

    def _rank_prefix_matrix(self) -> torch.Tensor:
        counted = self.handle.received_up_to
        if counted is not None:
            return counted
        return layout.rank_prefix_matrix([wish.num_sent for wish in self.wishes], self.is_token_in_rank.device)

    def _channel_prefix_matrix(self) -> torch.Tensor:
        return layout.channel_prefix_matrix(self.is_token_in_rank, self.config.num_channels)

    def _recv_channel_prefix_matrix(self) -> torch.Tensor:
        received = self._rank_prefix_matrix()[:, self.room.core.rank].contiguous()
        num_tokens = self.handle.source_tokens
        if num_tokens is None:
            device = self.is_token_in_rank.device
            num_tokens = torch.tensor([wish.num_tokens for wish in self.wishes], dtype=torch.int64, device=device)
        most = self.room.num_tokens
        return layout.recv_channel_prefix_matrix(
            self.handle.src_token, received, num_tokens, most, self.config.num_channels
        )

    def _recv_src_idx(self) -> torch.Tensor:
        return filled_up(self.handle.src_token.to(torch.int32), self.num_rows, -1)

    def _is_token_in_rank(self) -> torch.Tensor:
        return self.is_token_in_rank

    def _send_head(self) -> torch.Tensor:
        return layout.send_head(self.is_token_in_rank, self.config.num_channels)


_ENTRIES: tuple[Any, ...] = (
    V1Handle._rank_prefix_matrix,
    V1Handle._channel_prefix_matrix,
    V1Handle._recv_channel_prefix_matrix,
    V1Handle._recv_src_idx,
    V1Handle._is_token_in_rank,
    V1Handle._send_head,
)
assert len(_ENTRIES) == NUM_ENTRIES
