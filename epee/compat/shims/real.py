"""Implementation of the stand-in packages: epee's module with the switch on, else the real package or an error.

Stand-ins are executed by every process below `python -m epee.compat` that imports their names, also by one whose Python
has no epee: so this file is executed by its path (`runpy`), and imports epee only if needed.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_SHIMS = Path(__file__).resolve().parent


def stand_in(name: str, switch: str) -> None:
    """Replace the stand-in that is being imported by epee's module, or by the real one.

    Args:
        name: of the package.
        switch: the environment variable that is 1 if epee is used.

    Raises:
        ModuleNotFoundError: the switch is off and there is no other package of this name.
    """
    try:
        from epee import env

        is_on = env.get_bool(switch)
    except ModuleNotFoundError as error:
        if error.name != "epee":
            raise
        is_on = False
    if not is_on:
        _yield_to_real(name, switch)
        return
    from epee.compat.names import NAMES, take_place

    spec = None if name in NAMES else _real_spec(name)
    if spec is not None:  # epee has only some of its modules
        _load_real(name, spec)
    take_place(name)


def _real_spec(name: str) -> ModuleSpec | None:
    """Return the spec of the package of this name that is no stand-in of epee's; None if there is none."""
    elsewhere = [path for path in sys.path if not Path(path).resolve().is_relative_to(_SHIMS)]
    for finder in sys.meta_path:
        paths = elsewhere if finder is PathFinder else None
        spec = finder.find_spec(name, paths)
        if spec is not None and spec.origin is not None:
            return spec
    return None


def _load_real(name: str, spec: ModuleSpec) -> None:
    """Execute the real package under its name."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_in_module = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if stand_in_module is not None:
            sys.modules[name] = stand_in_module
        raise


def _yield_to_real(name: str, switch: str) -> None:
    spec = _real_spec(name)
    if spec is None:
        raise ModuleNotFoundError(
            f"No module named {name!r}: epee's stand-in for it is switched off ({switch} is not 1, or epee is not "
            f"installed in this environment) and there is no other; set {switch}=1, or install {name}",
            name=name,
        )
    logging.getLogger("epee").info("%s is not 1: %s is the real one, %s", switch, name, spec.origin)
    _load_real(name, spec)
