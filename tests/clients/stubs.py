"""Lets one file of a client be executed without the rest of it: all its other modules are mocks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Mock(ModuleType):
    """A module that has every name: a mock for each that it was not given."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Stubs(MetaPathFinder, Loader):
    def __init__(self, tops: Sequence[str], real: Mapping[str, Path], given: Mapping[str, Mapping[str, Any]]) -> None:
        self._tops, self._real, self._given = set(tops), real, given

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._tops:
            return None
        if fullname in self._real:
            return importlib.util.spec_from_file_location(fullname, self._real[fullname])
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = _Mock(spec.name)
        for name, value in self._given.get(spec.name, {}).items():
            setattr(made, name, value)
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(
    tops: Sequence[str], real: Mapping[str, Path], given: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Let modules below `tops` be mocks, but those of `real`, which are files; `given` has what mocks must have."""
    sys.meta_path.insert(0, _Stubs(tops, real, given or {}))
