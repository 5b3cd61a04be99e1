"""Times and numbers given by users: checks against their rules, and their form in messages."""

from __future__ import annotations

from datetime import timedelta

from .errors import InvalidArgument

MIN_S, MAX_S = 1e-6, 1e9  # a microsecond to 31 years: the range that clocks, locks and sockets of all kinds accept
MAX_US = round(MAX_S * 1e6)
MAX_SHOWN = 100  # characters of a value in a message


def seconds(value: object, name: str) -> float:
    """Return a time given by a user, a number of seconds or a `timedelta`.

    Raises:
        InvalidArgument: it is neither, or no time from a microsecond to 1e9 seconds.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise InvalidArgument(f"{name} must be a number of seconds or a timedelta, got {shown(value)}")
    if not MIN_S <= number <= MAX_S:  # before it is made a float: an int may be larger than any float
        raise InvalidArgument(f"{name} must be a time of {MIN_S:g} ... {MAX_S:g} seconds, got {shown(value)}")
    return float(number)


def longest(time: timedelta, name: str) -> float:
    """Return the seconds of a `timedelta` that torch's interface takes, where `timedelta.max` means "for ever".

    Raises:
        InvalidArgument: it is no `timedelta`, or shorter than a microsecond.
    """
    if isinstance(time, timedelta) and time.total_seconds() > MAX_S:
        return MAX_S
    if not isinstance(time, timedelta):
        raise InvalidArgument(f"{name} must be a timedelta, got {shown(time)}")
    return seconds(time, name)


def waiting_time(timeout: timedelta | None) -> float:
    """Return the seconds to wait for a `Work`; 0 where no timeout is given.

    Raises:
        InvalidArgument: it is no `timedelta`.
    """
    if timeout is None:
        return 0.0
    if not isinstance(timeout, timedelta):
        raise InvalidArgument(f"timeout must be a timedelta or None, got {shown(timeout)}")
    return max(timeout.total_seconds(), 0.0)


def is_whole(value: object, low: int, high: int) -> bool:
    """Return whether a value is an int from `low` to `high`; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def shown(value: object) -> str:
    """Return a value for a message; Python refuses to write ints of some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
