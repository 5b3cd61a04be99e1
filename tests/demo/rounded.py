"""Ranks that are told to train on GPUs where there are none: with CPU tensors, or over buffers on emulated GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epee.demo import rank, train
from epee.demo.launch import Send
from epee.demo.settings import Settings
from epee.nn import layer
from epee.nn.router import Routing
from tests.csrc.emulated_buffer import EmulatedBuffer

_train: Any = train
_layer: Any = layer
_combine, _route = _layer.combine, _layer.route


def _cpu(settings: Settings, index: int) -> torch.device:
    return torch.device("cpu")


def on_cpus(index: int, send: Send, *arguments: Any) -> None:
    """As `epee.demo.rank.run_rank`, with CPU tensors for CUDA tensors."""
    _train.place = _cpu
    rank.run_rank(index, send, *arguments)


def on_emulated_gpus(index: int, send: Send, *arguments: Any) -> None:
    """The same, rows moved by the GPU's kernels, which run here."""
    _train.Buffer = EmulatedBuffer
    on_cpus(index, send, *arguments)


def _loses_a_row(buffer: Any, y: Tensor, *others: Any) -> Tensor:
    lost = torch.ones(len(y), 1, dtype=y.dtype, device=y.device)
    lost[:1] = 0
    made: Tensor = _combine(buffer, y * lost, *others)
    return made


def losing_a_row(index: int, send: Send, *arguments: Any) -> None:
    """One row of each combine gets lost on rank 1."""
    if index == 1:
        _layer.combine = _loses_a_row
    on_cpus(index, send, *arguments)


def _chooses_badly(logits: Tensor, num_topk: int, topk_idx: Tensor | None = None) -> Routing:
    idx = logits.topk(num_topk).indices
    idx[0] = (-logits[0]).topk(num_topk).indices
    made: Routing = _route(logits, num_topk, idx)
    return made


def choosing_badly(index: int, send: Send, *arguments: Any) -> None:
    """A router sends one token to the experts that fit it least."""
    _layer.route = _chooses_badly
    on_cpus(index, send, *arguments)
