"""Bytes that a rank's buffers hold for calls of given sizes, with reasons; and shared memory of running processes.

Sizes are those of the buffers themselves (`Buffer.slot_bytes_for`, `LatencyBuffer.bytes_for`, `memory_for`), by which
they are created. The memory in use is read from `/proc`: shared memory has no name in a file system, but each process
that holds a descriptor of it shows it there. It lies in RAM, not in /dev/shm. The section "gpu" reports the free memory
of GPUs; `buffer.nbytes` and the log report epee's part of a GPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..ep import Buffer, LatencyBuffer, memory_for
from ..ep.config import MAX_LATENCY_TOKENS, BufferConfig
from ..errors import InvalidArgument
from ..memory.arena import num_pool_slots
from .finding import Finding, Verdict

_MIB = 1 << 20
_SLOTS = 2  # of a buffer by default
_LATENCY_TOKENS = 128  # of a decode step


class AskedSizes(NamedTuple):
    """The sizes of calls.

    Attributes:
        num_ranks: of the group.
        num_experts: over all ranks.
        hidden: elements of a row, bfloat16.
        num_topk: experts of a token.
        num_tokens: most tokens of a rank.
    """

    num_ranks: int
    num_experts: int
    hidden: int
    num_topk: int
    num_tokens: int


class HeldRegion(NamedTuple):
    """Memory that processes share.

    Attributes:
        name: its purpose.
        nbytes: address space.
        used_bytes: that have been written, and so are RAM.
        pids: processes that hold it.
    """

    name: str
    nbytes: int
    used_bytes: int
    pids: frozenset[int]


def parse_sizes(text: str) -> AskedSizes:
    """Return the sizes in the form of `--sizes`.

    Raises:
        InvalidArgument: they are not five numbers above 0.
    """
    parts = text.split(",")
    if len(parts) != len(AskedSizes._fields) or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InvalidArgument(
            f"--sizes takes RANKS,EXPERTS,HIDDEN,TOPK,TOKENS, numbers above 0, got {text!r}; as in 4,256,7168,8,4096"
        )
    return AskedSizes(*map(int, parts))


def needed(asked: AskedSizes) -> list[Finding]:
    """Return the bytes of a rank's buffers for calls of such sizes, and their purpose."""
    calls = (
        f"{asked.num_ranks} ranks, {asked.num_experts} experts, hidden {asked.hidden} bfloat16, "
        f"top-{asked.num_topk}, {asked.num_tokens} tokens"
    )
    findings = [Finding("buffers", "sizes", Verdict.OK, calls)]
    for name, explain in (
        ("Buffer, GPUs", _on_gpus),
        ("Buffer, CPUs", _on_cpus),
        ("LatencyBuffer", _latency),
        ("drop-in layers", _drop_in),
    ):
        try:
            findings.append(Finding("buffers", name, Verdict.OK, explain(asked)))
        except InvalidArgument as exc:
            findings.append(Finding("buffers", name, Verdict.WARN, f"cannot be made: {exc}", "choose other sizes"))
    return findings


def _config(sizes: AskedSizes, num_tokens: int, is_latency: bool = False) -> BufferConfig:
    per_call = sizes.num_experts, sizes.hidden, sizes.num_topk, num_tokens, torch.bfloat16, _SLOTS
    config = BufferConfig(sizes.num_ranks, *per_call, is_latency=is_latency)
    config.check()
    return config


def _on_gpus(sizes: AskedSizes) -> str:
    config = _config(sizes, sizes.num_tokens)
    slot, expert = Buffer.slot_bytes_for(config), Buffer.expert_slot_bytes_for(config)
    return (
        f"{_mib((_SLOTS + 1) * slot)}: {_SLOTS} live results and one slot for arriving rows, {_mib(slot)} each for "
        f"{config.capacity('rank')} rows; with the first combine of the expert layout {_mib(2 * expert)} more: 2 slots "
        f"of {config.capacity('expert')} rows. Buffers made by of_sizes share it"
    )


def _on_cpus(sizes: AskedSizes) -> str:
    config = _config(sizes, sizes.num_tokens)
    num_slots = num_pool_slots(_SLOTS)
    parts = []
    for layout in ("rank", "expert"):
        slot = config.slot_layout(layout, 1).nbytes
        parts.append(f"{_mib(num_slots * slot)} for the {layout} layout: {num_slots} slots of {_mib(slot)}")
    return f"{'; '.join(parts)}. Address space, taken at the first call; pages are RAM when they are first written"


def _latency(sizes: AskedSizes) -> str:
    num_tokens = min(sizes.num_tokens, _LATENCY_TOKENS)
    sized = sizes.num_experts, sizes.hidden, sizes.num_topk
    nbytes = LatencyBuffer.bytes_for(sizes.num_ranks, *sized, num_tokens)
    return (
        f"{_mib(nbytes)} for {num_tokens} tokens (at most {MAX_LATENCY_TOKENS}), in which smaller calls fit: "
        f"{2 * _SLOTS} open or finished calls, with a slot for each token of {sizes.num_ranks} ranks"
    )


def _drop_in(sizes: AskedSizes) -> str:
    slots, expert = memory_for(sizes.num_ranks, sizes.num_tokens, sizes.hidden, sizes.num_topk)
    return (
        f"{_mib(slots)} for dispatch and combine, and {_mib(expert)} for expanded rows. The constructor makes them if "
        "it is given so many bytes (size hints return them), else the first call; a larger call makes more"
    )


def in_use(proc: str = "/proc") -> list[Finding]:
    """Return the memory that epee's processes of this user share now."""
    regions = shared_regions(proc)
    if not regions:
        return [Finding("buffers", "in use", Verdict.OK, "nothing: no process of this user has buffers or groups")]
    pids = frozenset().union(*(region.pids for region in regions))
    kinds: dict[str, int] = {}
    for region in regions:
        kinds[region.name] = kinds.get(region.name, 0) + region.used_bytes
    largest = sorted(kinds.items(), key=lambda kind: -kind[1])[:3]
    value = (
        f"{_mib(sum(region.used_bytes for region in regions))} of RAM in {len(regions)} regions "
        f"({_mib(sum(region.nbytes for region in regions))} of address space) of {len(pids)} processes; most in "
        + ", ".join(f"{name} {_mib(nbytes)}" for name, nbytes in largest)
    )
    return [Finding("buffers", "in use", Verdict.OK, value)]


def shared_regions(proc: str = "/proc") -> list[HeldRegion]:
    """Return epee's regions of all processes whose descriptors this process may read."""
    found: dict[tuple[int, int], HeldRegion] = {}
    for pid, name, status in _descriptors(proc):
        key = status.st_dev, status.st_ino
        others = found[key].pids if key in found else frozenset()
        found[key] = HeldRegion(name, status.st_size, 512 * status.st_blocks, others | {pid})
    return list(found.values())


def _descriptors(proc: str) -> Iterator[tuple[int, str, os.stat_result]]:
    for folder in Path(proc).iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            entries = list((folder / "fd").iterdir())
        except OSError:  # another user's, or it has just ended
            continue
        for entry in entries:
            try:
                target = os.readlink(entry)
                if target.startswith("/memfd:epee-"):
                    yield int(folder.name), _kind(target), entry.stat()
            except OSError:  # closed meanwhile
                continue


def _kind(target: str) -> str:
    """Return the purpose of a region by its name: without the numbers of ranks, epochs and processes."""
    name = target.removeprefix("/memfd:epee-").split(" ")[0]
    return name.rstrip("0123456789-") or name


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB" if nbytes < 10 * _MIB else f"{nbytes // _MIB} MiB"
