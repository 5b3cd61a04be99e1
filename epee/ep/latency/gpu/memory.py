"""The memory that a rank lends for latency calls, and what it maps of the others: regions, and the words in them.

Data path: none; kernels store rows and words into these regions (`csrc/kernels/latency/call.cuh` documents who writes
what, and when). The CPU writes the addresses of the others' regions, the members, and the number from which calls
count.

Protocol: an agreed view is entered in two steps. `set_view` makes this rank unreachable for all others and clears what
was stored; once all members have done so, `open_view` lets calls reach the others again. No call of the view is made
before that.

A crash of a peer leaves its region mapped, and its words as they were; a process that replaces it lends another one
(`attach_peer`, `replace_peer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....arrays import plain_tensors
from ....errors import InvalidArgument
from ....gpu.lent import AllGather
from ....gpu.params import MAX_RANKS
from ....gpu.platform import LentRegion, Platform
from .half import OPS
from .shapes import LatencyConfig

# Words that peers write: their type, and their value for a call, of whose number `low` is the low half.
_WORDS: dict[str, tuple[torch.dtype, Callable[[int, int], int]]] = {
    "heads": (torch.int64, lambda tag, low: low << 32),
    "weights": (torch.int64, lambda tag, low: low << 32),
    "flags": (torch.int64, lambda tag, low: tag),
    "packets": (torch.int32, lambda tag, low: low),
}
_WORDS_OF_PEERS = {
    f"{op}_{part}": how for op in OPS.values() for part, how in _WORDS.items() if (op, part) != ("dispatch", "weights")
}


class LatencyMemory:
    """The memory of one rank. One thread at a time.

    Args:
        platform: the GPU.
        config: sizes, equal on all ranks.
        all_gather: returns the bytes of all ranks in rank order, b"" for ranks to be attached later (`replace_peer`);
            called at construction.

    Attributes:
        active_ranks: `[num_ranks]` int32 on the device, the mask of calls that bring none.
        address: of what this rank lends.
        nbytes: of it.
    """

    def __init__(self, platform: Platform, config: LatencyConfig, all_gather: AllGather) -> None:
        self.config, self.platform = config, platform
        with plain_tensors():
            self.active_ranks = torch.ones(config.num_ranks, dtype=torch.int32, device=platform.device)
        self._own: LentRegion = platform.create(config.region_layout.nbytes)
        self.address, self.nbytes = self._own.address, self._own.nbytes
        self._peers: list[LentRegion | None] = self._attach(all_gather)
        self._write_peers()
        self._agreed: tuple[list[bool], int] = [True] * config.num_ranks, 0  # members, the last call's number
        self._is_open = True  # whether calls reach the others in that view

    def tags(self) -> int:
        """Return the highest call number that this rank has used; waits for the GPU."""
        self.platform.synchronize()
        return max(int(self._words(name).max()) for name in ("dispatch_tags", "combine_tags"))

    def set_view(self, active: Sequence[bool], tag: int) -> None:
        """Prepare for an agreed view: every member calls this with equal arguments, and `open_view` before its calls.

        Until then a call, which only a graph can make, reaches no other rank: it ends at once, without them. No rank
        makes a call of the view before all members are ready; stores of earlier calls meanwhile have no effect.

        Args:
            active: the members.
            tag: above all ranks' `tags()`, so that nothing of earlier calls passes for new.
        """
        self.platform.synchronize()
        self._agreed, self._is_open = ([bool(one) for one in active], tag), False
        self._write_words("peers", [self._own.address * (rank == self.config.rank) for rank in range(MAX_RANKS)])
        for rank in range(self.config.num_ranks):
            self._note_calls(rank, tag)
        self._count_from(tag)
        self.platform.synchronize()

    def open_view(self) -> None:
        """Let calls reach the others' memory in the view that was set last, from its number on.

        Replays meanwhile have used the numbers of the view's calls, and have stored them where no other rank writes.
        """
        if self._is_open:
            return  # replays since then are calls
        self.platform.synchronize()
        active, tag = self._agreed
        self._note_calls(self.config.rank, tag)
        self._count_from(tag)
        self.active_ranks.copy_(torch.tensor(active, dtype=torch.int32, device="cpu"))
        self._write_peers()
        self.platform.synchronize()
        self._is_open = True

    def _count_from(self, tag: int) -> None:
        """Set call `tag` as the last one of this rank, in which all others have taken part."""
        for op in OPS.values():
            self._write_words(f"{op}_tags", [tag, tag])
            self._write_words(f"{op}_heard", [tag] * self.config.num_ranks)
        self._write_words("news", [0, 0, 0])  # a dead rank may have a successor
        self._write_words("reported", [0, 0])

    def _note_calls(self, rank: int, tag: int) -> None:
        """Set all words that a process of `rank` has stored here to those of call `tag`, which no call uses.

        So none passes for one of a later call, neither the words of its previous process nor words so old that the 32
        bits of their number wrap around. Rows stay: they are not read without their flag.
        """
        low = _signed(tag & 0xFFFFFFFF, 32)
        layout = self.config.region_layout
        for name, (dtype, word) in _WORDS_OF_PEERS.items():
            field = layout[name]
            if field.nbytes:
                words = self._own.lease(layout.offset(name), field.nbytes, None).view(dtype)
                words.view(field.shape[0], field.shape[1], -1)[:, rank].fill_(word(tag, low))

    @property
    def blob(self) -> bytes:
        """The blob with which a replaced peer attaches this rank's region."""
        return self._own.blob

    def attach_peer(self, blob: bytes) -> LentRegion:
        """Map the region of a process that replaces a rank; no call uses it before `replace_peer`.

        Raises:
            InvalidArgument: it has another size; and as `CudaRegion.attach`.
        """
        region = self.platform.attach(blob)
        if region.nbytes != self.nbytes:
            size = region.nbytes
            region.close()
            raise InvalidArgument(f"a peer lends {size} bytes, this rank {self.nbytes}; use equal sizes")
        return region

    def replace_peer(self, rank: int, region: LentRegion) -> None:
        """Make kernels use another region for a rank, and unmap the one before; no call may be in flight."""
        old = self._peers[rank]
        if old is region:
            return
        self.platform.synchronize()
        self._peers[rank] = region
        if self._is_open:
            self._write_peers()
            self.platform.synchronize()
        if old is not None:
            old.close()

    def close(self) -> None:
        """Free all memory. No kernel may be in flight."""
        for region in self._peers:
            if region is not None:
                region.close()
        self._own.close()

    def _attach(self, all_gather: AllGather) -> list[LentRegion | None]:
        rank = self.config.rank
        blobs = all_gather(self._own.blob)
        regions: list[LentRegion | None] = [
            self._own if peer == rank else self.platform.attach(blob) if blob else None
            for peer, blob in enumerate(blobs)
        ]
        for peer, region in enumerate(regions):
            if region is not None and region.nbytes != self.nbytes:
                raise InvalidArgument(
                    f"rank {peer} lends {region.nbytes} bytes, this rank {self.nbytes}; "
                    "all ranks must make the buffer with the same sizes"
                )
        all_gather(b"attached")  # no rank may leave before all have copied its descriptors
        return regions

    def _words(self, name: str) -> torch.Tensor:
        layout = self.config.region_layout
        return self._own.lease(layout.offset(name), layout[name].nbytes, None).view(torch.int64)

    def _write_peers(self) -> None:
        self._write_words("peers", [0 if region is None else region.address for region in self._peers])

    def _write_words(self, name: str, values: Sequence[int]) -> None:
        self._words(name)[: len(values)].copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))


def _signed(value: int, num_bits: int) -> int:
    return value - (1 << num_bits) if value >> (num_bits - 1) else value
