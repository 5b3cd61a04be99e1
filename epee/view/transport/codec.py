"""The encoding of single values in a frame, from which `wire.py` builds the layout of each message.

Numbers are signed 64-bit, little endian; bytes and texts carry their length, tuples their count. Each codec checks what
it writes and what it reads against the same limits, and raises `Wrong`, which the caller turns into `InvalidArgument`
or `ProtocolError`. Plain bytes in one process: no other process reads or writes them meanwhile.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

_INT64 = struct.Struct("<q")


class Wrong(Exception):
    """A value breaks the layout; becomes `ProtocolError` or `InvalidArgument` where the direction is known."""


class Cursor:
    """A frame and the position up to which it has been read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int, name: str) -> bytes:
        """Return the next `count` bytes; `Wrong` when the frame has fewer."""
        chunk = self.data[self.at : self.at + count]
        if len(chunk) != count:
            raise Wrong(f"{name} ends after {len(chunk)} of {count} bytes")
        self.at += count
        return chunk


class Codec:
    """The encoding of one kind of value."""

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append `value`; `Wrong` when it breaks a rule."""
        raise NotImplementedError

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a value; `Wrong` when it breaks a rule or the frame is too short."""
        raise NotImplementedError


class Number(Codec):
    """An integer from `low` to `high`: 8 bytes."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append an int."""
        if type(value) is not int:
            raise Wrong(f"{name} must be an int, got {type(value).__name__}")
        out += _INT64.pack(self._checked(value, name))

    def take(self, frame: Cursor, name: str) -> int:
        """Read an int."""
        return self._checked(_INT64.unpack(frame.take(8, name))[0], name)

    def _checked(self, value: int, name: str) -> int:
        if not self.low <= value <= self.high:
            raise Wrong(f"{name} must lie in {self.low} ... {self.high}, got {value}")
        return value


class Flag(Codec):
    """A bool: one byte, 0 or 1."""

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append a bool."""
        if type(value) is not bool:
            raise Wrong(f"{name} must be a bool, got {type(value).__name__}")
        out += b"\1" if value else b"\0"

    def take(self, frame: Cursor, name: str) -> bool:
        """Read a bool."""
        byte = frame.take(1, name)
        if byte not in (b"\0", b"\1"):
            raise Wrong(f"{name} must be 0 or 1, got {byte[0]}")
        return byte == b"\1"


class Bytes(Codec):
    """From `low` to `high` bytes, after their number."""

    def __init__(self, low: int, high: int) -> None:
        self.length = Number(low, high)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the number of bytes and the bytes."""
        if type(value) is not bytes:
            raise Wrong(f"{name} must be bytes, got {type(value).__name__}")
        self.length.put(out, len(value), f"length of {name}")
        out += value

    def take(self, frame: Cursor, name: str) -> bytes:
        """Read as many bytes as the number before them gives."""
        return frame.take(self.length.take(frame, f"length of {name}"), name)


class Text(Codec):
    """A sentence for people: UTF-8."""

    def __init__(self, high: int) -> None:
        self.raw = Bytes(0, high)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append a str."""
        if type(value) is not str:
            raise Wrong(f"{name} must be a str, got {type(value).__name__}")
        try:
            self.raw.put(out, value.encode(), name)
        except UnicodeEncodeError as exc:
            raise Wrong(f"{name} is no text: {exc.reason}") from exc

    def take(self, frame: Cursor, name: str) -> str:
        """Read a str."""
        try:
            return self.raw.take(frame, name).decode()
        except UnicodeDecodeError as exc:
            raise Wrong(f"{name} is no UTF-8: {exc.reason}") from exc


class Choice(Codec):
    """One of a few words: its index."""

    def __init__(self, *values: str) -> None:
        self.values = values
        self.index = Number(0, len(values) - 1)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the index of a word."""
        if value not in self.values:
            raise Wrong(f"{name} must be one of {self.values}, got {value!r}")
        self.index.put(out, self.values.index(value), name)

    def take(self, frame: Cursor, name: str) -> str:
        """Read a word."""
        return self.values[self.index.take(frame, name)]


class Many(Codec):
    """A tuple; with `key`, strictly ascending in it."""

    def __init__(self, item: Codec, high: int, key: Callable[[Any], Any] | None = None) -> None:
        self.item, self.count, self.key = item, Number(0, high), key

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the number of items and the items."""
        if type(value) is not tuple:
            raise Wrong(f"{name} must be a tuple, got {type(value).__name__}")
        self.count.put(out, len(value), f"number of {name}")
        for item in value:
            self.item.put(out, item, name)
        self._check_order(value, name)

    def take(self, frame: Cursor, name: str) -> tuple[Any, ...]:
        """Read a tuple."""
        count = self.count.take(frame, f"number of {name}")
        items = tuple(self.item.take(frame, name) for _ in range(count))
        self._check_order(items, name)
        return items

    def _check_order(self, items: tuple[Any, ...], name: str) -> None:
        keys = [] if self.key is None else [self.key(item) for item in items]
        for before, after in itertools.pairwise(keys):
            if before >= after:
                raise Wrong(f"{name} must be in order without repeats, got {after} after {before}")


class Maybe(Codec):
    """A value or None."""

    def __init__(self, item: Codec) -> None:
        self.item, self.there = item, Number(0, 1)

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append whether there is a value, and the value."""
        self.there.put(out, int(value is not None), f"presence of {name}")
        if value is not None:
            self.item.put(out, value, name)

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a value or None."""
        return self.item.take(frame, name) if self.there.take(frame, f"presence of {name}") else None


class TupleCodec(Codec):
    """The codec of a named tuple: its fields in order; `rule` returns the error of their combination, or nothing."""

    def __init__(self, kind: Any, *fields: Codec, rule: Callable[[Any], str] | None = None) -> None:
        self.names = tuple(kind.__annotations__)
        assert len(fields) == len(self.names)
        self.kind, self.fields, self.rule = kind, fields, rule

    def put(self, out: bytearray, value: Any, name: str) -> None:
        """Append the fields."""
        if type(value) is not self.kind:
            raise Wrong(f"{name} must be a {self.kind.__name__}, got {type(value).__name__}")
        for codec, field, item in zip(self.fields, self.names, value, strict=True):
            codec.put(out, item, f"{name}.{field}")
        self._check(value, name)

    def take(self, frame: Cursor, name: str) -> Any:
        """Read a named tuple whose fields fit together."""
        named = zip(self.fields, self.names, strict=True)
        value = self.kind(*[codec.take(frame, f"{name}.{field}") for codec, field in named])
        self._check(value, name)
        return value

    def _check(self, value: Any, name: str) -> None:
        wrong = self.rule(value) if self.rule else ""
        if wrong:
            raise Wrong(f"{name}: {wrong}")
