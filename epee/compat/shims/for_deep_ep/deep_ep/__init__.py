"""Stand-in for `deep_ep`: `epee.compat.deep_ep` if EPEE_AS_DEEP_EP=1, else the real package."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).resolve().parents[2] / "real.py"))["stand_in"]("deep_ep", "EPEE_AS_DEEP_EP")
