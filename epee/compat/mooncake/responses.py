"""Enums and response objects of Mooncake's control calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ProposalStatus(enum.Enum):
    """How a proposal to change the active ranks ended."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


class SyncStatus(enum.Enum):
    """How `sync_after_failure` ended."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


ViewUpdateStatus = ProposalStatus  # as Mooncake called it before
SyncAfterFailureStatus = SyncStatus  # as it calls it now


@dataclass(frozen=True)
class ProposeViewUpdateResponse:
    """Answer of `activate_ranks`, `recover_ranks` and `deactivate_ranks`."""

    status: ProposalStatus
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


@dataclass(frozen=True)
class SyncAfterFailureResponse:
    """Answer of `sync_after_failure`."""

    status: SyncStatus
    reject_reason: str = ""
