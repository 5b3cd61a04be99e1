"""A c10d store whose operations end by a deadline: those of one creation, or of one process that joins.

torch bounds the wait for a missing key, by the store's own timeout. The answer of the store's process to any operation,
the end of such a wait included, is awaited without a limit, inside native code that no signal interrupts. So operations
run on a thread of this object, one at a time, and the caller waits for each until the deadline. The thread begins with
the first operation. One that is not answered keeps it: later operations raise at once, and it ends when the store's
process answers or ends. In a process that gets no thread the operations run on the caller's.

A missing key is awaited by checks with growing pauses, because torch logs warnings about each wait that ends without
it.
"""

from __future__ import annotations

import _thread
import copy
import math
import queue
import time
from collections.abc import Callable
from typing import Any

from ...errors import CommTimeoutError, InvalidState, context, expected
from ...values import MAX_S

GRACE_S = 1.0  # behind the deadline, for all operations together: a rank that fails reports it
FLOOR_S = 0.05  # for each operation, also when no grace is left: a store that works answers
_PAUSES_S = 0.0001, 0.02  # between two checks for a key: the first, and the longest


class BoundedStore:
    """A store with a deadline, for use in a `with` statement.

    Args:
        store: of torch, or another one with its methods.
        timeout_s: until the deadline.
        rank: this process's, for errors.
        op: the operation that uses the store, for errors.

    Attributes:
        underlying_store: the store, under the name that torch's `PrefixStore` has for it.
        deadline: `time.monotonic()` by which every operation ends, or `GRACE_S` later.

    Every method raises CommTimeoutError if the store's process does not answer, InvalidState behind the `with`, and
    what the store raises.
    """

    def __init__(self, store: Any, timeout_s: float, rank: int, op: str = "init") -> None:
        self.underlying_store, timeout_s = store, min(timeout_s, MAX_S)
        self.deadline = time.monotonic() + timeout_s
        self._thread = _StoreThread(self.deadline, f"{context(op, rank=rank)}: ", timeout_s)

    def __enter__(self) -> BoundedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def over(self, store: Any) -> BoundedStore:
        """Return another store with the deadline and the thread of this one."""
        other = copy.copy(self)
        other.underlying_store = store
        return other

    def hasten(self, limit_s: float) -> None:
        """Let all operations end within `limit_s` from now: this process fails anyhow, and only reports it."""
        self._thread.deadline = min(self._thread.deadline, time.monotonic() + limit_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._thread.run(self.underlying_store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return bytes(self._thread.run(self.underlying_store.get, key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all these keys are set."""
        return bool(self._thread.run(self.underlying_store.check, keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._thread.run(self.underlying_store.add, key, amount))

    def compare_set(self, key: str, expected_value: str, value: str) -> bytes:
        """Set a key if it has the expected value, and return the value that it has then."""
        return bytes(self._thread.run(self.underlying_store.compare_set, key, expected_value, value))

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._thread.run(self.underlying_store.delete_key, key)

    def find(self, key: str, wait_s: float, until: float = math.inf) -> bytes | None:
        """Return the value of a key, or None if it has not been set within `wait_s`.

        An exception of a signal handler comes at once; the thread is free for other operations after `wait_s`.

        Args:
            until: a deadline for the answer of the store's process, before that of all operations.
        """
        found = self._thread.run(_find, key, wait_s, self.underlying_store, until=until)
        return None if found is None else bytes(found)

    def read(self, key: str, wait_s: float) -> bytes:
        """Return the value of a key, which a running job has set long ago.

        Raises:
            CommTimeoutError: it has not been set within `wait_s`, or the store's process does not answer in that time.
        """
        found = self.find(key, wait_s, time.monotonic() + wait_s)
        if found is None:
            raise CommTimeoutError(f"no process has set the key {key} within {wait_s:g} s")
        return found


def _find(key: str, wait_s: float, store: Any) -> Any:
    until, (pause_s, longest_s) = time.monotonic() + wait_s, _PAUSES_S
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return store.get(key)


class _StoreThread:
    """The thread of a store's operations, and their deadline."""

    def __init__(self, deadline: float, where: str, timeout_s: float) -> None:
        self.deadline, self._where, self._timeout_s = deadline, where, timeout_s
        self._grace_s = GRACE_S
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_begun = self._is_lost = self._is_closed = False

    def run(self, call: Callable[..., Any], key: str | list[str], *args: Any, until: float = math.inf) -> Any:
        """Return the result of an operation.

        Raises:
            CommTimeoutError: it does not end by the deadline, or an earlier one has not.
            InvalidState: the thread is closed.
        """
        began, until = time.monotonic(), min(until, self.deadline)
        if self._is_closed:
            raise InvalidState(f"{self._where}the store is used behind its `with`; make another BoundedStore")
        if self._is_lost:
            raise self._silence(call, key, 0.0)
        if not self._has_begun and not self._begin():
            return call(key, *args)
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._asked.put((answer, call, key, *args))
        try:
            result, error = answer.get(timeout=max(FLOOR_S, max(0.0, until - began) + self._grace_s))
        except expected(queue.Empty):
            self._is_lost = True
            raise self._silence(call, key, time.monotonic() - began) from None
        finally:
            self._grace_s -= min(self._grace_s, max(0.0, time.monotonic() - max(began, self.deadline)))
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def close(self) -> None:
        """Let the thread end, when its operation has been answered."""
        self._is_closed = True
        self._asked.put(None)

    def _begin(self) -> bool:
        """Start the thread, and return whether there is one.

        A `threading.Thread` takes twice as long. The first step of this one is not awaited: if it finds no memory
        for it, the first operation ends by the deadline.
        """
        self._has_begun = True  # before it is: a signal handler's exception may come in between
        try:
            _thread.start_new_thread(_serve, (self._asked,))
        except expected(RuntimeError, MemoryError):  # the creation fails by that soon, and needs the store to report it
            self._has_begun = False
            return False
        return True

    def _silence(self, call: Callable[..., Any], key: str | list[str], elapsed_s: float) -> CommTimeoutError:
        name = getattr(call, "__name__", "an operation").strip("_")
        return CommTimeoutError(
            f"{self._where}the store of the rendezvous does not answer ({name} of {key}, waited {elapsed_s:.1f} s; the "
            f"timeout is {self._timeout_s:g} s): its process is stopped, or its host cannot be reached; check the "
            "process that holds the store (rank 0's, or torchrun's agent), and start all ranks"
        )


def _serve(asked: queue.SimpleQueue[Any]) -> None:
    """Run operations until there is a None."""
    while (request := asked.get()) is not None:
        answer, call, *args = request
        try:
            answer.put((call(*args), None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            answer.put((None, error))
        request = answer = call = args = None
