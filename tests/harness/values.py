"""Results on their way from a rank to the test: tensors go by value, as shared ones need the sender to stay alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Tensor(NamedTuple):
    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    def restore(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


def portable(value: Any) -> Any:
    """Replace tensors, also those in lists, tuples and dictionaries, by what `restore` makes tensors of."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu()
        flat = torch.empty(raw.numel(), dtype=raw.dtype).copy_(raw.reshape(-1))
        return _Tensor(flat.view(torch.uint8).numpy().tobytes(), raw.dtype, tuple(raw.shape))
    if type(value) in (list, tuple):
        return type(value)(portable(item) for item in value)
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    return value


def restore(value: Any) -> Any:
    """Undo `portable`."""
    if isinstance(value, _Tensor):
        return value.restore()
    if type(value) in (list, tuple):
        return type(value)(restore(item) for item in value)
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    return value
