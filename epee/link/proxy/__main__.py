"""The program of a process of a proxy: `python .../epee/link/proxy/__main__.py DESCRIPTOR`.

The package `epee` is named here without its `__init__`, which would import torch: the process needs neither torch nor a
GPU, starts in a tenth of a second, and leaves the GPU's memory alone.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    package = ModuleType("epee")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["epee"] = package
    here = str(Path(__file__).resolve().parent)  # its modules are none of the standard library's
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.exit(importlib.import_module("epee.link.proxy.process").main(int(sys.argv[1])))
