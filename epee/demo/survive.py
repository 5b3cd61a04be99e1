"""Training that survives the loss of a rank: `epee demo --kill 1` and `--stall 1`, the program of one rank.

The steps, in order:

1. Every few steps the ranks gather all weights, experts included, and rank 0 writes them into a file: the copy.
2. The victim kills or stops itself during a forward. The others' calls end: in the `Buffer` at once when the process is
   dead, after `timeout_s` when it is silent; in the backend with a view without the victim.
3. A rank that has had such an error closes its buffer and meets the others in a barrier of the group, in mode "mask":
   it completes on all ranks with the same contributors, the remaining ranks. A rank that waits in another call
   meanwhile gets a mismatch and enters the barrier, too. All return to the copy; the experts, the victim's included,
   are distributed over the remaining ranks.
4. A replacement process asks to join. Rank 0 is notified and announces it with the gradients of a step, so that all
   call `recover_ranks` after the same step. Before that the copy is renewed; the replacement begins with it. After the
   loss of a host (`--kill-host 1`: all its ranks are victims) no rank is replaced: the others end without.
5. A victim that was only stopped resumes, enters the barrier as in 3 and is notified that it was evicted.

The copy has no moments of AdamW: they begin at zero on all ranks whenever experts move. With n members each has
`ceil(num_experts / n)` places; expert e has place e. Places at the end may be unused; no token is sent there.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..backend import BackendOptions
from ..errors import CommTimeoutError, EvictedError, MismatchError, PeerError, RankFailedError, StaleHandleError
from .model import Transformer, is_expert
from .settings import SLOW_S, TIMEOUT_S, Settings
from .train import Trainer, whole

_LOSSES = (PeerError, CommTimeoutError, StaleHandleError, MismatchError)  # the errors of a lost rank, here or at a peer
_ATTEMPTS = 16  # a loss costs one, or two if a rank was in another call


class Survivor:
    """Runs a `Trainer`, continues without a lost rank and admits a replacement.

    With `joins` this process is the replacement: it begins at the others' step. `file` holds the copy.
    """

    def __init__(self, trainer: Trainer, file: Path, joins: bool) -> None:
        self.trainer, self.settings, self.file = trainer, trainer.settings, file
        self.group: Any = dist.group.WORLD
        self.everybody = tuple(range(self.settings.num_ranks))
        self.is_victim = trainer.rank in self.settings.victims and not joins
        self.is_replaced = joins or self.settings.killed_host is not None  # no replacement is waited for any more
        self.is_owed = False  # a rank was lost, and no replacement was started since
        if joins:
            self.load()

    def train(self) -> bool:
        """Train to the end, through the loss of one rank; collective. False: the others continued without this rank.

        Raises:
            EpeeError: recovery failed: the group does not agree, or loses ranks repeatedly.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if attempt:
                    self._recover()
                self._train_on()
                break
            except EvictedError as exc:
                self._tell(
                    "evicted",
                    f"the old process of rank {self.trainer.rank} runs again, and learns that it was evicted: {exc}",
                )
                return False
            except _LOSSES:
                if attempt == _ATTEMPTS - 1:
                    raise
        return True

    def save(self) -> None:
        """Write the present state, or keep the previous one if a rank is lost meanwhile; collective of members."""
        trainer = self.trainer
        state: dict[str, Any] = whole(trainer.model.state_dict(), trainer.members)
        self._require_all()
        if trainer.rank == 0:
            new = self.file.with_suffix(".new.npz")
            np.savez(new, num_steps=trainer.num_steps, progress=trainer.progress, **state)
            new.replace(self.file)

    def load(self) -> None:
        """Continue from the state in the file, with the present experts of this rank."""
        trainer = self.trainer
        with np.load(self.file) as data:
            trainer.num_steps, trainer.progress = int(data["num_steps"]), float(data["progress"])
            restore(trainer.model, {name: torch.from_numpy(data[name]) for name in trainer.model.state_dict()})
        del trainer.steps[trainer.num_steps :]

    def _train_on(self) -> None:
        trainer, settings = self.trainer, self.settings
        while trainer.progress < 1.0:
            if trainer.num_steps % settings.snapshot_every == 0:
                self.save()
            if self.is_victim and trainer.progress >= settings.fault_at:
                trainer.model.layers()[-1].register_forward_pre_hook(self._meet_fate)
            lost = set(self.everybody) - set(trainer.members)
            called = trainer.step(call=float(bool(lost & set(self.group.waiting_ranks()))))
            self._require_all()
            self.order_replacement()
            if not self.is_replaced:  # the end waits for the replacement, and for a step with it
                trainer.progress = min(trainer.progress, 0.999)
            if called:
                self._welcome(sorted(lost))

    def _require_all(self) -> None:
        """Raise `RankFailedError` if the last collective lacks a member: in mode "mask" no call fails for a loss."""
        if lost := sorted(set(self.trainer.members) - set(self.group.last_contributors())):
            raise RankFailedError(f"rank(s) {lost} did not contribute", lost, "demo")

    def _meet_fate(self, module: object, arguments: object) -> None:
        """Kill or stop this process during a forward."""
        number = signal.SIGKILL if self.settings.fault == "kill" else signal.SIGSTOP
        text = f"rank {self.trainer.rank} gets {number.name} in the middle of step {self.trainer.num_steps + 1}"
        self._tell(self.settings.fault, text, pid=os.getpid())
        os.kill(os.getpid(), number)

    def order_replacement(self) -> None:
        """Request a new process, once, after a loss and at the set time; on rank 0."""
        if (
            self.trainer.rank == 0
            and self.is_owed
            and not self.is_replaced
            and self.trainer.progress >= self.settings.replace_at
        ):
            self.is_owed = False
            self._tell("started", f"a new process is started for rank {self.settings.victim}")

    def _recover(self) -> None:
        """Agree with the remaining ranks and continue from the copy."""
        trainer, before, again = self.trainer, self.trainer.members, self.trainer.num_steps
        trainer.buffer.close()
        dist.barrier()
        members = self.group.last_contributors()
        self.is_owed |= members != before
        self._rebuild(members)
        again -= trainer.num_steps
        if trainer.rank == 0:
            what = "delayed" if members == before else "went on"
            self._tell(what, f"ranks {list(members)} continue; {again} steps are done again", again=again)

    def _welcome(self, lost: list[int]) -> None:
        """Admit the replacement; collective of the members."""
        self.save()
        self.trainer.buffer.close()
        self.group.recover_ranks(lost, TIMEOUT_S)
        self.group.set_timeout(timedelta(seconds=SLOW_S))
        self._rebuild(self.everybody)
        self.is_replaced = True
        if self.trainer.rank == 0:
            self._tell("rejoined", f"the new process of rank {self.settings.victim} trains with the others")

    def _rebuild(self, members: tuple[int, ...]) -> None:
        """Create buffer and model for these members, from the copy, and a group if they are not all; collective."""
        group = self.group
        if members != self.everybody:
            timeout, options = timedelta(seconds=TIMEOUT_S), backend_options(self.settings)
            group = dist.new_group(list(members), timeout, pg_options=options, use_local_synchronization=True)
        self.trainer.build(members, group)
        self.load()

    def _tell(self, what: str, text: str, **facts: object) -> None:
        """Send an event of this moment; `step` is the present or next one."""
        seconds, step = time.perf_counter() - self.trainer.began, self.trainer.num_steps + 1
        facts |= {"kind": "event", "what": what, "text": text, "seconds": seconds, "step": step}
        self.trainer.send({**facts, "members": list(self.trainer.members)})


def backend_options(settings: Settings, joins: bool = False) -> BackendOptions:
    """Return the options of the groups: a rank that is silent for this time is evicted."""
    timeout_s = SLOW_S if joins else settings.timeout_s  # a process that has just begun is slow, not stalled
    return BackendOptions(fault_mode="mask", op_timeout=timeout_s, is_extension=joins)


def restore(model: Transformer, state: dict[str, torch.Tensor]) -> None:
    """Write the weights of all experts, and what all ranks share, into a model with some of the experts."""
    first = model.layers()[0].experts.first_expert
    for name, here in model.state_dict().items():
        value = state[name][first : first + len(here)] if is_expert(name) else state[name]
        here[: len(value)] = value  # an unused place keeps its weights
