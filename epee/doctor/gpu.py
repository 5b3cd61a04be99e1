"""GPUs, their driver, their links, and whether they lend memory to another process.

This runs in a process of its own (`python -m epee.doctor.gpu`), which prints findings as JSON lines: a driver that
hangs or crashes ends that process, not the doctor. To try lending it starts one more process, which attaches to a
region of the first GPU and returns the method that it used.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

from .. import env
from ..errors import EpeeError
from ..jit.compile import compile_source
from ..jit.driver import attribute, check, driver, nvrtc, version_text
from ..memory.cuda import CudaRegion
from ..memory.cuda_mapping import on_device
from ..memory.cuda_share import Way, names_of
from . import nvml
from .finding import Finding, Verdict

SECTION = "gpu"
PEER_TIMEOUT_S = 40.0
_MIB = 1 << 20
_TINY = 'extern "C" __global__ void nothing() {}'


def _line(name: str, verdict: Verdict, value: str, remedy: str = "") -> Finding:
    return Finding(SECTION, name, verdict, value, remedy)


def _refusal(name: str, error: EpeeError) -> Finding:
    """Return the finding of one of our errors, whose text ends with the remedy."""
    what, _, remedy = str(error).rpartition("; ")
    return _line(name, Verdict.NO, what or remedy, remedy if what else "")


def compiler() -> list[Finding]:
    """NVRTC: installed, and able to compile for Hopper. Needs no GPU."""
    try:
        _, major, minor = nvrtc().nvrtcVersion()
        cubin = compile_source(_TINY, "sm_90a", "doctor").cubin
    except EpeeError as exc:
        return [_refusal("NVRTC", exc)]
    return [_line("NVRTC", Verdict.OK, f"{major}.{minor}, compiles for sm_90a ({len(cubin)} bytes)")]


def bindings() -> list[Finding]:
    """The package cuda-bindings."""
    try:
        return [_line("cuda-bindings", Verdict.OK, metadata.version("cuda-bindings"))]
    except metadata.PackageNotFoundError:
        return [_line("cuda-bindings", Verdict.NO, "not installed", "pip install cuda-bindings, or torch's CUDA build")]


def installed_driver(proc: str = "/proc/driver/nvidia/version") -> list[Finding]:
    """The NVIDIA driver: installed, new enough, and not older than NVRTC's major version."""
    try:
        served = int(check(driver().cuDriverGetVersion(), "ask for the driver's version"))
    except EpeeError as exc:
        return [_refusal("driver", exc)]
    value = f"{_kernel_module(proc)}, CUDA {version_text(served)}"
    try:
        _, major, minor = nvrtc().nvrtcVersion()
    except EpeeError:
        return [_line("driver", Verdict.OK, value)]  # the line of NVRTC reports that it is not installed
    if major > served // 1000:
        remedy = f"update the driver, or pip install 'nvidia-cuda-nvrtc<{served // 1000 + 1}'"
        return [_line("driver", Verdict.NO, f"{value}, older than NVRTC {major}.{minor}", remedy)]
    return [_line("driver", Verdict.OK, value)]


def _kernel_module(proc: str) -> str:
    try:
        text = Path(proc).read_text()
    except OSError:
        return "version unknown"
    match = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return match[1] if match else "version unknown"


def torch_build(cuda: str | None = torch.version.cuda) -> list[Finding]:
    """Whether torch itself was built for CUDA."""
    if cuda is None:
        remedy = "install a CUDA build: pip install torch"
        return [_line("torch", Verdict.NO, f"{torch.__version__} is a CPU build", remedy)]
    return [_line("torch", Verdict.OK, f"built for CUDA {cuda}")]


def _num_devices() -> int:
    return int(check(driver().cuDeviceGetCount(), "count GPUs"))


def _text(result: bytes) -> str:
    return bytes(result).split(b"\0")[0].decode(errors="replace")


def devices() -> list[Finding]:
    """One line per GPU: name, architecture, memory, and unusual properties."""
    cu = driver()
    findings = []
    with nvml.opened() as library:
        for device in range(_num_devices()):
            name = _text(check(cu.cuDeviceGetName(256, device), "ask for a GPU's name"))
            bus_id = _text(check(cu.cuDeviceGetPCIBusId(64, device), "ask for a GPU's PCI address"))
            major, minor = (attribute(f"COMPUTE_CAPABILITY_{part}", device) for part in ("MAJOR", "MINOR"))
            total = int(check(cu.cuDeviceTotalMem(device), "ask for a GPU's memory"))
            num_sms = attribute("MULTIPROCESSOR_COUNT", device)
            value = f"{name}, sm_{major}{minor}, {num_sms} SMs, {total // _MIB} MiB"
            verdict, remedy = _judge(device, major, "MIG" in name.split() or bool(nvml.is_mig(library, bus_id)))
            findings.append(_line(f"GPU {device}", verdict, value, remedy))
    return findings


def _judge(device: int, major: int, is_mig: bool) -> tuple[Verdict, str]:
    if major < 9:
        return Verdict.NO, "the kernels need Hopper (sm_90) or newer: use CPU tensors on this machine"
    if is_mig:
        return Verdict.WARN, "MIG slices do not reach each other: one rank only, or turn MIG off (nvidia-smi -mig 0)"
    if attribute("MPS_ENABLED", device):
        return Verdict.WARN, "under MPS ranks on one GPU wait for each other's SMs, and epee is not tested so: stop MPS"
    mode = attribute("COMPUTE_MODE", device)
    if mode == 2:
        return Verdict.NO, "compute mode PROHIBITED: nvidia-smi -c DEFAULT"
    if mode:
        remedy = "compute mode EXCLUSIVE: one process per GPU, peers cannot map from it; nvidia-smi -c DEFAULT"
        return Verdict.WARN, remedy
    return Verdict.OK, ""


