"""Training on one rank: steps, validation, counters.

Data path of a step: a batch of this rank's own -> loss / num_ranks -> backward (dispatch and combine run in both
directions) -> gradients of shared parameters summed over the ranks; an expert's gradient is already complete on the
rank where it lives -> AdamW.

What the ranks agree on: rank 0's clock decides about progress and about when to stop. It rides along with the
gradients (see `SharedGradients`), so all ranks take the same decision after the same step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .group import SharedGradients, gather
from .launch import Send
from .model import Transformer, named
from .settings import Settings
from .text import Text, random_starts, spread_starts, windows
from .traffic import Traffic, bytes_per_link

VALIDATE_EVERY = 0.08  # share of the training between two validations
_VALIDATION_COST = 0.1  # largest share of the time that validations may take, on a slow machine
_WARMUP = 0.04  # share of the training time over which the learning rate rises
_WORD_LOSS, _WORD_PROGRESS, _WORD_VALIDATE, _WORD_CALL, _WORD_ROWS = 0, 1, 2, 3, 4


@dataclass
class History:
    """What is plotted: training loss per step, validation loss now and then.

    Attributes:
        steps: (step, seconds, loss of that step's batches over all ranks, nats per byte).
        valid: (step, seconds, validation loss, nats per byte).
    """

    steps: list[tuple[int, float, float]] = field(default_factory=list)
    valid: list[tuple[int, float, float]] = field(default_factory=list)


class _Step(NamedTuple):
    """What all ranks agree on after a step.

    Attributes:
        loss: mean cross entropy over the ranks.
        progress: rank 0's share of the training that is done, 1 or more at the end.
        is_validation_due: rank 0's word.
        call: what rank 0 calls the others to, above 0 for something (see `Trainer._call`).
        rows: `[num_ranks, num_ranks]` dispatched rows so far, to about seven digits.
    """

    loss: float
    progress: float
    is_validation_due: bool
    call: float
    rows: Tensor


class Trainer:
    """Trains `model` on this rank, in step with all others.

    Attributes:
        model: as given, or as `rebuild` was given since.
        members: the ranks that train, ascending; all of them unless some are lost (`survive.py`).
        history: losses so far.
        expert_load: `[num_layers, num_experts]` int64, slots that this rank's tokens gave each expert in training.
        traffic: rows that this rank dispatched.
        train_s: seconds spent in training steps, validation left out.
        num_tokens: tokens that the members have trained on.
        began: when the training began, on the machine's clock (`time.perf_counter`).
    """

    def __init__(self, rank: int, settings: Settings, model: Transformer, text: Text, send: Send) -> None:
        size = settings.size
        self.history = History()
        self.expert_load = torch.zeros(size.num_layers, size.num_experts, dtype=torch.int64, device="cpu")
        self.traffic = Traffic(settings.num_ranks)
        self.train_s = self.began = 0.0
        self.num_tokens = 0
        self.progress = 0.0
        self._validated_at = self._validation_s = self._validated_progress = 0.0
        self._rank, self._settings, self._text, self._send = rank, settings, text, send
        self._generator = torch.Generator(device="cpu").manual_seed(settings.seed * 1000003 + rank)
        self.rebuild(model, tuple(range(settings.num_ranks)))

    def rebuild(self, model: Transformer, members: tuple[int, ...]) -> None:
        """Train `model` from now on, over `members`, with a fresh optimiser."""
        self.model, self.members = model, members
        self._shared = SharedGradients(
            [parameter for _, parameter in named(model, experts=False)], _WORD_ROWS + self._settings.num_ranks**2
        )
        self._experts = [parameter for _, parameter in named(model, experts=True)]
        self._optimizer = make_optimizer(model, self._settings.learning_rate)

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.history.steps)

    def run(self) -> None:
        """Train until the time (or the steps) are used up, from where it stands; collective."""
        if not self.began:
            self.began = self._validated_at = time.perf_counter()
        while self.progress < 1.0:
            begin = time.perf_counter()
            step = self._step(self.progress)
            self.progress = step.progress
            self.train_s += time.perf_counter() - begin
            self.num_tokens += self._settings.tokens_per_rank * len(self.members)
            self.history.steps.append((self.num_steps + 1, time.perf_counter() - self.began, step.loss))
            if step.is_validation_due and self.progress < 1.0:
                self._validate()
                self._validated_progress = self.progress
            self._report(step)
            self._after_step(step.call)  # last: who is taken in there begins with the next step
        self._validate()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Draw this rank's next inputs and targets, both `[batch, context]` int64."""
        context = self._settings.size.context
        starts = random_starts(self._text.train, self._settings.batch, context, self._generator)
        return windows(self._text.train, starts, context)

    def _step(self, progress: float) -> _Step:
        """Do one step with the learning rate of `progress`."""
        settings, words = self._settings, self._shared.words
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = settings.learning_rate * _rate_factor(progress)
        self._shared.zero()
        for expert in self._experts:
            expert.grad = None
        loss = backward(self.model, self.next_batch(), settings, len(self.members))
        layers = self.model.layers()
        self.expert_load += torch.stack([layer.expert_load for layer in layers])
        self.traffic.add((layer.num_sent for layer in layers), backward=True)
        words[_WORD_LOSS] = loss
        if self._rank == 0:
            words[_WORD_PROGRESS] = here = self._progress_here()
            words[_WORD_VALIDATE] = float(self._is_validation_due(here))
            words[_WORD_CALL] = self._call()
        words[_WORD_ROWS:].view(settings.num_ranks, -1)[self._rank] = self.traffic.rows.to(words.dtype)
        self._shared.sum_over_ranks()
        self._require_all()
        self._optimizer.step()
        rows = words[_WORD_ROWS:].view(settings.num_ranks, -1).clone()
        agreed = (_WORD_LOSS, _WORD_PROGRESS, _WORD_VALIDATE, _WORD_CALL)
        loss, progress, is_due, call = (float(words[idx]) for idx in agreed)
        return _Step(loss, progress, is_due > 0, call, rows)

    def _require_all(self) -> None:
        """After a collective: raise if the result lacks a member. Without faults that cannot be."""

    def _call(self) -> float:
        """On rank 0: what to call the others to after this step; 0 for nothing."""
        return 0.0

    def _after_step(self, call: float) -> None:
        """Between two steps, on all ranks with the same `call`."""

    def _progress_here(self) -> float:
        if self._settings.num_steps is not None:
            return (self.num_steps + 1) / self._settings.num_steps
        return min(1.0, (time.perf_counter() - self.began) / self._settings.seconds)

    def _is_validation_due(self, progress: float) -> bool:
        if progress < self._validated_progress + VALIDATE_EVERY:
            return False
        if self._settings.num_steps is not None:
            return True  # a run of so many steps does the same whatever the machine
        since = time.perf_counter() - self._validated_at
        return self._validation_s <= _VALIDATION_COST * since

    def _validate(self) -> None:
        begin = time.perf_counter()
        context = self._settings.size.context
        num_windows = self._settings.valid_windows * self._settings.num_ranks
        starts = spread_starts(self._text.valid, num_windows, context)
        num_each = num_windows // len(self.members)  # equally many forwards on all members
        mine = starts[self.members.index(self._rank) :: len(self.members)][:num_each]
        losses = []
        with torch.no_grad():
            for chunk in mine.split(self._settings.batch):
                losses.append(self.model.loss(*windows(self._text.valid, chunk, context)))
                self.traffic.add((layer.num_sent for layer in self.model.layers()), backward=False)
        whole = gather(torch.stack(losses))
        self._require_all()
        loss = float(whole[list(self.members)].mean())
        self._validated_at = time.perf_counter()
        self._validation_s = self._validated_at - begin
        self.history.valid.append((self.num_steps, self._validated_at - self.began, loss))

    def _report(self, step: _Step) -> None:
        if self._rank:
            return
        num_steps, seconds, _ = self.history.steps[-1]
        settings = self._settings
        row_bytes = settings.size.hidden * next(self.model.parameters()).element_size()
        self._send(
            {
                "kind": "progress",
                "progress": min(1.0, step.progress),
                "step": num_steps,
                "seconds": seconds,
                "loss": step.loss,
                "valid": self.history.valid[-1][2] if self.history.valid else None,
                "tokens_per_s": self.num_tokens / self.train_s,
                "bytes_per_link": bytes_per_link(step.rows.double(), row_bytes).tolist(),
            }
        )


def backward(
    model: Transformer, batch: tuple[Tensor, Tensor], settings: Settings, num_ranks: int | None = None
) -> float:
    """Run forward and backward of this rank's share of the loss; return its cross entropy over `num_ranks`.

    `num_ranks` is how many take part, all by default. The total over them is the mean cross entropy plus
    `aux_coefficient` times the layers' load-balance losses.
    """
    num_ranks = num_ranks or settings.num_ranks
    cross_entropy = model.loss(*batch)
    total = (cross_entropy + settings.aux_coefficient * model.aux_loss()) / num_ranks
    total.backward()
    return float(cross_entropy.detach()) / num_ranks


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return the optimiser of the demo; it treats each parameter alone, so ranks may hold different ones."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    return cast(torch.optim.Optimizer, optimizer)


def _rate_factor(progress: float) -> float:
    """Rise over the first part of the training, then fall along a cosine to a tenth."""
    if progress < _WARMUP:
        return 0.1 + 0.9 * progress / _WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP))
