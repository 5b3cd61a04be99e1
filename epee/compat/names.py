"""The names of DeepEP's and Mooncake's modules, the epee modules behind them, and the import hook that maps them.

A finder at the head of `sys.meta_path` returns epee's modules themselves under the other names, so that classes are the
same whichever name they were imported by. Of `mooncake` only the names below are taken: its store and transfer engine
stay the real package's, if that is installed. `python -m epee.compat` does the same in processes that it starts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..errors import InvalidState

SHIMS = Path(__file__).resolve().parent / "shims"  # packages in this folder only stand in for the requested names
_DEEP_EP, _MOONCAKE = "epee.compat.deep_ep", "epee.compat.mooncake"
# Names that differ, and modules in other locations; other modules of `deep_ep` have the same path in
# `epee.compat.deep_ep`.
NAMES = {
    "deep_ep": _DEEP_EP,
    "deep_ep._C": _DEEP_EP,
    "deep_ep_cpp": _DEEP_EP,
    "deep_ep.buffers": _DEEP_EP,
    "deep_ep.buffers.elastic": f"{_DEEP_EP}.elastic",
    "deep_ep.buffers.legacy": f"{_DEEP_EP}.buffer",
    "deep_ep.buffers.ep": f"{_DEEP_EP}.v25.ep_buffer",
    "deep_ep.buffers.allocator": f"{_DEEP_EP}.v25.absent",
    "deep_ep.buffers.bucket": f"{_DEEP_EP}.v25.absent",
    "deep_ep.buffers.engram": f"{_DEEP_EP}.v25.absent",
    "deep_ep.buffers.pp": f"{_DEEP_EP}.v25.absent",
    "deep_ep.comm": f"{_DEEP_EP}.v25.comm",
    "deep_ep.hybrid_ep_buffer": f"{_DEEP_EP}.hybrid",
    "mooncake.pg": f"{_MOONCAKE}.pg",
    "mooncake.ep": f"{_MOONCAKE}.ep",
    "mooncake.mooncake_ep_buffer": f"{_MOONCAKE}.ep",
    "mooncake.mooncake_elastic_buffer": f"{_MOONCAKE}.elastic_buffer",
}


class _Finder(MetaPathFinder, Loader):
    """Finds epee's modules by other names.

    Args:
        tops: the packages whose names it knows.
    """

    def __init__(self, tops: Sequence[str]) -> None:
        self.tops = set(tops)
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader is this finder, for the names that are epee's."""
        if fullname.partition(".")[0] not in self.tops or self._module_for(fullname) is None:
            return None
        return ModuleSpec(fullname, self, origin=self._module_for(fullname))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return epee's module, imported by its own name."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__  # the import system will set another one
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module unchanged, with its own spec."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def _module_for(self, name: str) -> str | None:
        if name in NAMES:
            return NAMES[name]
        if not name.startswith("deep_ep."):
            return None
        mine = _DEEP_EP + name.removeprefix("deep_ep")
        try:
            return mine if find_spec(mine) is not None else None
        except ModuleNotFoundError:  # its package does not exist either
            return None


_FINDER = _Finder(())


def take_place(top: str) -> None:
    """Let names below `top` ("deep_ep", "deep_ep_cpp" or "mooncake") find epee's modules in this process.

    Args:
        top: of the names.

    Raises:
        InvalidState: the real module has been imported already.
    """
    taken = [
        name
        for name, module in list(sys.modules.items())
        if (name == top or name.startswith(top + ".")) and _is_foreign(name, module)
    ]
    if taken:
        raise InvalidState(f"another {taken[0]} has been imported already; install this one before it")
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.tops.add(top)
    mine = NAMES.get(top)
    if mine is None and _is_there(top):  # a real `mooncake` keeps its other modules
        return
    sys.modules[top] = importlib.import_module(mine or _MOONCAKE)


def _is_foreign(name: str, module: ModuleType | None) -> bool:
    """Whether a module imported under one of our names belongs to another package."""
    where = Path(getattr(module, "__file__", None) or "/")
    if where.resolve().is_relative_to(SHIMS) or (getattr(module, "__name__", "")).startswith("epee."):
        return False
    return name in NAMES or name.startswith("deep_ep.")


def _is_there(top: str) -> bool:
    """Whether the package of this name is, or can be, imported, and is no stand-in of ours."""
    if top not in sys.modules:
        try:
            importlib.import_module(top)
        except ModuleNotFoundError as error:
            if error.name != top:
                raise
            return False
    where = Path(getattr(sys.modules[top], "__file__", None) or "/")
    return not where.resolve().is_relative_to(SHIMS)
