"""Torch's defaults, made useless while a public call of epee runs: device "meta", dtype float64.

A tensor of epee's that takes its device or dtype from them fails the call or spoils its result. The tests' own tensors
are made between the calls, under the usual defaults. `install` wraps every public function and method in place;
`tests.harness` does it in each process of its own when `pytest --poisoned-defaults` asked for it (an environment
variable carries the wish to ranks). Not for tests that raise exceptions between two instructions (a restore could be
skipped), nor for what users' callbacks do inside a call: their defaults are wrong there, too.

The default device belongs to a thread, the default dtype to the process: it is put back when no thread is inside.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

ASKED = "EPEE_TEST_POISONED_DEFAULTS"
_OWN_DUNDERS = ("__init__", "__call__")
# They look at their caller's frame; what they do is `Engine.wait`, which is wrapped instead.
_LEFT_OUT = {("Work", "wait"), ("Work", "_drive"), ("Work", "synchronize")}

_THREADS = "other threads of the test make tensors while a call runs, and the default dtype is the process's"
_INTERRUPTS = "raises exceptions between any two instructions, those of `poisoned` included"
_SLOW = "calls that other tests make as well, at more length"
_PROCESSES = "about processes, waits and the protocol: its tensors are those of calls that other tests make"
# Tests (beginnings of their names) that the pass does not run, and why.
NOT_RUN = {
    "tests/backend/test_any_exception.py": _INTERRUPTS,
    "tests/backend/test_interrupts.py": _INTERRUPTS,
    "tests/backend/test_interrupts_of_lists.py": _INTERRUPTS,
    "tests/ep/test_gradients.py::test_a_buffer_warns_once": "reads the file of the caller, which is that of `poisoned`",
    "tests/ep/test_interrupts.py": _INTERRUPTS,
    "tests/ep/test_latency_interrupts.py": _INTERRUPTS,
    "tests/backend/test_async.py::test_two_threads_with_a_group_each": _THREADS,
    "tests/backend/test_async.py::test_several_threads_on_one_group": _THREADS,
    "tests/backend/test_async.py::test_a_waiting_receive_does_not_block_collectives": _THREADS,
    "tests/backend/test_staging.py::test_calls_on_other_tensors_are_issued_at_once": _THREADS,
    "tests/backend/test_collectives_benchmark.py": "measures",
    "tests/backend/test_hosts_benchmark.py": "measures",
    "tests/ep/test_buffer_benchmark.py": "measures",
    "tests/backend/test_birth.py": _PROCESSES,
    "tests/backend/test_hosts_refused.py": _PROCESSES,
    "tests/backend/test_last_call.py": _PROCESSES,
    "tests/backend/test_lifetime.py": _PROCESSES,
    "tests/backend/test_newcomer.py": _PROCESSES,
    "tests/backend/test_no_memory.py": _PROCESSES,
    "tests/backend/test_no_quorum.py": _PROCESSES,
    "tests/backend/test_p2p_errors.py": _PROCESSES,
    "tests/backend/test_p2p_handshake.py": _PROCESSES,
    "tests/backend/test_p2p_model.py": _PROCESSES,
    "tests/backend/test_rank_table.py": _PROCESSES,
    "tests/backend/test_rank_twice.py": _PROCESSES,
    "tests/backend/test_shortage.py": _PROCESSES,
    "tests/backend/test_take_news.py": _PROCESSES,
    "tests/backend/test_timeouts.py": _PROCESSES,
    "tests/backend/test_told_calls.py": _PROCESSES,
    "tests/backend/test_trust.py": _PROCESSES,
    "tests/backend/test_untold.py": _PROCESSES,
    "tests/backend/test_waiting.py": _PROCESSES,
    "tests/compat/test_launcher.py": _PROCESSES,
    "tests/ep/test_buffer_distrust.py": _PROCESSES,
    "tests/ep/test_death_notifier.py": _PROCESSES,
    "tests/ep/test_host_wait.py": _PROCESSES,
    "tests/ep/test_turns.py": _PROCESSES,
    "tests/backend/test_withdrawal": _SLOW,
    "tests/backend/test_collectives.py::test_more_than_two_to_the_31_elements_work": _SLOW,
    "tests/backend/test_collectives.py::test_every_operation_equals_its_closed_form[4]": _SLOW,
    "tests/backend/test_properties.py": _SLOW,
    "tests/compat/test_deep_ep_emulated.py::test_v1_agrees_with_the_reference[1]": _SLOW,
    "tests/compat/test_deep_ep_emulated.py::test_v1_agrees_with_the_reference[4]": _SLOW,
    "tests/compat/test_deep_ep_properties.py": _SLOW,
    "tests/compat/test_likes_emulated.py::test_a_step_like_an_earlier_one_enters_few_functions": "counts functions, "
    "those of `poisoned` too",
    "tests/ep/test_buffer_properties.py": _SLOW,
    "tests/ep/test_latency_properties.py": _SLOW,
    "tests/ep/test_latency_rejoin.py::test_a_stopped_rank": _SLOW,
    "tests/nn/test_functional.py::test_gradients_agree_with_finite_differences[3": _SLOW,
}

_here = threading.local()
_lock = threading.Lock()
_inside: list[torch.dtype] = []  # of each thread that is inside, the dtype that it found
_done: set[int] = set()
_wrappers: dict[Callable[..., Any], Callable[..., Any]] = {}  # one for each function: aliases stay aliases


def _enter() -> None:
    with _lock:
        _inside.append(_inside[0] if _inside else torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")


def _leave() -> None:
    torch.set_default_device(None)
    with _lock:
        found = _inside.pop()
        if not _inside:
            torch.set_default_dtype(found)


def poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with both defaults set from its entry to its end; calls inside it change nothing more."""
    if function in _wrappers:
        return _wrappers[function]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "is_inside", False):
            return function(*args, **kwargs)
        _here.is_inside = True
        _enter()
        try:
            found = function(*args, **kwargs)
        finally:
            _leave()
            _here.is_inside = False
        _poison_hook(found)
        return found

    from tests.stand_in import stand_in  # imports epee

    _wrappers[function] = _wrappers[call] = stand_in(call)  # errors that pass it are those of the function
    return call


