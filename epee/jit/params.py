"""Argument structs: one `ctypes.Structure` per kernel, from which the C++ text is generated, so both sides agree.

A kernel takes exactly one struct by value. `struct_source` emits its declaration, that of the structs inside it, and a
`static_assert` on the size; `constants_source` emits compile-time constants; `offsets_source` emits the offsets of a
`memory.layout.Layout`; `kernel_symbol` returns the compiler's name of a kernel. `sized` makes a struct with arrays that
have an element for each rank.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InvalidArgument
from ..memory.layout import Layout

NAMESPACE = "epee"  # of kernels
_TYPE_NAMES: dict[Any, str] = {
    ctypes.c_uint64: "u64",
    ctypes.c_int64: "i64",
    ctypes.c_uint32: "u32",
    ctypes.c_int32: "i32",
    ctypes.c_float: "float",
}


@dataclass(frozen=True)
class PerRank:
    """The type of a member of a `RankSized`: an array with `each` elements of type `kind` for each rank, and `more`."""

    kind: Any
    each: int = 1
    more: int = 0


class RankSized(ctypes.Structure):
    """A struct whose size depends on the number of ranks; only classes that `sized` returns have instances.

    Attributes:
        members: names and types of the fields; besides types of ctypes, `PerRank` and subclasses of this class.
    """

    members: ClassVar[tuple[tuple[str, Any], ...]] = ()


@functools.cache
def sized(struct: type[ctypes.Structure], room: int) -> Any:  # a class whose fields no type checker knows
    """Return the class of `struct` with arrays for `room` ranks; a struct without such arrays itself."""
    if not issubclass(struct, RankSized):
        return struct
    fields = []
    for name, kind in struct.members:
        if isinstance(kind, PerRank):
            kind = kind.kind * (kind.each * room + kind.more)
        elif issubclass(kind, ctypes.Structure):
            kind = sized(kind, room)
        fields.append((name, kind))
    return type(struct.__name__, (struct,), {"_fields_": fields, "__doc__": struct.__doc__})


def sized_kernels(
    kernels: Mapping[str, Mapping[str, type[ctypes.Structure]]], room: int
) -> dict[str, dict[str, type[ctypes.Structure]]]:
    """Return kernel files with their entry points and arguments, these for `room` ranks."""
    return {path: {name: sized(kind, room) for name, kind in entries.items()} for path, entries in kernels.items()}


def struct_source(struct: type[ctypes.Structure]) -> str:
    """Return the C++ declaration of `struct`, nested ones by name only (declare them before)."""
    lines = [f"struct {struct.__name__} {{"]
    lines += [f"  {_declaration(struct, name, kind)};" for name, kind, *_ in struct._fields_]
    lines += ["};", f'static_assert(sizeof({struct.__name__}) == {ctypes.sizeof(struct)}, "differs from Python");']
    return "\n".join(lines) + "\n"


def _declaration(struct: type[ctypes.Structure], name: str, kind: Any) -> str:
    if issubclass(kind, ctypes.Array):
        return f"{_type_name(struct, name, kind._type_)} {name}[{kind._length_}]"
    return f"{_type_name(struct, name, kind)} {name}"


def _type_name(struct: type[ctypes.Structure], name: str, kind: Any) -> str:
    if issubclass(kind, ctypes.Structure):
        return kind.__name__
    if kind not in _TYPE_NAMES:
        raise InvalidArgument(f"{struct.__name__}.{name}: no C++ type for {kind.__name__}; use a fixed-width type")
    return _TYPE_NAMES[kind]


def constants_source(constants: Mapping[str, int]) -> str:
    """Return one `constexpr` per entry; values beyond 32 bits are unsigned 64-bit."""
    lines = []
    for name, value in constants.items():
        kind, suffix = ("u64", "ull") if value >= 1 << 31 else ("int", "")
        lines.append(f"constexpr {kind} {name} = {value}{suffix};")
    return "\n".join(lines) + "\n"


def offsets_source(layout: Layout, names: Sequence[str], prefix: str) -> str:
    """Return `constexpr u64 k<prefix><Field>Offset` for the named fields of `layout`."""
    lines = []
    for name in names:
        words = "".join(part.capitalize() for part in name.split("_"))
        lines.append(f"constexpr u64 k{prefix}{words}Offset = {layout.offset(name)};")
    return "\n".join(lines) + "\n"


def kernel_symbol(name: str, params: type[ctypes.Structure]) -> str:
    """Return the symbol of `epee::<name>(params)` in a compiled file.

    Kernels are in a namespace, and their names begin with their operation: profilers show `epee::dispatch_...`, and
    DeepEP's own benchmarks search for `dispatch` and `combine`, and for `::dispatch` and `::combine` to separate the
    phases of calls. The symbol follows the C++ ABI of Linux.
    """
    parts = (NAMESPACE, name)
    return f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}E{len(params.__name__)}{params.__name__}"
