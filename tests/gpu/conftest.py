"""GPU tests are skipped, with the reason, where there are too few GPUs."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("gpu"):
        wanted = mark.args[0] if mark.args else 1
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if present < wanted:
            pytest.skip(f"needs {wanted} GPUs, this machine has {present}")
