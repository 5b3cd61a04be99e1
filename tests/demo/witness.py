"""Ranks of the demo that write down what they hold when it matters: before a loss, after it, after a join."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from epee.demo import rank
from epee.demo.launch import Send
from epee.demo.placement import even
from epee.demo.snapshot import Snapshot, capture
from epee.demo.survive import SurvivingTrainer


class Witness(SurvivingTrainer):
    """Writes arrays into the folder `witness` of the run's results."""

    def _write(self, name: str, tensor: Tensor) -> None:
        folder = Path(self._settings.out) / "witness"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, tensor.numpy())

    def _of_victim(self) -> Tensor:
        """Return the victim's experts as they are in the newest snapshot of this rank, which holds them."""
        settings = self._settings
        assert settings.victim is not None
        snapshot = self._snapshots[self.num_steps]
        wanted = even(settings.num_ranks, settings.size.num_experts).experts[settings.victim]
        mine = snapshot.placement.experts[self._rank]
        return snapshot.state.experts[[mine.index(expert) for expert in wanted]]

    def _take_snapshot(self) -> None:
        super()._take_snapshot()
        if self._is_victim:
            self._write(f"before-{self.num_steps}", self._of_victim())

    def _go_back(self, members: tuple[int, ...], step: int) -> None:
        super()._go_back(members, step)
        assert self._settings.victim is not None
        if self._settings.victim in members:
            return  # nobody was lost: a machine that crawls
        self._write(f"shared-{step}-{self._rank}", self._snapshots[step].state.shared)
        if even(self._settings.num_ranks, self._settings.size.num_experts).holder(self._settings.victim) == self._rank:
            self._write(f"after-{step}", self._of_victim())

    def _welcome(self) -> None:
        victim, old = self._settings.victim, self._placement
        assert victim is not None
        if old.holder(victim) == self._rank:
            state = capture(self.model, self._optimizer)
            self._snapshots = {self.num_steps: Snapshot(self.num_steps, old, state, state.experts[:0])}
            self._write("given", self._of_victim())
        super()._welcome()
        self._write(f"united-{self._rank}", self._snapshots[self.num_steps].state.shared)

    def _take_over(self) -> None:
        super()._take_over()
        self._write("taken", self._of_victim())
        self._write(f"united-{self._rank}", self._snapshots[self.num_steps].state.shared)


def run_rank(index: int, job: rank.Job, send: Send) -> None:
    """As `epee.demo.rank.run_rank`, with witnesses."""
    rank.SurvivingTrainer = Witness
    rank.run_rank(index, job, send)
