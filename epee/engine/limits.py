"""Limits of a group, equal on all ranks: its size, the size of its staging memory, and its modes."""

from __future__ import annotations

from ..view.group import FAULT_MODES, STALL_POLICIES

MAX_RANKS = 64
MIN_STAGING_BYTES = 64 << 10
MAX_STAGING_BYTES = 4 << 30
MODES = tuple(f"{fault_mode}/{on_stall}" for fault_mode in FAULT_MODES for on_stall in STALL_POLICIES)
