"""Training that survives the loss of a rank: `epee demo --kill 1` and `--stall 1`, the story of one rank.

What happens, in order:

1. Every few steps each rank sends its experts to its holder (`snapshot.py`), through epee.
2. The victim kills or stops itself in the midst of a forward. The others' calls end: in the `Buffer` at once when the
   process is dead, after `patience_s` when it is silent; in the backend with a view without the victim.
3. Whoever has had such an error closes its buffer and asks the others, by a gather over the group in mode "mask", who
   is left and which snapshot all have. The call completes for all with the same contributors; a rank that waits in
   another call meanwhile gets a mismatch and comes, too. All go back to that snapshot, the holder serves the victim's
   experts, and a new buffer spans those who are left: the experts are placed anew on them.
4. A replacement process asks to join. Rank 0 hears of it and says so with the gradients of a step, so that all call
   `recover_ranks` behind the same step. A new buffer spans all ranks; rank 0 sends the replacement what all share,
   the holder sends it its experts, as they have been trained meanwhile.
5. A victim that was only stopped wakes up, asks as in 3 and is told that it was evicted.

In mode "mask" no collective fails for a loss, so its contributors are looked at after each (`_require_all`).
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ..backend import BackendOptions
from ..errors import EpeeError, EvictedError, InvalidArgument, InvalidState, ProtocolError, RankFailedError
from .group import TIMEOUT_S, gather
from .launch import Send
from .model import Block, Transformer
from .movable import MovableMoELayer
from .placement import Placement, even
from .settings import Settings
from .setup import make_buffer
from .snapshot import Snapshot, State, capture, experts_after_loss, restore, send_to_holders
from .text import Text
from .train import Trainer

_ATTEMPTS = 8  # a second loss, or a rank that comes out of another call, costs one
_KEPT = 2  # snapshots
_QUESTION = 0x65706565  # first word of the gather in which the others are asked
_SIGNALS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}


def backend_options(settings: Settings, joins: bool = False) -> BackendOptions:
    """Return the options of the groups: a rank that is silent for `patience_s` is voted out."""
    return BackendOptions(fault_mode="mask", on_stall="evict", op_timeout=settings.patience_s, is_extension=joins)


class Team:
    """The buffer over the members of a placement, and the group through which they meet; made collectively."""

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self.placement = placement
        members = placement.members
        self._group: Any = dist.group.WORLD
        if len(members) < settings.num_ranks:
            self._group = dist.new_group(
                list(members),
                timeout=timedelta(seconds=TIMEOUT_S),
                pg_options=backend_options(settings),
                use_local_synchronization=True,
            )
        try:
            num_places = placement.num_places * len(members)
            self.buffer = make_buffer(settings, self._group, torch.float32, num_places)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Let go; waits for nobody, idempotent."""
        self.buffer.close()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, dist.group.WORLD
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class SurvivingTrainer(Trainer):
    """A `Trainer` that goes on without a lost rank and takes in a replacement.

    With `joins` this process is the replacement: it begins where the others are.
    """

    def __init__(self, rank: int, settings: Settings, text: Text, send: Send, joins: bool = False) -> None:
        self._group: Any = dist.group.WORLD
        self._placement = even(settings.num_ranks, settings.size.num_experts)
        self._lost: tuple[int, ...] = ()
        self._snapshots: dict[int, Snapshot] = {}
        self._news: list[dict[str, Any]] = []  # to be told after the next step
        self._is_victim = rank == settings.victim and not joins
        if joins:
            self._be_patient(settings.kill_s)
        self._team = Team(settings, self._placement)
        super().__init__(rank, settings, self._make_model(settings, rank), text, send)
        if joins:
            self._take_over()

    # ---- training

    def run(self) -> None:
        """Train to the end, whatever becomes of one rank; collective.

        Raises:
            EvictedError: the others went on without this rank.
            EpeeError: it cannot be made good: too many are lost, or the group does not agree in time.
        """
        furthest, num_vain = -1, 0
        while num_vain < _ATTEMPTS:
            try:
                if not self._snapshots:
                    self._take_snapshot()
                super().run()
                return
            except (EvictedError, InvalidArgument):
                raise
            except EpeeError as exc:
                last = exc
                # an error that comes back at the same step is no loss of a rank: it must not be retried for ever
                num_vain = 0 if self.num_steps > furthest else num_vain + 1
                furthest = max(furthest, self.num_steps)
                self._be_patient(self._settings.patience_s)
                self._recover(exc)
        raise last

    def close(self) -> None:
        """Close the buffer."""
        self._team.close()

    def rebuild(self, model: Transformer, members: tuple[int, ...]) -> None:
        """As `Trainer.rebuild`; the victim's model has its end built in."""
        super().rebuild(model, members)
        if self._is_victim:
            cast(Block, model.blocks[-1]).moe.register_forward_pre_hook(self._meet_fate)

    def _make_model(self, settings: Settings, rank: int) -> Transformer:
        def make_moe(layer: int) -> MovableMoELayer:
            seed = settings.seed * 1009 + layer
            return MovableMoELayer(settings.size, self._team.buffer, self._placement, rank, seed=seed)

        return Transformer(settings.size, make_moe, seed=settings.seed)

    def _meet_fate(self, module: object, arguments: object) -> None:
        """Kill or stop this process in the midst of a forward, when the time has come."""
        settings = self._settings
        if self._is_victim and self.progress >= settings.fault_at and torch.is_grad_enabled():
            self._is_victim = False
            self._tell(settings.fault, pid=os.getpid())
            os.kill(os.getpid(), _SIGNALS[settings.fault])

    def _tell(self, what: str, **facts: object) -> None:
        self._send({"kind": "event", "what": what, "clock": time.perf_counter(), "step": self.num_steps, **facts})

    def _require_all(self) -> None:
        contributors = self._group.last_contributors()
        if tuple(contributors) != self.members:
            lost = sorted(set(self.members) - set(contributors))
            raise RankFailedError(f"step {self.num_steps + 1}: rank(s) {lost} did not contribute", lost, "demo")

    def _progress_here(self) -> float:
        progress = super()._progress_here()
        is_owing = self._settings.victim is not None and not self._has_replacement
        return min(progress, 0.999) if is_owing else progress  # the end waits for the replacement

    _has_replacement = False

    def _call(self) -> float:
        return float(bool(set(self._lost) & set(self._group.waiting_ranks())))

    def _after_step(self, call: float) -> None:
        while self._news:
            self._tell(**self._news.pop(0))
        if call > 0:
            self._welcome()
        elif self.num_steps % self._settings.snapshot_every == 0:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        state = capture(self.model, self._optimizer)
        copy = send_to_holders(self._placement, self._rank, state.experts)
        self._require_all()
        self._snapshots[self.num_steps] = Snapshot(self.num_steps, self._placement, state, copy)
        for step in sorted(self._snapshots)[:-_KEPT]:
            del self._snapshots[step]

    # ---- after a loss

    def _recover(self, cause: EpeeError) -> None:
        """Agree with those who are left and go on from a snapshot.

        Raises:
            EvictedError: the others went on without this rank.
            EpeeError: no agreement in `_ATTEMPTS` attempts.
        """
        last, lost = cause, self._lost
        self._team.close()
        for _ in range(_ATTEMPTS):
            try:
                members, step = self._ask()
                again = self.num_steps - step
                self._go_back(members, step)
            except EvictedError:
                raise
            except EpeeError as exc:
                last = exc
                continue
            if self._rank == 0:
                what = "went on" if self._lost != lost else "delayed"
                self._news.append({"what": what, "members": list(members), "again": again, "cause": str(cause)})
            return
        raise last

    def _ask(self) -> tuple[tuple[int, ...], int]:
        """Return who is left, and the newest snapshot that all of them have."""
        newest = max(self._snapshots, default=-1)
        told = gather(torch.tensor([_QUESTION, newest], dtype=torch.int64, device="cpu"))
        members = tuple(self._group.last_contributors())
        answers = told[list(members)]
        if not bool((answers[:, 0] == _QUESTION).all()):
            raise ProtocolError("a rank has answered another question")
        return members, int(answers[:, 1].min())

    def _go_back(self, members: tuple[int, ...], step: int) -> None:
        """Take up the snapshot of `step` with `members`; collective of these."""
        snapshot = self._snapshots.get(step)
        lost = tuple(sorted(set(range(self._settings.num_ranks)) - set(members)))
        if snapshot is None:
            raise InvalidState(f"no snapshot is common to all; this rank has steps {sorted(self._snapshots)}")
        newly = sorted(set(snapshot.placement.members) - set(members))
        if len(newly) > 1 or set(members) - set(snapshot.placement.members):
            raise InvalidState(f"ranks {newly} are lost at once; a copy serves for one rank at a time")
        experts, placement = snapshot.state.experts, snapshot.placement
        for rank in newly:
            experts, placement = experts_after_loss(snapshot, self._rank, rank), placement.without(rank)
        self._lost = lost
        self._regroup(placement)
        restore(self.model, self._optimizer, snapshot.state._replace(experts=experts))
        del self.history.steps[step:]
        self._take_snapshot()

    def _regroup(self, placement: Placement) -> None:
        """Make buffer and model for a placement; collective of its members."""
        self._placement = placement
        self._team = Team(self._settings, placement)
        self.rebuild(self._make_model(self._settings, self._rank), placement.members)

    # ---- a replacement

    def _welcome(self) -> None:
        """Take in the replacement and give it what it needs; collective of members and replacement."""
        settings, lost, old = self._settings, self._lost, self._placement
        state = capture(self.model, self._optimizer)
        self._team.close()
        self._group.recover_ranks(list(lost), TIMEOUT_S)
        self._lost = ()
        self._be_patient(settings.kill_s)
        self._regroup(even(settings.num_ranks, settings.size.num_experts))
        rows = {expert: state.experts[row] for row, expert in enumerate(old.experts[self._rank])}
        moved = {expert: old.holder(rank) for rank in lost for expert in self._placement.experts[rank]}
        self._share(state, rows, moved)
        self._be_patient(settings.patience_s)
        if self._rank == 0:
            self._news.append({"what": "rejoined"})

    def _take_over(self) -> None:
        """In the replacement: get what the members have."""
        old = self._placement.without(self._rank)
        fresh = capture(self.model, self._optimizer)  # for its shapes
        moved = {expert: old.holder(self._rank) for expert in self._placement.experts[self._rank]}
        self._share(fresh, {}, moved)
        self._be_patient(self._settings.patience_s)

    def _be_patient(self, seconds: float) -> None:
        """Wait so long for silent ranks from now on: a process that has just begun is slow, and not stalled."""
        self._group.set_timeout(timedelta(seconds=seconds))

    def _share(self, state: State, rows: dict[int, torch.Tensor], moved: dict[int, int]) -> None:
        """Bring all ranks to one state: rank 0's of what is shared, experts from whoever has them.

        Args:
            state: this rank's; the replacement's is overwritten.
            rows: the experts that this rank has, `[3, n]` each.
            moved: expert that goes to another rank -> rank that sends it.
        """
        steps = self.history.steps
        numbers = torch.tensor(
            [state.num_updates, len(steps), self.progress, self.began], dtype=torch.float64, device="cpu"
        )
        shared = state.shared.clone()
        for tensor in (numbers, shared):
            dist.broadcast(tensor, 0)
            self._require_all()
        history = torch.zeros(int(numbers[1]), 3, dtype=torch.float64, device="cpu")
        if len(steps) == len(history):
            history.copy_(torch.tensor(steps, dtype=torch.float64, device="cpu").view(-1, 3))
        dist.broadcast(history, 0)
        self._require_all()
        for expert, holder in sorted(moved.items()):
            row = rows[expert].clone() if expert in rows else torch.zeros_like(state.experts[0])
            dist.broadcast(row, holder)
            self._require_all()
            rows[expert] = row
        mine = torch.stack([rows[expert] for expert in self._placement.experts[self._rank]])
        restore(self.model, self._optimizer, State(int(numbers[0]), shared, mine))
        steps[:] = [(int(step), seconds, loss) for step, seconds, loss in history.tolist()]
        self.progress, self.began = float(numbers[2]), float(numbers[3])
        self._has_replacement = True
        self._take_snapshot()
