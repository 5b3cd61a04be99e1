"""The text that is compiled: complete, each file once, with the places of its lines; generated structs."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from epee.errors import InvalidArgument
from epee.gpu.params import KERNELS, kernel_head
from epee.jit.params import constants_source, offsets_source, struct_source
from epee.jit.source import CSRC, flatten
from epee.memory.layout import Field, Layout


class Inner(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 3),)


class Outer(ctypes.Structure):
    _fields_ = (("inner", Inner), ("count", ctypes.c_int32), ("factor", ctypes.c_float))


@pytest.mark.parametrize("path", KERNELS)
def test_flat_text_needs_no_other_file(path: str) -> None:
    text = flatten(path, kernel_head(4, 16))
    assert not [line for line in text.splitlines() if re.match(r'\s*#\s*include\s+"', line)]
    marks = re.findall(r'#line 1 "(epee/csrc/[^"]+)"', text)
    assert len(marks) == len(set(marks)), "a file stands twice"
    assert f"epee/csrc/{path}" in marks


def test_line_marks_name_the_place() -> None:
    path = "kernels/throughput/dispatch.cuh"
    number, name = 0, ""
    wanted = (CSRC / path).read_text().splitlines()
    for line in flatten(path, kernel_head(2, 16)).splitlines():
        mark = re.match(r'#line (\d+) "(.*)"', line)
        if mark:
            number, name = int(mark[1]), mark[2]
            continue
        if name == f"epee/csrc/{path}" and "#pragma once" not in wanted[number - 1]:
            assert line == wanted[number - 1]
        number += 1


def test_struct_source_states_every_field_and_the_size() -> None:
    text = struct_source(Outer)
    assert "Inner inner;" in text
    assert "i32 count;" in text
    assert "float factor;" in text
    assert f"sizeof(Outer) == {ctypes.sizeof(Outer)}" in text
    assert "u64 words[3];" in struct_source(Inner)


def test_type_without_fixed_width_is_refused() -> None:
    class Bad(ctypes.Structure):
        _fields_ = (("x", ctypes.c_double),)

    with pytest.raises(InvalidArgument, match=r"Bad\.x: no C\+\+ type for c_double"):
        struct_source(Bad)


def test_constants_and_offsets() -> None:
    assert constants_source({"kSmall": 7, "kLarge": 1 << 40}) == (
        f"constexpr int kSmall = 7;\nconstexpr u64 kLarge = {1 << 40}ull;\n"
    )
    layout = Layout(Field("first", torch.int64, (3,)), Field("second_one", torch.int32, (5,)))
    assert offsets_source(layout, ["second_one"], "Control") == "constexpr u64 kControlSecondOneOffset = 64;\n"


def test_assembly_stays_in_its_folder() -> None:
    offenders = [
        path.name for path in CSRC.rglob("*.cuh") if path.parent.name != "ptx" and "asm" in path.read_text().split()
    ]
    assert not offenders


def test_no_kernel_file_is_longer_than_500_lines() -> None:
    assert not [path.name for path in CSRC.rglob("*.cuh") if len(path.read_text().splitlines()) > 500]
