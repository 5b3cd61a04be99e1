"""Enums and response objects of Mooncake's control calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


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
