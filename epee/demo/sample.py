"""Let the trained model write. All ranks take part, because every forward is a collective call."""

from __future__ import annotations

import torch

from .model import Transformer
from .settings import Settings

PROMPT = b"def "
_TEMPERATURE = 0.7


@torch.no_grad()
def write(model: Transformer, settings: Settings) -> str:
    """Return `PROMPT` and the `sample_bytes` bytes that the model adds to it, as text. Collective."""
    generator = torch.Generator(device="cpu").manual_seed(settings.seed)
    tokens = list(PROMPT)
    for _ in range(settings.sample_bytes):
        window = torch.tensor(tokens[-settings.size.context :], dtype=torch.int64, device="cpu")[None]
        probabilities = (model(window)[0, -1].float() / _TEMPERATURE).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens).decode("utf-8", errors="replace")