def links() -> list[Finding]:
    """The connections between GPUs, and their numbers of NVLinks."""
    cu, count = driver(), _num_devices()
    findings = []
    with nvml.opened() as library:
        for device in range(count):
            bus_id = _text(check(cu.cuDeviceGetPCIBusId(64, device), "ask for a GPU's PCI address"))
            num_links = nvml.num_nvlinks(library, bus_id)
            over = "NVLinks not known (no NVML)" if num_links is None else f"{num_links} NVLinks"
            others = [other for other in range(count) if other != device]
            deaf = [other for other in others if not _reaches(device, other)]
            if deaf:
                remedy, value = "use GPUs that are linked (nvidia-smi topo -p2p r), or CPU tensors", _list(deaf)
                findings.append(
                    _line(f"links of GPU {device}", Verdict.NO, f"does not reach GPU {value}; {over}", remedy)
                )
                continue
            atomics = [other for other in others if _p2p("NATIVE_ATOMIC_SUPPORTED", device, other)]
            reach = f"reaches GPU {_list(others)}" if others else "the only GPU"
            slow = bool(others) and (num_links == 0 or len(atomics) < len(others))
            remedy = "rows cross PCIe, several times slower than NVLink" if slow else ""
            findings.append(
                _line(f"links of GPU {device}", Verdict.WARN if slow else Verdict.OK, f"{reach}; {over}", remedy)
            )
    return findings


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _reaches(device: int, other: int) -> bool:
    return bool(int(check(driver().cuDeviceCanAccessPeer(device, other), f"ask GPU {device} about GPU {other}")))


def _p2p(name: str, device: int, other: int) -> int:
    cu = driver()
    key = getattr(cu.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetP2PAttribute(key, device, other), f"ask GPU {device} about GPU {other}"))


def lending(peer: Callable[[bytes, int], Finding] | None = None) -> list[Finding]:
    """Lend a region of each GPU, and let another process attach to the first one's from the last GPU."""
    findings, peer = [], attach_elsewhere if peer is None else peer
    count = _num_devices()
    for device in range(count):
        if not attribute("COOPERATIVE_LAUNCH", device):
            findings.append(_line(f"launch on GPU {device}", Verdict.NO, "no cooperative launch", "update the driver"))
        try:
            with on_device(device):
                free, _ = check(driver().cuMemGetInfo(), "ask for free memory")
            region = CudaRegion.create(1 << 20, device)
        except EpeeError as exc:
            findings.append(_refusal(f"memory of GPU {device}", exc))
            continue
        with contextlib.closing(region):
            verdict, remedy = Verdict.OK, ""
            if region.ways is Way.IPC:
                verdict, remedy = Verdict.WARN, "no descriptors of GPU memory here: update the driver"
            value = f"{int(free) // _MIB} MiB free, can be lent by {names_of(region.ways)}"
            findings.append(_line(f"memory of GPU {device}", verdict, value, remedy))
            if device == 0:
                findings.append(peer(region.blob, count - 1))
    return findings


def attach_elsewhere(blob: bytes, device: int) -> Finding:
    """Start a process that attaches to `blob` from `device`, and return its finding."""
    command = [sys.executable, "-m", "epee.doctor.gpu", "attach", blob.hex(), str(device)]
    name = "lending"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=False, env=env.for_child(_root())
        )
    except subprocess.TimeoutExpired:
        return _line(name, Verdict.NO, f"another process did not attach within {PEER_TIMEOUT_S:.0f} s", "see dmesg")
    if done.returncode:
        return _line(name, Verdict.NO, f"another process could not attach: {_last(done.stderr)}", _last(done.stdout))
    return _line(name, Verdict.OK, f"another process reached GPU 0's memory from GPU {device} by {done.stdout.strip()}")


def attach(blob: bytes, device: int) -> str:
    """Attach to a region and return the method; the work of the process of `attach_elsewhere`."""
    with contextlib.closing(CudaRegion.attach(blob, device)) as region:
        return names_of(region.ways)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def survey() -> Iterator[Finding]:
    """Yield all findings about GPUs; without a driver nothing more can be checked."""
    yield from bindings()
    yield from compiler()
    yield from torch_build()
    found = installed_driver()
    yield from found
    if found[0].verdict is Verdict.NO and "CUDA " not in found[0].value:
        return
    for part in (devices, links, lending):
        try:
            yield from part()
        except EpeeError as exc:
            yield _refusal(part.__name__, exc)


def main(arguments: list[str]) -> int:
    """Print findings as JSON lines, or attach to a region and print the method."""
    if arguments[:1] == ["attach"]:
        try:
            sys.stdout.write(attach(bytes.fromhex(arguments[1]), int(arguments[2])) + "\n")
        except EpeeError as exc:
            what, _, remedy = str(exc).rpartition("; ")
            sys.stderr.write(f"{what or remedy}\n")
            sys.stdout.write(f"{remedy}\n")
            return 1
        return 0
    for finding in survey():
        sys.stdout.write(json.dumps(finding.as_dict()) + "\n")
        sys.stdout.flush()  # keeps the findings so far if the next step hangs
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
