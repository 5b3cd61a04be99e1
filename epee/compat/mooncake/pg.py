"""`mooncake.pg`: options, membership calls and settings, each a few lines over the group's own methods.

A `backend` argument is the process group itself (`dist.group.WORLD` or the result of `new_group`).

A lost rank leaves the membership by itself, a healthy one by `deactivate_ranks`; a replacement (`is_extension=True`)
joins by `recover_ranks`, ranks beyond the group's size by `extend_group_size_to`. A call that cannot have its effect
here raises an error with the reason. Enums and response objects of the control calls are here as well.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import env
from ...backend import (
    BackendOptions,
    create,
    preferred_device,
    register,
    set_death_window,
    set_device_filter,
    set_host_ip,
)
from ...errors import CommTimeoutError, InvalidArgument, InvalidState, PeerError, UnsupportedError, expected
from ...values import MAX_US, is_whole, shown


class ProposalStatus(enum.Enum):
    """The outcome of a proposal to change the active ranks."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


class SyncStatus(enum.Enum):
    """The outcome of `sync_after_failure`."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


ViewUpdateStatus = ProposalStatus  # Mooncake's earlier name
SyncAfterFailureStatus = SyncStatus  # Mooncake's present name


@dataclass(frozen=True)
class ProposeViewUpdateResponse:
    """Response of `activate_ranks`, `recover_ranks` and `deactivate_ranks`."""

    status: ProposalStatus
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


@dataclass(frozen=True)
class SyncAfterFailureResponse:
    """Response of `sync_after_failure`."""

    status: SyncStatus
    reject_reason: str = ""


__all__ = [
    "MooncakeBackendOptions",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "SyncStatus",
    "ViewUpdateStatus",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "get_preferred_hca",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]

_MAX_RANKS = 64  # Mooncake's kMaxNumRanks; a group of the backend "epee" has no more either


def get_preferred_hca(*where: Any) -> str:
    """Return the RDMA device nearest to a location, of those that pass the filter; "" without one.

    Args:
        where: `(location)` or, as Mooncake did, `(backend, location)`: "cpu:0" is a NUMA node, "cuda:1" or "gpu:1" a
            GPU. Nearest is the device that shares most of the PCI tree with the GPU, then one on its NUMA node, then
            the first by name, which is also the result for any other location.
    """
    return preferred_device(str(where[-1]) if where else "")


def set_transfer_engine(engine: Any) -> None:
    """Do nothing, for compatibility: ranks of one host share memory, and hosts communicate over TCP."""


class MooncakeBackendOptions(BackendOptions):
    """Mooncake's options in every form that it accepts.

    `(active_ranks)`, `(active_ranks, is_extension)`, `(active_ranks, is_extension, max_group_size)` with an int32 mask
    tensor, or `(max_group_size)`, `(max_group_size, is_extension)`, `(max_group_size, is_extension,
    auto_deactivate_on_failure, auto_sync_on_failure)` with numbers. They are `BackendOptions`, the only type that torch
    passes on to a group of this backend.

    Raises:
        InvalidArgument: another form, or `auto_sync_on_failure` without `auto_deactivate_on_failure`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = _fields(args, kwargs)
        self_deactivate = fields.pop("auto_deactivate_on_failure", True)
        self_sync = fields.pop("auto_sync_on_failure", bool(self_deactivate))
        if self_sync and not self_deactivate:
            raise InvalidArgument("auto_sync_on_failure=True needs auto_deactivate_on_failure=True; set both")
        super().__init__(fault_mode="mask", **fields)
        self.reports_losses = self.joins_later = self.counts_present = self.shows_at_once = True
        self.keeps_lost = not self_deactivate
        self.auto_deactivate_on_failure = bool(self_deactivate)
        self.auto_sync_on_failure = bool(self_sync)


