"""SwiGLU experts: their parameters and the function that runs one of them. Local, no communication.

Each expert is initialised from its own seed, so expert 5 has the same weights on any rank, and a dense layer in one
process can be built with the very same weights.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_Layer = TypeVar("_Layer", bound="ExpertLayer")
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment: nearby seeds give unrelated streams


def generator_for(seed: int, position: int) -> torch.Generator:
    """Return a CPU generator that depends on `seed` and `position` only; `position` -1 is the router."""
    word = (seed * 0x100000001B3 + (position + 2) * _GOLDEN) & (2**64 - 1)
    word ^= word >> 31
    return torch.Generator(device="cpu").manual_seed(word & (2**63 - 1))


class ExpertLayer(nn.Module):
    """Common base of layers with experts: results of the last forward as attributes, and copies.

    Attributes:
        aux_loss: of the last forward, differentiable.
    """

    aux_loss: Tensor

    def __deepcopy__(self: _Layer, memo: dict[int, Any]) -> _Layer:
        """Return a layer with copies of the parameters, over the same buffer; its `aux_loss` has no graph."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        state = {**self.__dict__, "aux_loss": self.aux_loss.detach()}  # torch refuses to copy a tensor with a graph
        other.__dict__.update(copy.deepcopy(state, memo))
        return other


class Experts(nn.Module):
    """The weights of experts `first_expert` to `first_expert + num_experts - 1` of a layer.

    Attributes:
        gate_up: `[num_experts, 2 * ffn_hidden, hidden]`, gate rows first.
        down: `[num_experts, hidden, ffn_hidden]`.
    """

    def __init__(
        self, hidden: int, ffn_hidden: int, first_expert: int, num_experts: int, *, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.first_expert = first_expert
        gate_up, down = [], []
        for expert in range(first_expert, first_expert + num_experts):
            generator = generator_for(seed, expert)
            # Drawn in float64 and rounded, so that layers of all dtypes start from the same numbers.
            gate_up.append(torch.randn(2 * ffn_hidden, hidden, generator=generator, dtype=torch.float64, device="cpu"))
            down.append(torch.randn(hidden, ffn_hidden, generator=generator, dtype=torch.float64, device="cpu"))
        self.gate_up = nn.Parameter((torch.stack(gate_up) * hidden**-0.5).to(dtype))
        self.down = nn.Parameter((torch.stack(down) * ffn_hidden**-0.5).to(dtype))

    @property
    def num_experts(self) -> int:
        """Number of experts on this rank."""
        return self.gate_up.shape[0]

    def run(self, position: int, x: Tensor) -> Tensor:
        """Run the expert at `position` (0 is `first_expert`) on `x` `[n, hidden]`, n may be 0; returns the same shape.

        It computes in the dtype of `x`, which mixed precision may have made narrower than that of the weights, or in
        that of `torch.autocast`; the result has the dtype of `x`.
        """
        gate, up = functional.linear(x, self.gate_up[position].to(x.dtype)).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down[position].to(x.dtype)).to(x.dtype)


def router_weight(hidden: int, num_experts: int, *, seed: int, dtype: torch.dtype) -> nn.Parameter:
    """Return the router's initial weight `[num_experts, hidden]` in `dtype` (float32 or float64)."""
    weight = torch.randn(num_experts, hidden, generator=generator_for(seed, -1), dtype=torch.float64, device="cpu")
    return nn.Parameter((weight * hidden**-0.5).to(dtype))


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the router computes: float32, or float64 for float64 tokens."""
    return torch.float64 if dtype == torch.float64 else torch.float32
