"""What a run of the demo is told: sizes, times, paths. Checked once, in the parent; ranks trust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidArgument

TIMEOUT_S = 60.0  # of the calls while nobody is lost on purpose


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the demo's transformer, `context` in bytes; the defaults learn most per second on two CPU cores."""

    hidden: int = 128
    num_heads: int = 4
    num_layers: int = 3
    ffn_hidden: int = 128
    num_experts: int = 8
    num_topk: int = 2
    context: int = 128


@dataclass(frozen=True)
class Settings:
    """One run of the demo.

    Attributes:
        text: file to learn from; None takes the sources of Python's standard library.
        batch: sequences per rank and step. `valid_windows`: per rank, for the validation loss, always the same ones.
        victim: rank that is lost in the midst of training, by the `fault` "kill" or "stall"; None: nobody.
        fault_at, replace_at: shares of the training after which the victim is lost, and its replacement is started.
        stall_s, kill_s: how long a silent rank is waited for, in the buffer and then in the group, before it is voted
            out. A death needs no waiting, so there only a machine that crawls gets so far.
    """

    num_ranks: int = 2
    seconds: float = 55.0
    num_steps: int | None = None
    out: str = "epee-demo"
    text: str | None = None
    seed: int = 0
    backend: str = "epee"
    batch: int = 8
    valid_windows: int = 32
    sample_bytes: int = 200
    learning_rate: float = 4e-3
    aux_coefficient: float = 0.01
    victim: int | None = None
    fault: str = "kill"
    fault_at: float = 0.35
    replace_at: float = 0.6
    snapshot_every: int = 5
    stall_s: float = 5.0
    kill_s: float = 15.0
    size: ModelSize = field(default_factory=ModelSize)

    def check(self) -> None:
        """Raise `InvalidArgument` when the settings cannot run."""
        num_experts = self.size.num_experts
        if self.num_ranks < 1 or num_experts % self.num_ranks:
            fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            raise InvalidArgument(
                f"--ranks must divide the {num_experts} experts, got {self.num_ranks}; use one of {fits}"
            )
        if self.victim is not None:
            self._check_victim(self.victim)
        if self.num_steps is not None and self.num_steps < 1:
            raise InvalidArgument(f"--steps must be 1 or more, got {self.num_steps}; leave it out to train by time")
        if not 1 <= self.seconds <= 86400:
            raise InvalidArgument(f"--seconds must be 1 to 86400, got {self.seconds:g}")
        if self.text is not None and not Path(self.text).is_file():
            raise InvalidArgument(f"--text must be a file, got {self.text}; leave it out for Python's own sources")
        if not 0 <= self.seed < 2**31:
            raise InvalidArgument(f"--seed must be 0 to {2**31 - 1}, got {self.seed}")

    def _check_victim(self, victim: int) -> None:
        if not 1 <= victim < self.num_ranks:
            raise InvalidArgument(
                f"--{self.fault} must be a rank from 1 to {self.num_ranks - 1}, got {victim}; rank 0 keeps the clock "
                "and speaks to the screen"
            )
        if self.backend != "epee":
            raise InvalidArgument(f"--{self.fault} needs --backend epee, got {self.backend}; others do not survive it")

    @property
    def tokens_per_rank(self) -> int:
        """Tokens (bytes) that a rank trains on in one step; no forward has more."""
        return self.batch * self.size.context

    @property
    def timeout_s(self) -> float:
        """How long a silent rank is waited for."""
        if self.victim is None:
            return TIMEOUT_S
        return self.stall_s if self.fault == "stall" else self.kill_s