def _fields(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Sort the positional forms into fields."""
    by_mask = ("active_ranks", "is_extension", "max_group_size")
    by_size = ("max_group_size", "is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure")
    with_mask = isinstance(args[0], torch.Tensor) if args else "active_ranks" in kwargs
    names = by_mask if with_mask else by_size
    if len(args) > len(names) or (not with_mask and len(args) == 3):
        raise InvalidArgument(
            f"MooncakeBackendOptions takes (active_ranks[, is_extension[, max_group_size]]) or (max_group_size[, "
            f"is_extension[, auto_deactivate_on_failure, auto_sync_on_failure]]), got {len(args)} positional arguments"
        )
    fields = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name in fields or name not in {*by_mask, *by_size}:
            raise InvalidArgument(f"MooncakeBackendOptions: {name!r} is unknown or given twice")
        fields[name] = value
    return fields


# ---- membership


def _group_of(backend: Any) -> Any:
    if not hasattr(backend, "local_peer_state"):
        raise InvalidArgument(
            "backend must be a process group of the backend mooncake or mooncake-cpu, dist.group.WORLD or a result of "
            f"new_group, got {type(backend).__name__}"
        )
    return backend


def _checked(ranks: Sequence[int]) -> list[int]:
    try:
        found = [operator.index(rank) for rank in ranks]
    except expected(TypeError):
        raise InvalidArgument(f"ranks must be a list of numbers, got {shown(ranks)}") from None
    bad = [rank for rank in found if not 0 <= rank < _MAX_RANKS]
    if bad:
        raise InvalidArgument(f"ranks must lie in 0 ... {_MAX_RANKS - 1}, got {shown(bad)}")
    return found


def _active(backend: Any) -> set[int]:
    return {rank for rank, is_active in enumerate(backend.active_ranks().tolist()) if is_active}


def get_peer_state(backend: Any, ranks: Sequence[int]) -> list[bool]:
    """Return for each rank whether it takes part, or waits to, as far as this process knows; no communication.

    One rank may call it alone. A rank that is proved dead is False at once; one for which a process waits is True when
    all members' agents have been notified of it. If all ranks ask between calls, they see it between the same two
    calls. A rank beyond the present size may wait as well.

    Raises:
        InvalidArgument: a rank that no group can have, below 0 or above 63.
    """
    states: list[bool] = _group_of(backend).local_peer_state(_checked(ranks))
    return states


def get_active_ranks(backend: Any) -> torch.Tensor:
    """Return the int32 mask that the group keeps up to date: 1 = takes part, or is lost and not deactivated.

    That is `active_ranks` of the options if it is long enough: it has as many elements as the group has ranks, or
    `max_group_size` if that is more. With `auto_deactivate_on_failure=False` a lost rank keeps its 1 until
    `deactivate_ranks` names it.
    """
    mask: torch.Tensor = _group_of(backend).shown_ranks()
    return mask


def get_num_synced_ranks(backend: Any) -> int:
    """Return how many ranks take part or wait to, those beyond the present size included; as `get_peer_state`."""
    return sum(_group_of(backend).local_peer_state(range(_MAX_RANKS)))


def get_current_epoch(backend: Any) -> int:
    """Return the epoch of the group's view; a death changes it at once, other changes with the next call."""
    return int(_group_of(backend).shown_epoch)


def _reject(backend: Any, reason: str) -> ProposeViewUpdateResponse:
    return ProposeViewUpdateResponse(ProposalStatus.Rejected, backend.shown_epoch, reject_reason=reason)


def activate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Admit the processes that wait for these ranks; they take part from the next call on.

    One member suffices, all may call it. A rank for which no process waits is a reason to reject; nothing changes then.
    Ranks beyond the present size make the group grow; then all members call it.
    """
    absent = _group_of(backend).take_in(sorted(_checked(ranks)))
    if absent >= 0:
        return _reject(backend, f"rank {absent} is not there and no process waits in its place; start one")
    return ProposeViewUpdateResponse(ProposalStatus.Applied, backend.shown_epoch)


recover_ranks = activate_ranks


def deactivate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Exclude these ranks, healthy ones too; they return by `join_group` and `activate_ranks`.

    One member suffices, all may call it, also the excluded ranks. With `auto_deactivate_on_failure=False` all call it
    for a rank that is lost: each records it for itself.
    """
    active, ranks = _active(_group_of(backend)), _checked(ranks)
    going = [rank for rank in ranks if rank in active]
    if going:
        try:
            backend.put_out(going)
        except expected(CommTimeoutError, InvalidState, UnsupportedError) as exc:
            return _reject(backend, str(exc))
    backend.put_out_lost(ranks)
    return ProposeViewUpdateResponse(ProposalStatus.Applied, backend.shown_epoch)


def join_group(backend: Any) -> None:
    """Join the running group, and return when a member has admitted this process; members return when the others have
    confirmed that they are.

    For a process that was started with `is_extension=True`, which works alone until then, or that was excluded. Groups
    are joined one after the other, the default group first, on all ranks in the same order.

    Raises:
        CommTimeoutError: no member has called `activate_ranks` for it in time.
        InvalidState: there is no group that could be joined.
    """
    _group_of(backend).join()


def extend_group_size_to(backend: Any, size: int) -> None:
    """Set the group's size to `size` ranks from the next call on, and admit processes waiting for a lower rank. All
    call it.

    Call it when `get_num_synced_ranks` shows the joiners, or to remove ranks at the end that have left.

    Raises:
        InvalidArgument: no process waits for one of the new ranks, or ranks beyond `size` take part; no group has
            `size` ranks.
    """
    ready = _group_of(backend).ready_ranks()
    if not is_whole(size, 1, _MAX_RANKS):
        raise InvalidArgument(f"size must be a number of ranks from 1 to {_MAX_RANKS}, got {shown(size)}")
    absent = [rank for rank in range(backend.num_slots, size) if rank not in ready]
    if absent:
        raise InvalidArgument(
            f"extend_group_size_to({size}): no process waits for rank {absent[0]} (the group has {backend.num_slots} "
            "ranks); start it with is_extension=True"
        )
    wanted = [rank for rank in sorted(ready - _active(backend)) if rank < size]
    if wanted:
        backend.recover_ranks(wanted)
    backend.extend_group_size_to(size)


def sync_after_failure(backend: Any) -> SyncAfterFailureResponse:
    """Wait until all members run on the same view: one barrier over the remaining ranks."""
    before = _group_of(backend).epoch
    try:
        backend.barrier().wait()
    except expected(PeerError) as exc:
        if backend.epoch == before:
            return SyncAfterFailureResponse(SyncStatus.Rejected, str(exc))
    return SyncAfterFailureResponse(SyncStatus.NoPending if backend.epoch == before else SyncStatus.Reconciled)


# ---- results of a call


def get_local_success(work: Any) -> bool:
    """Wait for `work` and return whether it ended well here.

    Raises:
        InvalidArgument: it is no work; a call without `async_op=True` returns none.
    """
    if not hasattr(work, "wait"):
        raise InvalidArgument(f"work must be the result of a call with async_op=True, got {type(work).__name__}")
    try:
        work.wait()
    except expected(RuntimeError):
        return False
    return work.exception() is None and not _failed(work)


def _failed(work: Any) -> set[int]:
    """Return the ranks that a call has lost, or that took no part in it though the program has them active."""
    if not hasattr(work, "lost_ranks"):
        return set()  # the call had ended when it returned
    lost: set[int] = work.lost_ranks()
    return lost if work.exception() is not None else lost | (work.engine.mask.kept() - work.contributors())


def get_failed_ranks_hint(work: Any) -> torch.Tensor:
    """Wait for `work`; return an int32 tensor with 1 for the ranks that made it fail.

    It is as long as the group is, or `max_group_size` if that is more.
    """
    get_local_success(work)
    failed = _failed(work)
    engine = getattr(work, "engine", None)
    hint = torch.zeros(
        0 if engine is None else engine.mask.live(work.num_ranks).numel(), dtype=torch.int32, device="cpu"
    )
    hint[sorted(failed)] = 1
    return hint


# ---- settings

_timeouts_us = {"collective": 10_000_000, "p2p": 0}
_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # Mooncake's backends in this process


def _checked_us(name: str, value: int, least: int = 1) -> int:
    if not is_whole(value, least, MAX_US):
        raise InvalidArgument(f"{name} must be a number of microseconds from {least} to {MAX_US}, got {shown(value)}")
    return value


def set_collective_timeout_us(value: int) -> None:
    """Set how long collectives of groups created from now on wait for a silent peer; default 10 s."""
    _timeouts_us["collective"] = _checked_us("collective", value)


def set_p2p_timeout_us(value: int) -> None:
    """Set how long sends and receives wait, in existing and later groups.

    Until it is called they wait as long as collectives do. Groups whose options have an `op_timeout` keep that.
    """
    _timeouts_us["p2p"] = _checked_us("p2p", value)
    for group in list(_groups):
        _set_p2p_timeout(group)


def _set_p2p_timeout(group: Any) -> None:
    if _timeouts_us["p2p"] and not group.options.op_timeout_s:
        group.set_p2p_timeout(timedelta(microseconds=_timeouts_us["p2p"]))


def set_fault_reconciliation_window_us(value: int) -> None:
    """Set how long a decision on a death waits for further deaths, in all jobs of this process; default 0.

    All ranks set the same. Calls that wait for the dead rank are delayed meanwhile, so it should be shorter than their
    timeout.
    """
    set_death_window(_checked_us("fault_reconciliation_window", value, 0) / 1e6)


# ---- registration


def _options_of_the_environment(max_group_size: int) -> MooncakeBackendOptions:
    """Return the options of a group that was given none.

    Raises:
        InvalidArgument: MOONCAKE_PG_AUTO_SYNC_ON_FAILURE=1 and MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE=0, or no switch.
    """
    deactivate = env.get_bool("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE")
    sync = env.get("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE")
    return MooncakeBackendOptions(max_group_size, False, deactivate, deactivate if sync == "" else sync)


def _create(dist_opts: Any, options: Any) -> Any:
    """Create a group whose calls use the present collective timeout; the options stay unchanged."""
    group = create(dist_opts, options, lambda: _options_of_the_environment(dist_opts.group_size))
    if not group.options.op_timeout_s:
        group.set_timeout(timedelta(microseconds=_timeouts_us["collective"]))
    _set_p2p_timeout(group)
    _groups.add(group)
    group.getPreferredHca = get_preferred_hca
    return group


def _create_for_gpus(dist_opts: Any, options: Any) -> Any:
    """Create a group whose barriers wait for the current stream, as its collectives do."""
    group = _create(dist_opts, options)
    group.waits_for_streams = True
    return group


if dist.is_available():
    register("mooncake", _create_for_gpus)
    register("mooncake-cpu", _create)
