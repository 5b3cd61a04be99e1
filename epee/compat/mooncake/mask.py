"""The mask of `ep.Buffer` calls without one: the members of the group, less the ranks that calls have lost.

There is one tensor per device, for as long as the buffer lives, so a rank that a call has set to 0 stays 0 for the next
one, and a CUDA graph may have recorded it. A change of the group's own mask is written into it by the first call
afterwards, on the current stream; a call that is being recorded writes nothing, so that no replay undoes what an
earlier one has set.
"""

from __future__ import annotations

from typing import Any

import torch

from epee.ep import is_capturing

from ...errors import InvalidArgument

_LENGTH = 64  # of a mask at least: a group may grow


class GroupMask:
    """The default mask of one buffer.

    Args:
        group: of the buffer; for one without `active_ranks` all ranks take part.
        is_early: create the tensor of the current GPU now, so that the first call can be recorded.
    """

    def __init__(self, group: Any, num_ranks: int, is_early: bool) -> None:
        self._group = group
        self._length = max(num_ranks, _LENGTH)
        self._on: dict[torch.device, tuple[torch.Tensor, list[int]]] = {}
        self.on(torch.device("cpu"))
        if is_early and torch.cuda.is_available():
            self.on(torch.device("cuda", torch.cuda.current_device()))

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the mask on a device, int32, updated by the group's present mask.

        Raises:
            InvalidArgument: there is none yet and a CUDA graph is being recorded.
        """
        known = self._on.get(device)
        if is_capturing():
            if known is None:
                raise InvalidArgument(
                    f"active_ranks=None: there is no mask on {device} yet, and none can be made while a CUDA graph is "
                    "recorded; make one call before, or give the buffer its bytes and call torch.cuda.set_device before"
                )
            return known[0]
        said = self._said()
        if known is None:
            mask = torch.tensor(said, dtype=torch.int32, device=device)
        else:
            mask = known[0]
            for rank, (before, now) in enumerate(zip(known[1], said, strict=True)):
                if before != now:
                    mask[rank : rank + 1].fill_(now)
        self._on[device] = mask, said
        return mask

    def reset(self) -> None:
        """Reset the mask to the group's at the next call, without the ranks lost so far: its ranks reconnect."""
        self._on = {device: (mask, [-1] * self._length) for device, (mask, _) in self._on.items()}

    def _said(self) -> list[int]:
        ask = getattr(self._group, "active_ranks", None)
        said: list[int] = [] if ask is None else ask().tolist()
        return said + [int(ask is None)] * (self._length - len(said))
