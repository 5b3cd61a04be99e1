"""Stand-in for `deep_ep_cpp`, DeepEP's extension: `epee.compat.deep_ep` if EPEE_AS_DEEP_EP=1, else the real one."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).resolve().parents[1] / "real.py"))["stand_in"]("deep_ep_cpp", "EPEE_AS_DEEP_EP")
