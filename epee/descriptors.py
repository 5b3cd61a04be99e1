"""Descriptors that are closed wherever an exception leaves the code that opened them.

A signal handler may raise between any two lines, also in a clause that closes a descriptor after an error. So a
descriptor is an object, which no line of Python makes, until the code that opened it has handed it on; it is closed at
the latest when it is deleted, which an exception does with the frames that it leaves. Only an exception inside the few
lines of this module can still leave one open.
"""

from __future__ import annotations

import os


class Descriptor(int):
    """An open descriptor, or -1. An exception that leaves its `with` closes it, and so does its deletion."""

    is_kept = False  # or closed
    _close = staticmethod(os.close)  # at the exit of the interpreter the module's names are gone

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # at once, as the exception keeps the frame that holds it
            self.close()

    def close(self) -> None:
        """Close it; idempotent."""
        if not self.is_kept and self >= 0:
            self.is_kept = True
            self._close(self)

    __del__ = close

    def keep(self) -> int:
        """Return its number; it belongs to the caller from now on."""
        self.is_kept = True
        return int(self)
