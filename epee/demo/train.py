"""Training on one rank: the example of how to train a Mixture-of-Experts model with epee.

Data path of a step: a batch of this rank's own -> loss / num_ranks -> backward (dispatch and combine run in both
directions) -> gradients of shared parameters summed over the ranks; an expert's gradient is already complete on its
rank -> AdamW.

Agreement of the ranks: rank 0's clock decides about progress and about the end. It is sent with the gradients as one of
a few words, so all ranks take the same decision after the same step.
"""

from __future__ import annotations

import math
import time
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..ep.buffer import Buffer
from .launch import Send
from .model import Transformer, is_expert
from .settings import Settings

Batch = tuple[Tensor, Tensor]
_LEARNING_RATE = 4e-3
_AUX_COEFFICIENT = 0.01  # weight of the layers' load-balance losses


class Trainer:
    """Trains this rank's part of a model, in step with the other members.

    Attributes:
        device: of this rank's computation: the CPU, or its GPU.
        members: the ranks that train, ascending; all of them unless some are lost (`survive.py`).
        group, buffer, model, optimizer: created for the members.
        num_steps: steps done. `progress`: rank 0's share of the training that is done, 1 or more at the end.
        steps: (step, seconds, loss over all ranks in nats per byte, tokens up to then) of each step.
        rows: `[num_ranks, num_ranks]` float64, rows that each rank (row) has dispatched to each rank (column) in
            training, backward included. Each step adds the sum of what its ranks report, so the rows of a rank that is
            lost later stay. A replacement counts from its first step on; rank 0, which reports, is never lost.
        crossed: `[num_hosts, num_hosts]` float64, likewise rows from each host to each host.
        traffic: bytes that training has sent from each rank (row) to each rank (column).
        network: bytes of rows that have crossed from each host (row) to each host (column); [] on one host.
        num_tokens: tokens that all have trained on. `began`: rank 0's start, by `time.perf_counter`.
    """

    def __init__(self, rank: int, settings: Settings, text: bytes, send: Send) -> None:
        self.rank, self.settings, self.send = rank, settings, send
        self.device = place(settings, rank)
        self._text = split_text(text)
        self.steps: list[tuple[int, float, float, int]] = []
        self.rows = torch.zeros(settings.num_ranks, settings.num_ranks, dtype=torch.float64, device="cpu")
        self.crossed = torch.zeros(settings.num_hosts, settings.num_hosts, dtype=torch.float64, device="cpu")
        self.network: list[list[float]] = []
        self.num_steps = self.num_tokens = 0
        self.progress = 0.0
        self._generator = torch.Generator(device="cpu").manual_seed(settings.seed * 1000003 + rank)
        self.began = time.perf_counter()
        self.build(tuple(range(settings.num_ranks)), dist.group.WORLD)

    def build(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Create buffer, model and optimiser over `members`, whose group it is; collective of them."""
        self.members, self.group = members, group
        self.buffer = make_buffer(self.settings, group, torch.float32, self.device)
        self.model = Transformer(self.settings, self.buffer).to(self.device)
        self.optimizer = make_optimizer(self.model)
        began = self.rows.new_tensor([self.began])  # rank 0's: events of different ranks are ordered by this time
        dist.broadcast(began, 0, group)
        self.began = float(began)

    def step(self, call: float = 0.0) -> float:
        """Do one step, collective; return the `call` of rank 0 to the others, above 0 for a request."""
        # A short warm-up, then decay to a tenth.
        self.optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(0.1 + 25 * self.progress, 1.0 - 0.9 * self.progress)
        self.optimizer.zero_grad()
        loss = backward(self.model, self.next_batch(), len(self.members))
        loss, self.progress, call = self._agree(loss, call)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += self.settings.tokens_per_rank * len(self.members)
        self.steps.append((self.num_steps, time.perf_counter() - self.began, loss, self.num_tokens))
        if self.rank == 0:
            self.send({"kind": "progress", "last": self.steps[-1], "traffic": self.traffic, "network": self.network})
        return call

    def validate(self) -> float:
        """Return the loss on text that is never used for training, on the same windows each time; collective."""
        generator = torch.Generator(device="cpu").manual_seed(self.rank)
        loss = torch.zeros(1, dtype=torch.float32, device=self.device)
        with torch.no_grad():
            for _ in range(self.settings.valid_batches):
                loss += self.model.loss(*draw(self._text[1], self.settings, generator, self.device))
        dist.all_reduce(loss)
        return float(loss) / (self.settings.valid_batches * len(self.members))

    def rows_per_expert(self) -> list[int]:
        """Return the rows that the last forward sent to each expert, over all layers and ranks; collective."""
        load = torch.stack([layer.expert_load for layer in self.model.layers()]).sum(0)
        dist.all_reduce(load)
        return cast("list[int]", load[: self.settings.num_experts].tolist())

    def next_batch(self) -> Batch:
        """Draw this rank's next inputs and targets, both `[batch, context]` int64."""
        return draw(self._text[0], self.settings, self._generator, self.device)

    def _sent(self) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank has dispatched in this step, shaped as `rows` and `crossed`."""
        rows, crossed = torch.zeros_like(self.rows), torch.zeros_like(self.crossed)
        hosts = sorted({self.settings.host_of(member) for member in self.members})  # remaining hosts
        for layer in self.model.layers():  # twice: the backward moves the same rows
            rows[self.rank, list(self.members)] += 2 * rows.new_tensor(layer.num_sent)
            if layer.num_sent_to_hosts is not None:
                crossed[self.settings.host_of(self.rank), hosts] += 2 * crossed.new_tensor(layer.num_sent_to_hosts)
        return rows, crossed

    def _agree(self, loss: float, call: float) -> list[float]:
        """Sum the shared gradients over all members, and with them loss, progress and call, which are returned."""
        done, num_steps = time.perf_counter() - self.began, self.settings.num_steps
        progress = done / self.settings.seconds if num_steps is None else (self.num_steps + 1) / num_steps
        clock = (0.0, 0.0) if self.rank else (progress, call)
        words = torch.cat([self.rows.new_tensor([loss, *clock]), *(sent.flatten() for sent in self._sent())]).float()
        words = sum_gradients(self.model, words.to(self.device)).to("cpu")
        rows, crossed = words[3:].split([self.rows.numel(), self.crossed.numel()])
        self.rows += rows.view_as(self.rows)
        self.crossed += crossed.view_as(self.crossed)
        self.traffic = bytes_per_link(self.rows, self.settings.hidden)
        if self.settings.num_hosts > 1:
            self.network = bytes_per_link(self.crossed, self.settings.hidden)
        return cast("list[float]", words[:3].tolist())


def place(settings: Settings, rank: int) -> torch.device:
    """Return the device of a rank; ranks share GPUs if there are more of them."""
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_buffer(
    settings: Settings, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device
) -> Buffer:
    """Create this rank's buffer (collective), with places for all experts. One buffer serves all layers."""
    num_ranks = dist.get_world_size(group)
    return Buffer(
        group,
        num_experts=num_ranks * math.ceil(settings.num_experts / num_ranks),
        hidden=settings.hidden,
        num_topk=settings.num_topk,
        max_tokens_per_rank=settings.tokens_per_rank,
        dtype=dtype,
        device=device,
        # An untrained router may send everything to one rank; a demo should not stop for that.
        max_recv_rows=settings.num_ranks * settings.tokens_per_rank * settings.num_topk,
        timeout=settings.timeout_s,
        num_slots=settings.num_layers + 1,  # autograd keeps what each layer received until the backward
    )


def make_optimizer(model: Transformer) -> torch.optim.Optimizer:
    """Return the optimiser of the demo; it treats each parameter alone, so ranks may hold different ones."""
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def backward(model: Transformer, batch: Batch, num_ranks: int) -> float:
    """Run forward and backward of this rank's share of the loss; return its cross entropy over `num_ranks`.

    The total over the ranks is the mean cross entropy plus a little of the layers' load-balance losses.
    """
    cross_entropy = model.loss(*batch)
    aux_loss = torch.stack([layer.aux_loss for layer in model.layers()]).sum()
    ((cross_entropy + _AUX_COEFFICIENT * aux_loss) / num_ranks).backward()
    return float(cross_entropy.detach()) / num_ranks


def sum_gradients(model: Transformer, words: Tensor) -> Tensor:
    """Sum the gradients of all parameters but experts over the ranks, and `words`, which are returned; one call."""
    shared = [cast(Tensor, value.grad) for name, value in model.named_parameters() if not is_expert(name)]
    flat = parameters_to_vector([*shared, words])
    dist.all_reduce(flat)
    vector_to_parameters(flat, [*shared, words])
    return words


def gather(tensor: Tensor, members: tuple[int, ...]) -> Tensor:
    """Return `[num_members, *shape]`: the tensor of every member, on every member (collective)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack([parts[rank] for rank in members])


def whole(state: dict[str, Tensor], members: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a copy of all members' state by parameter names: experts are distributed over the members. Collective."""
    return {
        name: gather(value, members).flatten(0, 1) if is_expert(name) else value.clone()
        for name, value in state.items()
    }


def split_text(text: bytes) -> list[Tensor]:
    """Return the bytes to train on and the last twentieth, to validate on, uint8 tensors of one dimension."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return list(values.tensor_split([len(values) - len(values) // 20]))


def draw(text: Tensor, settings: Settings, generator: torch.Generator, device: torch.device) -> Batch:
    """Draw windows of a text; return inputs and targets, the bytes one further, both `[batch, context]` int64.

    The result is the same on any device.
    """
    num_starts, shape = len(text) - settings.context, (settings.batch, 1)
    starts = torch.randint(num_starts, shape, generator=generator, dtype=torch.int64, device="cpu")
    window = text[starts + torch.arange(settings.context + 1, dtype=torch.int64, device="cpu")].long().to(device)
    return window[:, :-1], window[:, 1:]


def bytes_per_link(dispatched: Tensor, hidden: int) -> list[list[float]]:
    """Convert `[num_ranks, num_ranks]` dispatched rows to bytes from (row) to (column): each dispatch has a combine."""
    return cast("list[list[float]]", ((dispatched + dispatched.T) * hidden * torch.float32.itemsize).tolist())
