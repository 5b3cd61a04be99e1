"""V1's handle: the six tensors of DeepEP's tuple, over several hosts ten, and the data from which they are made.

A combine needs none of them, so each is computed when it is first read (`LateTuple`), by its closed form
(`shared/layout.py`, `shared/host_layout.py`), from the epee handle, from the sizes that the ranks exchanged before the
dispatch, and from the caller's `is_token_in_rank`, which is kept itself, without a copy. Nothing here communicates, so
one rank may read them alone; on GPUs the cpu does not wait.

On one host, with N tokens, R ranks, M received rows and C = `num_sms / 2` channels of `ceil(N / C)` consecutive tokens:

    0 rank_prefix_matrix             [R, R] int32   rows that rank r gets from ranks 0 ... i
    1 channel_prefix_matrix          [R, C] int32   tokens that this rank sends to rank r in channels 0 ... c
    2 recv_channel_prefix_matrix     [R, C] int32   rows from rank s that lie before its channel c
    3 recv_src_idx                   [M] int32      source token of each row, -1 in the tail
    4 is_token_in_rank               [N, R] bool    as given
    5 send_head                      [N, R] int32   a token's position among those of its channel for rank r, or -1

Over H hosts, where n are the ranks of this host and this rank forwards P records (a record is a token on its way to one
host: those of its own tokens for its own host, and those of the remote ranks whose gateway it is):

    0 is_token_in_rank               [N, R] bool    as given, in a tensor of its own over the same memory
    1 rdma_channel_prefix_matrix     [H, C] int32   tokens that this rank sends to host h in channels 0 ... c
    2 gbl_channel_prefix_matrix      [R, C] int32   tokens that this rank sends to rank r in channels 0 ... c
    3 recv_rdma_channel_prefix_matrix  [H, C] int32  records that this rank forwards from host h's channels 0 ... c
    4 recv_rdma_rank_prefix_sum      [H] int32      records that it forwards from hosts 0 ... h
    5 recv_gbl_channel_prefix_matrix [R, C] int32   the first row of rank s's channel c
    6 recv_gbl_rank_prefix_sum       [R] int32      rows from ranks 0 ... s
    7 recv_src_meta                  [M, 8] uint8   two int32 of each row: the host of its source, and a bit for each
                                                    position on this host that got the token; 0xFF in the tail
    8 send_rdma_head                 [N, H] int32   a token's position among those of its channel for host h, or -1
    9 send_nvl_head                  [P, n] int32   by (host, channel, source, token): a record's position among those
                                                    of its host and channel for the rank at position j, or -1

Channels of a source are those of its own number of tokens, all ranks with the C of the reader's call; DeepEP's width of
entry 9 is always 8. Entries are made on the stream that is current when they are read, behind the call if it was asked
for an event. Read while a graph is recorded they are the graph's, and new at each replay; read later they are those of
the last replay. What is written into `is_token_in_rank` shows in entries 1 and 5 (over several hosts 1, 2 and 8) that
are read later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epee.compat.deep_ep.config import Config
from epee.compat.deep_ep.shared import host_layout, layout
from epee.compat.deep_ep.shared.rows import filled_up
from epee.ep import CpuHandle, Handle, Room, Wish

_NO_META = 0xFF  # in each byte of rows that no rank sent


@dataclass(eq=False)
class V1Handle:
    """The data of a handle's tuple; makes its entries.

    Attributes:
        room, handle: epee's own.
        num_worst_tokens: rows that the dispatch was asked to give, 0 for the received number.
        wishes: requests of all ranks; without an exchange, as on GPUs, only this one's is known, and nothing is read of
            them.
        is_token_in_rank: as it was given.
        config: of the dispatch; its channels are those of the matrices.
        stream: the communication stream, if the dispatch returned an event.
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
        """Rows of the dispatch's results."""
        return self.num_worst_tokens or self.handle.num_recv

    def entry(self, idx: int) -> torch.Tensor:
        """Return an entry of DeepEP's tuple; if the dispatch ran on a stream of its own, it is computed there."""
        entries = _ENTRIES_OVER_HOSTS if self.handle.num_sent_to_hosts else _ENTRIES
        if self.stream is None:
            for tensor in self.handle.tensors:
                if tensor is not None and tensor.is_cuda:  # it may be read on another stream than it was made on
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            return entries[idx](self)
        reader = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(reader)
        with torch.cuda.stream(self.stream):  # rows may have been copied out of their slot there
            made = entries[idx](self)
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

    # ---- over several hosts

    @property
    def _over_hosts(self) -> CpuHandle:
        assert isinstance(self.handle, CpuHandle)
        return self.handle

    @property
    def _in_hosts(self) -> torch.Tensor:
        return host_layout.in_hosts(self.is_token_in_rank, self._over_hosts.by_host.topology.hosts)

    def _own_is_token_in_rank(self) -> torch.Tensor:
        return self.is_token_in_rank.detach()  # the first entry of a handle is of this handle alone (`KnownHandles`)

    def _rdma_channel_prefix_matrix(self) -> torch.Tensor:
        return layout.channel_prefix_matrix(self._in_hosts, self.config.num_channels)

    def _recv_rdma_channel_prefix_matrix(self) -> torch.Tensor:
        return host_layout.num_relayed(self._over_hosts, self.config.num_channels)

    def _recv_rdma_rank_prefix_sum(self) -> torch.Tensor:
        return host_layout.relayed_up_to(self._over_hosts)

    def _recv_gbl_channel_prefix_matrix(self) -> torch.Tensor:
        return host_layout.first_rows(self._over_hosts, self.config.num_channels)

    def _recv_gbl_rank_prefix_sum(self) -> torch.Tensor:
        return host_layout.received_up_to(self._over_hosts)

    def _recv_src_meta(self) -> torch.Tensor:
        return filled_up(host_layout.source_meta(self._over_hosts), self.num_rows, _NO_META)

    def _send_rdma_head(self) -> torch.Tensor:
        return layout.send_head(self._in_hosts, self.config.num_channels)

    def _send_nvl_head(self) -> torch.Tensor:
        return host_layout.relay_head(self._over_hosts, self.config.num_channels)


_ENTRIES: tuple[Any, ...] = (
    V1Handle._rank_prefix_matrix,
    V1Handle._channel_prefix_matrix,
    V1Handle._recv_channel_prefix_matrix,
    V1Handle._recv_src_idx,
    V1Handle._is_token_in_rank,
    V1Handle._send_head,
)
_ENTRIES_OVER_HOSTS: tuple[Any, ...] = (
    V1Handle._own_is_token_in_rank,
    V1Handle._rdma_channel_prefix_matrix,
    V1Handle._channel_prefix_matrix,  # DeepEP's gbl_channel_prefix_matrix
    V1Handle._recv_rdma_channel_prefix_matrix,
    V1Handle._recv_rdma_rank_prefix_sum,
    V1Handle._recv_gbl_channel_prefix_matrix,
    V1Handle._recv_gbl_rank_prefix_sum,
    V1Handle._recv_src_meta,
    V1Handle._send_rdma_head,
    V1Handle._send_nvl_head,
)


def num_entries(num_hosts: int) -> int:
    """Return the entries of the handles of a buffer."""
    return len(_ENTRIES if num_hosts == 1 else _ENTRIES_OVER_HOSTS)
