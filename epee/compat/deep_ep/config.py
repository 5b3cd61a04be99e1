"""DeepEP V1's tuning numbers. epee has no rings to tune: they are checked, kept, and give the number of channels."""

from __future__ import annotations

from epee.compat.deep_ep.shared.layout import align_up
from epee.ep import memory_for, network_bytes
from epee.errors import InvalidArgument
from epee.values import is_whole, shown

_MOST = (1 << 31) - 1
_HINT_TOKENS = 4096  # tokens of a rank, which are no argument of V1's size hint
_ALIGN = 128
_RANKS_PER_HOST = 8  # DeepEP's assumption, as its hint has no argument for it
# (nvl send, nvl recv, rdma send, rdma recv); other numbers of ranks use those of 8
_DISPATCH = {2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128)}
_COMBINE = {2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128)}


class Config:
    """SMs and chunk sizes of a call.

    Args:
        num_sms: SMs; a channel of the V1 handle is two of them.
        num_max_nvl_chunked_send_tokens: rows that DeepEP sends at once; unused here, like the next three.
        num_max_nvl_chunked_recv_tokens: cells of DeepEP's rings.
        num_max_rdma_chunked_send_tokens: likewise between hosts.
        num_max_rdma_chunked_recv_tokens: likewise; rounded up to a multiple of the former.

    Raises:
        InvalidArgument: the numbers break DeepEP's rules.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        given = (*vars(self).items(), ("num_max_rdma_chunked_recv_tokens", num_max_rdma_chunked_recv_tokens))
        for name, value in given:
            if not is_whole(value, 1, _MOST):
                raise InvalidArgument(f"{name} must be a number from 1 to {_MOST}, got {shown(value)}")
        if num_max_nvl_chunked_send_tokens >= num_max_nvl_chunked_recv_tokens:
            raise InvalidArgument(
                "num_max_nvl_chunked_send_tokens must be below num_max_nvl_chunked_recv_tokens, got "
                f"{num_max_nvl_chunked_send_tokens} and {num_max_nvl_chunked_recv_tokens}"
            )
        recv = align_up(num_max_rdma_chunked_recv_tokens, num_max_rdma_chunked_send_tokens)
        if num_max_rdma_chunked_send_tokens > recv // 2:
            raise InvalidArgument(
                "num_max_rdma_chunked_send_tokens must be at most half of num_max_rdma_chunked_recv_tokens, got "
                f"{num_max_rdma_chunked_send_tokens} and {num_max_rdma_chunked_recv_tokens}"
            )
        self.num_max_rdma_chunked_recv_tokens = recv

    @property
    def num_channels(self) -> int:
        """Columns of the handle's channel matrices."""
        return max(1, self.num_sms // 2)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of GPU memory for calls of 4096 tokens of each rank; a multiple of 128.

        Args:
            hidden_bytes: of a row, bfloat16 or wider.
            num_ranks: of the group.
        """
        return align_up(memory_for(num_ranks, _HINT_TOKENS, -(-hidden_bytes // 16) * 8, 0).slots, _ALIGN)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes that a rank stages for calls of 4096 tokens between hosts of 8 ranks; a multiple of 128.

        0 for up to 8 ranks, as in DeepEP. Nothing is bounded by it: buffers over hosts stage what their calls need.

        Args:
            hidden_bytes: of a row, bfloat16 or wider.
            num_ranks: of the group.
        """
        num_hosts = -(-num_ranks // _RANKS_PER_HOST)
        if num_hosts == 1:
            return 0
        return align_up(network_bytes(num_ranks, num_hosts, _HINT_TOKENS, -(-hidden_bytes // 16) * 8), _ALIGN)


def check_config(config: object) -> None:
    """Raise `InvalidArgument` unless it is a `Config`."""
    if not isinstance(config, Config):
        raise InvalidArgument(
            f"config must be a Config, as of get_dispatch_config and get_combine_config, got {type(config).__name__}"
        )


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """Return DeepEP's numbers for dispatch; any number of ranks."""
    return Config(num_sms, *_DISPATCH.get(num_ranks, _DISPATCH[8]))


def combine_config(num_ranks: int, num_sms: int) -> Config:
    """Return DeepEP's numbers for combine; any number of ranks."""
    return Config(num_sms, *_COMBINE.get(num_ranks, _COMBINE[8]))
