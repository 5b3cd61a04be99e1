"""Training on one rank: the example of how to train a Mixture-of-Experts model with epee.

Data path of a step: a batch of this rank's own -> loss / num_ranks -> backward (dispatch and combine run in both
directions) -> gradients of shared parameters summed over the ranks; an expert's gradient is already complete on the
rank where it lives -> AdamW.

What the ranks agree on: rank 0's clock decides about progress and about when to stop. It rides along with the
gradients as one of a few words, so all ranks take the same decision after the same step.
"""

from __future__ import annotations

import math
import time
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ep.buffer import Buffer
from ..nn import MoELayer
from .launch import Send
from .model import Transformer, is_expert
from .settings import Settings
from .state import require_all
from .text import Text, windows

Batch = tuple[Tensor, Tensor]
_NUM_VALIDATIONS = 10
_WARMUP = 0.04  # share of the training over which the learning rate rises


class Trainer:
    """Trains this rank's part of a model, in step with the other members.

    Attributes:
        members: the ranks that train, ascending; all of them unless some are lost (`survive.py`).
        buffer, model, optimizer: as made for the members.
        num_steps: steps done. `progress`: rank 0's share of the training that is done, 1 or more at the end.
        steps, valid: (step, seconds, loss over all ranks in nats per byte) of each step, and of validations.
        expert_load: `[num_layers, num_experts]` int64, slots that this rank's tokens gave each expert in training.
        rows: `[num_ranks]` float64, rows that this rank dispatched to each rank.
        train_s: seconds spent in steps, for `num_tokens` tokens. `began`: the start, by `time.perf_counter`.
    """

    def __init__(self, rank: int, settings: Settings, text: Text, send: Send) -> None:
        size = settings.size
        self.rank, self.settings, self._text, self.send = rank, settings, text, send
        self.steps: list[tuple[int, float, float]] = []
        self.valid: list[tuple[int, float, float]] = []
        self.expert_load = torch.zeros(size.num_layers, size.num_experts, dtype=torch.int64, device="cpu")
        self.rows = torch.zeros(settings.num_ranks, dtype=torch.float64, device="cpu")
        self.num_steps = self.num_tokens = 0
        self.train_s = self.progress = 0.0
        self._generator = torch.Generator(device="cpu").manual_seed(settings.seed * 1000003 + rank)
        self.build(tuple(range(settings.num_ranks)), dist.group.WORLD)
        self.began = time.perf_counter()

    def build(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Make buffer, model and optimiser over `members`, whose group it is; collective of them."""
        self.members = members
        self.buffer = make_buffer(self.settings, group, torch.float32)
        self.model = make_model(self.settings, self.buffer, torch.float32)
        self.optimizer = make_optimizer(self.model, self.settings.learning_rate)

    def train(self) -> None:
        """Train to the end; collective, as all that follows is."""
        while self.progress < 1.0:
            self.step()
        self.validate()

    def step(self, call: float = 0.0) -> float:
        """Do one step; return what rank 0 `call`s the others to, above 0 for something."""
        begin, before = time.perf_counter(), self.progress
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.settings.learning_rate * _rate_factor(min(1.0, before))
        self.optimizer.zero_grad()
        loss = backward(self.model, self.next_batch(), self.settings, len(self.members))
        self._count(2)  # the backward moves the same rows again
        self.expert_load += torch.stack([layer.expert_load for layer in self.model.layers()])
        loss, self.progress, call, *rows = self._agree(loss, call)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += self.settings.tokens_per_rank * len(self.members)
        self.train_s += time.perf_counter() - begin
        self.steps.append((self.num_steps, time.perf_counter() - self.began, loss))
        if int(before * _NUM_VALIDATIONS) < int(self.progress * _NUM_VALIDATIONS) < _NUM_VALIDATIONS:
            self.validate()
        self._report(rows)
        return call

    def validate(self) -> None:
        """Measure the loss on text that is never trained on."""
        num_windows = self.settings.valid_windows * len(self.members)
        places = torch.arange(num_windows, dtype=torch.float64, device="cpu") / num_windows
        mine = places[self.members.index(self.rank) :: len(self.members)]
        loss = torch.zeros(1, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for chunk in mine.split(self.settings.batch):
                batch = windows(self._text.valid, chunk, self.settings.size.context)
                loss += self.model.loss(*batch) * len(chunk) / num_windows
                self._count(1)
        dist.all_reduce(loss)
        require_all(self.members)
        self.valid.append((self.num_steps, time.perf_counter() - self.began, float(loss)))

    def next_batch(self) -> Batch:
        """Draw this rank's next inputs and targets, both `[batch, context]` int64."""
        places = torch.rand(self.settings.batch, generator=self._generator, dtype=torch.float64, device="cpu")
        return windows(self._text.train, places, self.settings.size.context)

    def _agree(self, loss: float, call: float) -> list[float]:
        """Sum the shared gradients over all members, and these words with them: loss, progress, call, rows."""
        done = time.perf_counter() - self.began
        num_steps = self.settings.num_steps
        progress = done / self.settings.seconds if num_steps is None else (self.num_steps + 1) / num_steps
        rows = self.rows.new_zeros(self.settings.num_ranks, len(self.rows))
        rows[self.rank] = self.rows
        clock = (0.0, 0.0) if self.rank else (progress, call)
        words = sum_gradients(self.model, torch.cat([rows.new_tensor([loss, *clock]), rows.flatten()]).float())
        require_all(self.members)
        return cast("list[float]", words.tolist())

    def _count(self, times: int) -> None:
        """Count the rows of the last forward."""
        for layer in self.model.layers():
            self.rows[list(self.members)] += times * self.rows.new_tensor(layer.num_sent)

    def _report(self, rows: list[float]) -> None:
        if self.rank:
            return
        step, seconds, loss = self.steps[-1]
        valid = f"  valid {self.valid[-1][2]:.3f}" if self.valid else ""
        sent = links(bytes_per_link(self.rows.new_tensor(rows).view(len(self.rows), -1), row_bytes(self.settings)))
        line = (
            f"step {step:>4}  {seconds:5.1f} s  loss {loss:.3f}{valid}  {self.num_tokens / self.train_s:,.0f} tokens/s"
        )
        self.send({"kind": "progress", "progress": self.progress, "text": f"{line}  sent {sent}"})


def make_buffer(settings: Settings, group: dist.ProcessGroup | None, dtype: torch.dtype) -> Buffer:
    """Make this rank's buffer (collective), with places for all experts. One buffer serves all layers."""
    size, num_ranks = settings.size, dist.get_world_size(group)
    return Buffer(
        group,
        num_experts=num_ranks * math.ceil(size.num_experts / num_ranks),
        hidden=size.hidden,
        num_topk=size.num_topk,
        max_tokens_per_rank=settings.tokens_per_rank,
        dtype=dtype,
        # A young router may send everything to one rank; a demo should not stop for that.
        max_recv_rows=settings.num_ranks * settings.tokens_per_rank * size.num_topk,
        timeout=settings.timeout_s,
        num_slots=size.num_layers + 1,  # autograd keeps what each layer received until the backward
    )


def make_model(settings: Settings, buffer: Buffer, dtype: torch.dtype) -> Transformer:
    """Make this rank's model; weights depend on the seed only, an expert's on its number and layer too."""
    size, places = settings.size, buffer.config.num_experts

    def make_moe(layer: int) -> MoELayer:
        seed = settings.seed * 1009 + layer
        moe = MoELayer(size.hidden, size.ffn_hidden, places, size.num_topk, buffer, seed=seed, dtype=dtype)
        moe.router = torch.nn.Parameter(moe.router.detach()[: size.num_experts])  # no token for an empty place
        return moe

    return Transformer(size, make_moe, seed=settings.seed).to(dtype)


def make_optimizer(model: Transformer, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimiser of the demo; it treats each parameter alone, so ranks may hold different ones."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def backward(model: Transformer, batch: Batch, settings: Settings, num_ranks: int) -> float:
    """Run forward and backward of this rank's share of the loss; return its cross entropy over `num_ranks`.

    The total over the ranks is the mean cross entropy plus `aux_coefficient` times the layers' load-balance losses.
    """
    cross_entropy = model.loss(*batch)
    ((cross_entropy + settings.aux_coefficient * model.aux_loss()) / num_ranks).backward()
    return float(cross_entropy.detach()) / num_ranks


def sum_gradients(model: Transformer, words: Tensor) -> Tensor:
    """Sum the gradients of all that is not an expert over the ranks, and `words`, which are returned; one call."""
    shared = [value for name, value in model.named_parameters() if not is_expert(name)]
    parts = [*(cast(Tensor, value.grad).flatten() for value in shared), words]
    flat = torch.cat(parts)
    dist.all_reduce(flat)
    *gradients, words = flat.split([len(part) for part in parts])
    for value, gradient in zip(shared, gradients, strict=True):
        value.grad = gradient.view_as(value)
    return words


def row_bytes(settings: Settings) -> int:
    """Return the bytes of a token in a dispatch or combine."""
    return settings.size.hidden * torch.float32.itemsize


def bytes_per_link(dispatched: Tensor, row_bytes: int) -> list[list[float]]:
    """Turn `[num_ranks, num_ranks]` dispatched rows into bytes from (row) to (column): a combine answers each."""
    return cast("list[list[float]]", ((dispatched + dispatched.T) * row_bytes).tolist())


def links(traffic: list[list[float]]) -> str:
    """Return the bytes of each link between two ranks as text, `0→1 12.3 MB`; a sum if they are many."""
    ranks = range(len(traffic))
    pairs = [(traffic[src][dst] / 1e6, f"{src}→{dst}") for src in ranks for dst in ranks if src != dst]
    if len(pairs) > 6:
        total, (most, link) = sum(count for count, _ in pairs), max(pairs)
        return f"{total:,.1f} MB over {len(pairs)} links, most {link} {most:,.1f} MB"
    return "  ".join(f"{link} {count:,.1f} MB" for count, link in pairs) or "nothing between ranks: there is one"


def _rate_factor(progress: float) -> float:
    """Rise over the first part of the training, then fall along a cosine to a tenth."""
    if progress < _WARMUP:
        return 0.1 + 0.9 * progress / _WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP))
