"""Kernels are called by what they do, so that profilers, and benchmarks that read their tables, find them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from epee.backend.cuda import params as collectives
from epee.backend.cuda.messages import params as messages
from epee.ep.latency.gpu import params as latency_kernels
from epee.gpu import params as throughput_params
from epee.gpu.hosts import HOST_KERNELS
from epee.gpu.layout import COUNT_KERNELS
from epee.gpu.routing_map import MAP_KERNELS
from epee.jit.params import NAMESPACE, kernel_symbol
from epee.jit.source import CSRC
from tests.csrc.emulated import build, has_compiler

WORDS = ("dispatch", "combine", "barrier", "layout")
COLLECTIVES = {**collectives.KERNELS, **collectives.DIRECT_KERNELS, **collectives.MASKED_KERNELS}
ALL = {**throughput_params.KERNELS, **latency_kernels.KERNELS, **COUNT_KERNELS, **MAP_KERNELS, **HOST_KERNELS}
NAMES = [name for entries in ALL.values() for name in entries]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_begins_with_the_one_thing_that_the_kernel_does(name: str) -> None:
    assert name.startswith(WORDS)
    assert sum(word in name for word in WORDS) == 1


def test_no_name_stands_twice() -> None:
    others = (*COLLECTIVES.values(), *messages.KERNELS.values())
    names = [*NAMES, *(name for entries in others for name in entries)]
    assert max(Counter(names).values()) == 1


def test_a_collective_is_not_taken_for_a_call_of_a_buffer() -> None:
    names = [name for entries in COLLECTIVES.values() for name in entries]
    assert all(name.startswith("collective_") for name in names)
    assert not any(word in name for name in names for word in ("dispatch", "combine", "layout"))


def test_a_message_is_not_taken_for_a_call_of_a_buffer() -> None:
    names = [name for entries in messages.KERNELS.values() for name in entries]
    assert all(name.startswith("message_") for name in names)
    assert not any(word in name for name in names for word in WORDS)


@pytest.mark.parametrize("kernels", [throughput_params.KERNELS, latency_kernels.KERNELS])
def test_the_names_say_the_mode(kernels: dict[str, dict[str, type]]) -> None:
    mode = "latency" if kernels is latency_kernels.KERNELS else "throughput"
    names = [name for entries in kernels.values() for name in entries if name != "barrier"]
    assert all(f"_{mode}" in name for name in names), names


def test_every_kernel_stands_in_the_namespace_and_in_the_table() -> None:
    for path in (CSRC / "kernels").rglob("*.cuh"):
        before, _, inside = path.read_text().partition(f"namespace {NAMESPACE} {{")
        assert "__global__" not in before, path.name
        assert 'extern "C"' not in inside, path.name
        found = set(re.findall(r"__global__ void (?:__\w+__\([^)]*\)\s+)+(\w+)(?=\()", inside))
        assert found <= set({**ALL, **COLLECTIVES, **messages.KERNELS}.get(str(path.relative_to(CSRC)), {})), path


@pytest.mark.compiler
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_symbols_are_spelled_as_the_compiler_spells_them() -> None:
    path, params = "kernels/barrier.cuh", throughput_params.BarrierParams
    library = build(path, throughput_params.kernel_head(2, 2), (("barrier", params.__name__),))
    assert getattr(library, kernel_symbol("barrier", params))
    with pytest.raises(AttributeError):
        getattr(library, kernel_symbol("barriers", params))
