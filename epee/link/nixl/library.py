"""NIXL as a wheel provides it: the check that it is installed, and its loading.

Of the wheel only the compiled module is loaded. The Python code around it reconfigures the logging of the whole program
when it is imported, and turns untrusted bytes into objects.

UCX below it loads all its modules at once. The one for EFA loads a second copy of the system's RDMA libraries into the
process where these are installed, and the process then ends with SIGSEGV, after its work (seen with every wheel up to
1.5.1). That module is therefore left out where no EFA device exists, unless the user has chosen the modules
(`UCX_MODULES`).
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ... import env
from ...errors import UnsupportedError
from .devices import rdma_devices

WHEELS = ("nixl_cu13", "nixl_cu12")
_REMEDY = "pip install '.[nixl]' in a clone of epee on every host, or leave EPEE_LINK at tcp"


def why_missing() -> str:
    """Return the reason for which the engine cannot be used here, "" if it can be loaded; loads nothing."""
    return "" if _compiled() else f"none of {', '.join(WHEELS)} is installed"


@functools.cache
def load() -> Any:
    """Return NIXL's compiled module.

    Raises:
        UnsupportedError: it is not installed, or does not load; the message gives the remedy.
    """
    found = _compiled()
    if found is None:
        raise UnsupportedError(f"EPEE_LINK=nixl: {why_missing()}; {_REMEDY}")
    if not env.get("UCX_MODULES") and not any(device.is_efa for device in rdma_devices()):
        env.put(UCX_MODULES="^efa")
    name, path = found
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as exc:
        raise UnsupportedError(f"EPEE_LINK=nixl: {path} does not load: {exc}; {_REMEDY}") from exc
    return sys.modules.setdefault(name, module)  # one copy, also for a program that imports the wheel itself


def _compiled() -> tuple[str, Path] | None:
    """Return the compiled module's name and file."""
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            for suffix in importlib.machinery.EXTENSION_SUFFIXES:
                path = Path(folder) / f"_bindings{suffix}"
                if path.is_file():
                    return f"{wheel}._bindings", path
    return None
