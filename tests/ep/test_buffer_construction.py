"""Making a Buffer: bad arguments, ranks that disagree, a bad environment. All ranks learn of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from tests.harness import run_ranks

GOOD = {"num_experts": 12, "hidden": 64, "num_topk": 2, "max_tokens_per_rank": 8, "dtype": torch.bfloat16}
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "experts not divisible": ({"num_experts": 13}, ("num_experts must be a multiple", "13", "3 ranks")),
    "no experts": ({"num_experts": 0}, ("num_experts must be", "0")),
    "hidden 12": ({"hidden": 12}, ("hidden must be a multiple of 8", "12")),
    "hidden 0": ({"hidden": 0}, ("hidden must be", "0")),
    "hidden text": ({"hidden": "64"}, ("hidden must be", "'64'")),
    "top-33": ({"num_topk": 33}, ("num_topk must be", "32", "33")),
    "top-0": ({"num_topk": 0}, ("num_topk must be", "0")),
    "no tokens": ({"max_tokens_per_rank": 0}, ("max_tokens_per_rank must be", "0")),
    "int32 rows": ({"dtype": torch.int32}, ("dtype must be", "bfloat16", "int32")),
    "FP8 rows": ({"dtype": torch.float8_e4m3fn}, ("dtype must be", "float8_e4m3fn")),
    "no slots": ({"num_slots": 0}, ("num_slots must be", "0")),
    "negative capacity": ({"max_recv_rows": -1}, ("max_recv_rows must be", "-1")),
    "no such device": ({"device": "meta"}, ("device must be the CPU", "meta")),
}
CONFLICTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "num_experts": ({"num_experts": 24}, ("num_experts", "12", "24")),
    "hidden": ({"hidden": 128}, ("hidden", "64", "128")),
    "num_topk": ({"num_topk": 4}, ("num_topk", "2", "4")),
    "max_tokens_per_rank": ({"max_tokens_per_rank": 9}, ("max_tokens_per_rank", "8", "9")),
    "dtype": ({"dtype": torch.float16}, ("dtype", "bfloat16", "float16")),
    "num_slots": ({"num_slots": 3}, ("num_slots", "2", "3")),
    "max_recv_rows": ({"max_recv_rows": 99}, ("max_recv_rows", "99")),
    "one rank refuses": ({"hidden": 12}, ("hidden must be a multiple of 8",)),
}


def _construct(rank: int, num_ranks: int) -> dict[str, tuple[str, str]]:
    results = {}

    def attempt(name: str, changes: dict[str, Any]) -> None:
        try:
            epee.Buffer(dist.group.WORLD, **{**GOOD, **changes}).close()
            results[name] = ("nothing", "")
        except epee.EpeeError as exc:
            results[name] = (type(exc).__name__, str(exc))

    for name, (changes, _) in BAD_ARGUMENTS.items():
        attempt(name, changes)
    for name, (changes, _) in CONFLICTS.items():
        attempt(f"conflict {name}", changes if rank == 2 else {})
    attempt("good", {})
    return results


@pytest.fixture(scope="module")
def constructed() -> list[dict[str, tuple[str, str]]]:
    """What three ranks saw when they made buffers."""
    return run_ranks(_construct, 3)


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_construction_is_refused(constructed: list[dict[str, tuple[str, str]]], name: str) -> None:
    for kind, message in (results[name] for results in constructed):
        assert kind in ("InvalidArgument", "UnsupportedError"), message
        missing = [words for words in BAD_ARGUMENTS[name][1] if words not in message]
        assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicting_construction_is_the_same_error_everywhere(
    constructed: list[dict[str, tuple[str, str]]], name: str
) -> None:
    kinds, messages = zip(*(results[f"conflict {name}"] for results in constructed), strict=True)
    missing = [words for words in CONFLICTS[name][1] if words not in messages[0]]
    assert not missing, f"{missing} not in: {messages[0]}"
    if name == "one rank refuses":
        assert kinds == ("MismatchError", "MismatchError", "InvalidArgument"), messages
        assert "rank 2" in messages[0]
        return
    assert set(kinds) == {"MismatchError"}
    assert len(set(messages)) == 1, "the same text on all ranks"
    assert "rank 2" in messages[0]


def test_construction_works_after_all_that(constructed: list[dict[str, tuple[str, str]]]) -> None:
    assert [results["good"][0] for results in constructed] == ["nothing"] * 3


def test_a_group_is_needed() -> None:
    for group in ("world", 3):
        with pytest.raises(epee.InvalidArgument, match="group must be"):
            epee.Buffer(group, **GOOD)  # type: ignore[arg-type]


def _bad_environment(rank: int, num_ranks: int) -> str:
    os.environ["EPEE_TIMEOUT_S"] = "nan"
    try:
        epee.Buffer(dist.group.WORLD, **GOOD)
    except epee.InvalidArgument as exc:
        return str(exc)
    return ""


def test_bad_environment_names_the_variable() -> None:
    (message,) = run_ranks(_bad_environment, 1)
    assert "EPEE_TIMEOUT_S" in message
    assert "nan" in message
