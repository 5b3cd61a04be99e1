"""Stand-in for `mooncake`: `pg`, `ep`, buffers are epee's if EPEE_AS_MOONCAKE=1, all else is the real package's."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).resolve().parents[2] / "real.py"))["stand_in"]("mooncake", "EPEE_AS_MOONCAKE")
