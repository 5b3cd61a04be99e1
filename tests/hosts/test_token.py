"""The secret of a group over hosts: a file on all hosts or on none, and where one is required, no group without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epee.errors import EpeeError

from . import run_on_loopbacks

FILES = ("EPEE_TOKEN_FILE", "EPEE_REQUIRE_TOKEN_FILE")


def make_a_group(rank: int, num_ranks: int, files: tuple[str, ...], required: str) -> str:
    """Make a group with such a file on this rank's host; return what comes of it."""
    os.environ |= {name: value for name, value in zip(FILES, (files[rank], required), strict=True) if value}
    try:
        group = dist.new_group(backend="epee")
        x = torch.ones(1, device="cpu")
        dist.all_reduce(x, group=group)
        told = f"sum {x.item():g}"
        dist.destroy_process_group(group)
    except EpeeError as exc:
        told = f"{type(exc).__name__}: {exc}"
    finally:
        for name in FILES:
            os.environ.pop(name, None)
    dist.barrier()
    return told


@pytest.mark.parametrize(
    ("which", "required", "words"),
    [
        ((True, True), "1", "sum 2"),
        ((False, False), "", "sum 2"),
        ((False, False), "1", "EPEE_REQUIRE_TOKEN_FILE=1 demands EPEE_TOKEN_FILE on every host"),
        ((True, False), "", "EPEE_TOKEN_FILE must be set on all hosts or on none"),
        ((False, True), "", "EPEE_TOKEN_FILE must be set on all hosts or on none"),
    ],
)
def test_a_group_has_a_token_file_on_all_hosts_or_on_none(
    which: tuple[bool, ...], required: str, words: str, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o400)
    files = tuple(str(secret) if has_one else "" for has_one in which)
    told = run_on_loopbacks(make_a_group, (0, 1), files, required, backend="gloo", timeout_s=60)
    assert all(words in each for each in told), told