def _poison_hook(found: Any) -> None:
    """The hook of a latency call runs later, outside of it."""
    hook = getattr(found, "hook", None)
    if callable(hook) and not inspect.isclass(found):
        found.hook = poisoned(hook)


def _wrapped(attribute: Any) -> Any:
    """Return what takes the place of a class's attribute; the same object when nothing does."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return type(attribute)(poisoned(attribute.__func__))
    if isinstance(attribute, property):
        parts = (attribute.fget, attribute.fset, attribute.fdel)
        return property(*(part and poisoned(part) for part in parts), attribute.__doc__)
    if isinstance(attribute, functools.cached_property):
        return functools.cached_property(poisoned(attribute.func))
    return poisoned(attribute) if inspect.isfunction(attribute) else attribute


def _poison_class(kind: type) -> None:
    """Wrap the methods of a class and of its bases in epee. Private ones too: torch calls some (`_allgather_base`)."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith("epee.") or id(owner) in _done:
            continue
        _done.add(id(owner))
        for name, attribute in list(vars(owner).items()):
            if (name.startswith("__") and name not in _OWN_DUNDERS) or (owner.__name__, name) in _LEFT_OUT:
                continue
            found = _wrapped(attribute)
            if found is not attribute:
                setattr(owner, name, found)
                if isinstance(found, functools.cached_property):
                    found.__set_name__(owner, name)


def _public() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of everything that epee offers."""
    import epee
    import epee.compat.deep_ep
    import epee.compat.deep_ep.utils
    import epee.compat.mooncake.ep
    import epee.compat.mooncake.pg
    import epee.nn

    modules: tuple[Any, ...] = (epee, epee.nn, epee.nn.functional, epee.compat.mooncake.ep, epee.compat.mooncake.pg)
    for module in (*modules, epee.compat.deep_ep, epee.compat.deep_ep.utils, epee.compat.deep_ep.utils.math):
        for name in getattr(module, "__all__", [*vars(module)]):
            value = getattr(module, name)
            if getattr(value, "__module__", "").startswith("epee."):
                yield module, name


def install() -> None:
    """Wrap all public functions and methods of epee in this process; idempotent."""
    from epee.backend import group, work
    from epee.engine import engine
    from epee.ep import handle
    from epee.ep.latency import types as latency_types

    if _done:
        return
    results = (handle.CpuHandle, latency_types.LatencyHandle, latency_types.LatencyDispatched)
    for kind in (group.ProcessGroup, work.Work, work.Done, *results, latency_types.LatencyCombined):
        _poison_class(kind)
    engine.Engine.wait = poisoned(engine.Engine.wait)  # type: ignore[method-assign]
    for module, name in _public():
        value = getattr(module, name)
        if inspect.isclass(value) and not issubclass(value, BaseException):
            _poison_class(value)
        elif inspect.isfunction(value):
            setattr(module, name, poisoned(value))


def install_if_asked() -> None:
    """Do `install` when the environment asks for it."""
    if os.environ.get(ASKED):
        install()
