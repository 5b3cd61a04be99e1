"""The settings of a run of the demo. Checked once, in the parent; ranks trust them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument

TIMEOUT_S = 60.0  # of the calls while no rank is lost on purpose
SLOW_S = 15.0  # of those around a death, which needs no waiting: reached only on a very slow machine
STALL_S = 5.0  # how long a silent rank is waited for, in the buffer and then in the group, before it is evicted


@dataclass(frozen=True)
class Settings:
    """One run of the demo. The model's sizes learn most per second on two CPU cores.

    Attributes:
        num_steps: train exactly this many steps, independently of `seconds`.
        context: bytes that the model sees. `batch`: sequences per rank and step.
        valid_batches: batches per rank for the validation loss.
        device: "cpu", or "cuda" for a GPU per rank; ranks share GPUs if there are more of them.
        num_hosts: hosts that consecutive ranks represent: they share no memory, and have separate networks if this user
            may create them, else loopback addresses.
        victim: rank that is lost during training, by the `fault` "kill" or "stall"; None: no rank.
        killed_host: host that is lost during training, all its ranks at once; None: none.
        fault_at, replace_at: shares of the training after which the victim is lost, and its replacement is started; the
            ranks of a killed host are not replaced.
    """

    num_ranks: int = 2
    device: str = "cpu"
    num_hosts: int = 1
    seconds: float = 55.0
    num_steps: int | None = None
    out: str = "epee-demo"
    seed: int = 0
    hidden: int = 128
    num_heads: int = 4
    num_layers: int = 3
    ffn_hidden: int = 128
    num_experts: int = 8
    num_topk: int = 2
    context: int = 128
    batch: int = 8
    valid_batches: int = 4
    victim: int | None = None
    fault: str = "kill"
    killed_host: int | None = None
    fault_at: float = 0.35
    replace_at: float = 0.6
    snapshot_every: int = 5

    def check(self) -> None:
        """Raise `InvalidArgument` when the settings cannot run."""
        fitting = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
        if self.num_ranks not in fitting:
            raise InvalidArgument(
                f"--ranks must divide the {self.num_experts} experts, got {self.num_ranks}; "
                f"use one of {', '.join(map(str, fitting))}"
            )
        if self.device not in ("cpu", "cuda"):
            raise InvalidArgument(f'--device must be "cpu" or "cuda", got {self.device!r}')
        if self.device == "cuda" and (self.num_hosts > 1 or self.victim is not None):
            raise InvalidArgument(f"--{self.fault if self.num_hosts == 1 else 'hosts'} needs --device cpu")
        if not 1 <= self.num_hosts <= self.num_ranks:
            raise InvalidArgument(f"--hosts must be 1 ... {self.num_ranks}, the number of ranks, got {self.num_hosts}")
        if self.killed_host is not None and not 1 <= self.killed_host < self.num_hosts:
            raise InvalidArgument(
                f"--kill-host must be a host from 1 to {self.num_hosts - 1} of --hosts, got {self.killed_host}; host 0 "
                "has rank 0, which reports"
            )
        if self.num_hosts > 1 and self.killed_host is None and self.victim is not None and self.fault == "stall":
            raise InvalidArgument(
                "--stall needs --hosts 1: over hosts, ranks reached through the stopped one may be evicted, too"
            )
        if self.victim is not None and not 1 <= self.victim < self.num_ranks:
            raise InvalidArgument(
                f"--{self.fault} must be a rank from 1 to {self.num_ranks - 1}, got {self.victim}; rank 0 reports"
            )

    def most_ranks(self, most: int) -> int:
        """Return the largest number of ranks, at least 1 and else at most `most`, that can share the experts."""
        return max(n for n in range(1, max(1, most) + 1) if self.num_experts % n == 0)

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that are lost on purpose, ascending."""
        if self.killed_host is not None:
            return tuple(rank for rank in range(self.num_ranks) if self.host_of(rank) == self.killed_host)
        return () if self.victim is None else (self.victim,)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank * self.num_hosts // self.num_ranks

    @property
    def tokens_per_rank(self) -> int:
        """Tokens (bytes) that a rank trains on in one step; no forward has more."""
        return self.batch * self.context

    @property
    def timeout_s(self) -> float:
        """Time for which a silent rank is waited for."""
        return TIMEOUT_S if not self.victims else STALL_S if self.fault == "stall" else SLOW_S
