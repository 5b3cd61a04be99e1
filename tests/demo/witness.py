"""Ranks of the demo that write down what they hold when it matters: before a loss, after it, after a join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from epee.demo import rank
from epee.demo.launch import Send
from epee.demo.survive import Survivor


class Witness(Survivor):
    """Writes its part of the state into the folder `witness` of the run's results."""

    def _write(self, name: str) -> None:
        folder = Path(self.settings.out) / "witness"
        folder.mkdir(parents=True, exist_ok=True)
        state = self.trainer.model.state_dict()
        np.savez(folder / f"{name}-{self.trainer.rank}", **{key: value.numpy() for key, value in state.items()})

    def save(self) -> None:
        super().save()
        if self.trainer.members == self.everybody:  # a copy is renewed at once by those who have gone back to it
            self._write(f"before-{self.trainer.num_steps}")

    def load(self) -> None:
        super().load()
        is_united = self.trainer.members == self.everybody
        self._write("united" if is_united else f"after-{self.trainer.num_steps}")

    def _welcome(self, lost: list[int]) -> None:
        self._write("given")
        super()._welcome(lost)


def run_rank(index: int, send: Send, *arguments: Any) -> None:
    """As `epee.demo.rank.run_rank`, with witnesses."""
    rank.Survivor = Witness
    rank.run_rank(index, send, *arguments)
