"""`epee doctor`: every check judges what it is given, none throws or hangs, and the report says what to do."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from epee.cli.main import app
from epee.doctor import buffers, gpu, machine, nvml, report, settings, sharing
from epee.doctor.finding import Finding, Verdict, examine, from_dict
from epee.ep import Buffer, LatencyBuffer
from epee.ep.config import BufferConfig
from epee.errors import InvalidArgument, ProtocolError, ResourceError
from epee.jit.driver import nvrtc
from epee.memory.cuda import CudaRegion
from epee.memory.shared import SharedRegion
from tests.memory.fake_driver import FakeDriver, Status, installed

OK, WARN, NO = Verdict.OK, Verdict.WARN, Verdict.NO


def one(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def verdicts(findings: list[Finding]) -> list[Verdict]:
    return [found.verdict for found in findings]


# running checks


def test_an_error_in_a_check_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise KeyError("nobody expected this")

    found = one(examine("machine", "broken", broken))
    assert (found.verdict, found.section, found.name) == (NO, "machine", "broken")
    assert "KeyError" in found.value
    assert found.remedy


def test_a_check_that_hangs_is_a_finding() -> None:
    def slow() -> list[Finding]:
        time.sleep(0.5)
        return []

    found = one(examine("machine", "slow", slow, timeout_s=0.02))
    assert (found.verdict, found.value) == (NO, "no answer within 0 s")


def test_a_finding_survives_the_wire() -> None:
    found = Finding("gpu", "GPU 0", WARN, "a value", "a remedy")
    assert from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    "raw", [None, [], {}, {"section": "gpu"}, {**Finding("a", "b", OK, "c").as_dict(), "verdict": "fine"},
            {**Finding("a", "b", OK, "c").as_dict(), "value": 3}, {**Finding("a", "b", OK, "c").as_dict(), "x": "y"}]
)  # fmt: skip
def test_what_is_no_finding_is_refused(raw: object) -> None:
    with pytest.raises(ProtocolError):
        from_dict(raw)


# the machine


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (machine.python_version((3, 9, 18)), NO),
        (machine.python_version((3, 10, 0)), OK),
        (machine.python_version(), OK),
        (machine.torch_version("2.9.1+cu128"), NO),
        (machine.torch_version("2.10.0"), OK),
        (machine.torch_version("2.13.0+cpu"), OK),
        (machine.torch_version("nightly"), WARN),
        (machine.epee_version(), OK),
        (machine.operating_system("linux", "x86_64"), OK),
        (machine.operating_system("linux", "aarch64"), NO),
        (machine.operating_system("darwin", "x86_64"), NO),
        (machine.cores(8, 0.0), OK),
        (machine.cores(8, 2.5), WARN),
        (machine.cores(2, 2.0), OK),
        (machine.cores(1, 0.0), WARN),
        (machine.shm_room("/nonexistent"), WARN),
        (machine.memory("/nonexistent"), WARN),
        (machine.memory(left=8 << 30), OK),
    ],
)
def test_the_machine_is_judged(found: list[Finding], verdict: Verdict) -> None:
    assert one(found).verdict is verdict
    assert bool(one(found).remedy) == (verdict is not OK)


def test_limits_are_judged() -> None:
    assert verdicts(machine.limits(-1, -1, -1)) == [OK, OK, OK]
    assert verdicts(machine.limits(128, 1 << 30, 65536)) == [NO, WARN, OK]
    assert verdicts(machine.limits(1023, 64 << 30, 65536)) == [WARN, OK, OK]
    assert machine.limits(1024, 1 << 40, 8 << 20)[2].value == "8 MiB (matters between hosts only)"


def test_little_room_in_shm_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=10, f_blocks=20, f_frsize=1 << 20))
    found = one(machine.shm_room())
    assert (found.verdict, found.value) == (WARN, "10 MiB free of 20")
    assert "--shm-size" in found.remedy


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:   102400 kB\n")
    found = one(machine.memory(str(tmp_path / "meminfo"), -1))
    assert (found.verdict, found.value) == (WARN, "100 MiB available")
    (tmp_path / "meminfo").write_text("MemAvailable: 8388608 kB\n")
    assert one(machine.memory(str(tmp_path / "meminfo"), -1)).verdict is OK
    found = one(machine.memory(str(tmp_path / "meminfo"), 300 << 20))
    assert (found.verdict, found.value) == (WARN, "8192 MiB available, the cgroup leaves 300 MiB")


def test_the_least_grant_of_all_cgroups_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert machine.cgroup_cpus(str(tmp_path), str(own)) == 0.0
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert machine.cgroup_cpus(str(tmp_path), str(own)) == 0.0
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert machine.cgroup_cpus(str(tmp_path), str(own)) == 1.5


def test_the_least_room_of_all_cgroups_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    assert machine.cgroup_memory_bytes(str(tmp_path), str(own)) == -1
    for name, value in (("memory.max", "max"), ("memory.current", "500"), ("a/memory.max", "3000"),
                        ("a/memory.current", "1000"), ("memory.limit_in_bytes", str(1 << 62)),
                        ("memory.usage_in_bytes", "5")):  # fmt: skip
        (tmp_path / name).write_text(value + "\n")
    assert machine.cgroup_memory_bytes(str(tmp_path), str(own)) == 2000
    (tmp_path / "a/memory.current").write_text("4000")
    assert machine.cgroup_memory_bytes(str(tmp_path), str(own)) == 0


def test_the_old_kind_of_cgroup_is_read(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:memory:/x\n3:cpu,cpuacct:/job\n")
    folder = tmp_path / "cpu" / "job"
    folder.mkdir(parents=True)
    for name, value in (("cpu.cfs_quota_us", "50000"), ("cpu.cfs_period_us", "100000")):
        (folder / name).write_text(value + "\n")
        (folder.parent / name).write_text("-1" if "quota" in name else "100000")
    assert machine.cgroup_cpus(str(tmp_path), str(own)) == 0.5


# sharing


def test_regions_futexes_and_sockets_work_here() -> None:
    for found in (sharing.own_region(1 << 20), sharing.futex(), sharing.over_socket()):
        assert one(found).verdict is OK, found


def test_a_region_that_does_not_fit_is_told() -> None:
    found = one(sharing.own_region(1 << 60))
    assert found.verdict is NO
    assert "make the buffer smaller" in found.value


def test_a_forbidden_futex_is_told() -> None:
    assert one(sharing.futex("Operation not permitted")).verdict is NO


def test_real_children_are_asked() -> None:
    answers = sharing.ask_children()
    assert set(answers) == {"proc", "pidfd_open", "pidfd_getfd"}
    assert answers["proc"] == answers["pidfd_open"] == "ok"


def test_children_that_cannot_start_are_no_answer() -> None:
    assert sharing.ask_children("/bin/false") == {}
    assert verdicts(sharing.between_children({})) == [NO, NO, WARN]


def test_a_forbidden_pidfd_is_a_warning_with_the_way_out() -> None:
    found = sharing.between_children({"proc": "ok", "pidfd_open": "ok", "pidfd_getfd": "Operation not permitted"})
    assert verdicts(found) == [OK, OK, WARN]
    assert found[2].value == "Operation not permitted"
    assert "EPEE_CUDA_SHARE=scm" in found[2].remedy


def test_another_descriptor_is_noticed_by_the_probe() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import probe, os; probe.borrow(os.getpid(), 0)"
    folder = str(Path(sharing.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, folder], input="x", capture_output=True, text=True, timeout=20, check=True
    )
    assert "ok" not in done.stdout.replace("pidfd_open ok", "")


def test_yama_is_read() -> None:
    assert verdicts(sharing.ptrace_scope(0)) == [OK]
    assert "ancestors only" in one(sharing.ptrace_scope(1)).value
    assert verdicts(sharing.ptrace_scope(2)) == [WARN]


def test_a_socket_without_a_folder_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("cannot listen for peers")

    monkeypatch.setattr(sharing, "DescriptorServer", refuse)
    found = one(sharing.over_socket())
    assert (found.verdict, found.value) == (WARN, "cannot listen for peers")


# settings


def test_variables_are_parsed_and_typos_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EPEE_")]:
        monkeypatch.delenv(name)
    assert one(settings.variables()).value == "none set"
    monkeypatch.setenv("EPEE_TIMEOUT_S", "soon")
    monkeypatch.setenv("EPEE_POISON", "1")
    monkeypatch.setenv("EPEE_TIMOUT_S", "5")
    monkeypatch.setenv("EPEE_XYZZY", "5")
    found = {row.name: row for row in settings.variables()}
    assert {name: row.verdict for name, row in found.items()} == {
        "EPEE_TIMEOUT_S": NO, "EPEE_POISON": OK, "EPEE_TIMOUT_S": WARN, "EPEE_XYZZY": WARN
    }  # fmt: skip
    assert found["EPEE_TIMOUT_S"].remedy == "did you mean EPEE_TIMEOUT_S?"
    assert found["EPEE_XYZZY"].remedy.startswith("unset it")
    assert "got 'soon'" in found["EPEE_TIMEOUT_S"].value


def test_the_kernel_cache_is_judged_and_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert one(settings.kernel_cache(folder)).value.endswith("made at first use")
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    (folder / "k.cubin").write_bytes(bytes(1 << 20))
    assert "(mode 0700), 1 kernels, 1.0 MiB" in one(settings.kernel_cache(folder)).value
    folder.chmod(0o777)
    found = one(settings.kernel_cache(folder))
    assert found.verdict is WARN
    assert "others may write to it" in found.value
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "symbolic link" in one(settings.kernel_cache(link)).value


# GPUs, on the fake driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.delenv("EPEE_CUDA_SHARE", raising=False)
    real = nvrtc()
    with installed(FakeDriver()) as made:
        sys.modules["cuda.bindings"].nvrtc = real  # type: ignore[attr-defined]
        yield made


def attached(blob: bytes, device: int) -> Finding:
    return Finding("gpu", "lending", OK, f"from GPU {device}")


def test_two_good_gpus_are_described(fake: FakeDriver) -> None:
    first, second = gpu.devices()
    assert first == Finding("gpu", "GPU 0", OK, "Fake GPU, sm_90, 4 SMs, 81920 MiB")
    assert second.name == "GPU 1"
    for row, other in zip(gpu.links(), (1, 0), strict=True):
        assert (row.verdict, row.value) == (OK, f"reaches GPU {other}; NVLinks not known (no NVML)")
    rows = gpu.lending(attached)
    assert [row.name for row in rows] == ["memory of GPU 0", "lending", "memory of GPU 1"]
    assert verdicts(rows) == [OK] * 3
    assert rows[0].value == "80896 MiB free, can be lent by pidfd"
    assert rows[1].value == "from GPU 1"
    assert fake.leaks() == {}


@pytest.mark.parametrize(
    ("attributes", "name", "verdict", "remedy"),
    [
        ({"COMPUTE_CAPABILITY_MAJOR": 8}, "A100", NO, "need Hopper"),
        ({}, "NVIDIA H200 MIG 1g.18gb", WARN, "MIG slices do not reach each other"),
        ({"MPS_ENABLED": 1}, "H200", WARN, "stop MPS"),
        ({"COMPUTE_MODE": 2}, "H200", NO, "nvidia-smi -c DEFAULT"),
        ({"COMPUTE_MODE": 3}, "H200", WARN, "nvidia-smi -c DEFAULT"),
    ],
)
def test_unusual_gpus_are_judged(
    fake: FakeDriver, attributes: dict[str, int], name: str, verdict: Verdict, remedy: str
) -> None:
    fake.attributes.update(attributes)
    fake.name = name
    row = gpu.devices()[0]
    assert row.verdict is verdict
    assert remedy in row.remedy


def test_gpus_that_do_not_reach_each_other_are_named(fake: FakeDriver) -> None:
    fake.num_devices = 3
    fake.strangers = {(0, 1), (0, 2), (2, 1)}
    rows = gpu.links()
    assert verdicts(rows) == [NO, OK, NO]
    assert rows[0].value.startswith("does not reach GPU 1, 2;")
    assert "CPU tensors" in rows[0].remedy


class FakeNvml:
    """Three links up, MIG on."""

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, handle: object) -> int:
        return 0 if bus_id == b"0000:00:00.0" else 2

    def nvmlDeviceGetNvLinkState(self, handle: object, link: object, state: object) -> int:
        state._obj.value = 1  # type: ignore[attr-defined]
        return 0 if link.value < 3 else 3  # type: ignore[attr-defined]

    def nvmlDeviceGetMigMode(self, handle: object, current: object, pending: object) -> int:
        current._obj.value = 1  # type: ignore[attr-defined]
        return 0


def test_nvml_is_asked_for_links_and_slices() -> None:
    library = FakeNvml()
    assert nvml.num_nvlinks(library, "0000:00:00.0") == 3
    assert nvml.num_nvlinks(library, "0000:99:00.0") is None
    assert nvml.is_mig(library, "0000:00:00.0") is True
    assert nvml.is_mig(None, "0000:00:00.0") is None
    with nvml.opened("libnothing-of-this-name.so") as missing:
        assert missing is None
    with nvml.opened("libc.so.6") as another:
        assert another is None


def test_gpus_over_pcie_are_a_warning(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "num_nvlinks", lambda library, bus_id: 0)
    assert verdicts(gpu.links()) == [WARN, WARN]
    assert "PCIe" in gpu.links()[0].remedy


def test_memory_that_cannot_be_lent_by_descriptor_is_a_warning(fake: FakeDriver) -> None:
    fake.attributes["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 0
    row = gpu.lending(attached)[0]
    assert (row.verdict, row.value) == (WARN, "80896 MiB free, can be lent by ipc")


def test_memory_that_cannot_be_lent_is_a_no(fake: FakeDriver) -> None:
    fake.refused["cuMemCreate"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    rows = gpu.lending(attached)
    assert verdicts(rows) == [NO, NO]
    assert rows[0].remedy == "free GPU memory or make the buffer smaller"


def test_a_driver_older_than_the_compiler_is_told(fake: FakeDriver) -> None:
    assert one(gpu.installed_driver("/nonexistent")).value == "version unknown, CUDA 13.0"
    fake.version = 12080
    row = one(gpu.installed_driver("/nonexistent"))
    assert row.verdict is NO
    assert "CUDA 12.8, older than NVRTC 13" in row.value
    assert "nvidia-cuda-nvrtc<13" in row.remedy


def test_the_kernel_modules_version_is_read(fake: FakeDriver, tmp_path: Path) -> None:
    proc = tmp_path / "version"
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Thu\nGCC version: gcc version 13.2\n")
    assert one(gpu.installed_driver(str(proc))).value == "580.159.04, CUDA 13.0"


def test_a_machine_without_a_driver_ends_the_survey_early(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(fake, "cuInit", no_library)
    rows = {row.name: row for row in gpu.survey()}
    assert list(rows) == ["cuda-bindings", "NVRTC", "torch", "driver"]
    assert rows["driver"].verdict is NO
    assert rows["driver"].remedy.startswith("install one")
    assert rows["NVRTC"].verdict is OK


def test_a_survey_of_good_gpus_has_every_line(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "attach_elsewhere", attached)
    names = [row.name for row in gpu.survey()]
    assert names[4:] == ["GPU 0", "GPU 1", "links of GPU 0", "links of GPU 1", "memory of GPU 0", "lending",
                         "memory of GPU 1"]  # fmt: skip


def test_an_error_in_a_part_of_the_survey_is_a_finding(fake: FakeDriver) -> None:
    fake.refused["cuDeviceGetCount"] = Status.CUDA_ERROR_UNKNOWN
    rows = [row for row in gpu.survey() if row.name in ("devices", "links", "lending")]
    assert verdicts(rows) == [NO, NO, NO]


def test_a_process_that_cannot_attach_is_told_with_its_words() -> None:
    row = gpu.attach_elsewhere(b"nonsense", 0)
    assert row.verdict is NO
    assert "a GPU region blob has" in row.value
    assert row.remedy == "do the ranks run one version?"


def test_a_process_that_attaches_prints_how(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    region = CudaRegion.create(1000, 0)
    assert gpu.main(["attach", region.blob.hex(), "1"]) == 0
    assert capsys.readouterr().out == "pidfd\n"
    region.close()
    assert fake.leaks() == {}


# the report


def child_that(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


LINE = f"print({json.dumps(json.dumps(Finding('gpu', 'GPU 0', OK, 'fine').as_dict()))}, flush=True)"


@pytest.mark.parametrize(
    ("code", "timeout_s", "value"),
    [
        (f"{LINE}\nimport os; os.abort()", 30.0, "ended by signal SIGABRT"),
        (f"{LINE}\nraise SystemExit('no more')", 30.0, "ended by exit code 1: no more"),
        (f"{LINE}\nimport time; time.sleep(60)", 0.1, "no answer within 0 s"),
    ],
)
def test_what_was_found_before_the_driver_crashed_is_kept(code: str, timeout_s: float, value: str) -> None:
    child = child_that(code)
    assert select.select([child.stdout], [], [], 30.0)[0], "the child does not start"
    first, last = report.gpu_findings(child, timeout_s=timeout_s)
    assert first.name == "GPU 0"
    assert (last.verdict, last.value) == (NO, value)


def test_foreign_output_is_not_believed() -> None:
    (row,) = report.gpu_findings(child_that("print('hello')"))
    assert row.verdict is WARN


def test_the_verdict_on_cpu_does_not_ask_gpus() -> None:
    fine, bad = Finding("machine", "a", WARN, "b"), Finding("gpu", "driver", NO, "b")
    assert report.works_on_cpu([fine, bad])
    assert not report.works_on_gpu([fine, bad])
    assert not report.works_on_cpu([Finding("sharing", "a", NO, "b")])
    assert report.works_on_gpu([fine, Finding("gpu", "GPU 0", OK, "b")])
    assert not report.works_on_gpu([fine])


def test_the_table_shows_values_as_they_are() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.as_table([Finding("machine", "a", NO, "an [odd] value", "do [this]")]))
    text = console.export_text()
    console.file.close()
    assert "an [odd] value" in text
    assert "-> do [this]" in text


def test_the_report_fits_80_columns_with_a_title_for_each_section() -> None:
    rows = [
        Finding(section, "memory by /proc/PID/fd", WARN, "value " * 30, "remedy " * 20) for section in report.TITLES
    ]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.as_table(rows))
    lines = console.export_text().splitlines()
    console.file.close()
    assert max(map(len, lines)) <= 80
    assert [line.strip() for line in lines if line.strip() and not line.startswith(" ")] == [*report.TITLES.values()]


def test_the_conclusion_names_what_prevents_epee() -> None:
    fine, no_driver = Finding("machine", "cores", OK, "2"), Finding("gpu", "driver", NO, "none", "install one")
    expected = "epee works on CPU tensors here\nepee does not work on GPUs here: see driver"
    assert report.conclusion([fine, no_driver]) == expected
    assert report.conclusion([Finding("gpu", "GPU 0", OK, "fine")]).endswith("epee works on GPUs here")


@pytest.mark.parametrize("verdict", [OK, NO])
def test_the_exit_code_is_about_cpu_tensors(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Finding("machine", "cores", verdict, "2"), Finding("gpu", "driver", NO, "none", "install one")]
    monkeypatch.setattr(report, "run_all", lambda: rows)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == (verdict is NO)
    assert ("epee works on CPU" if verdict is OK else "epee does not work on CPU") in result.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert found["works_on_cpu"] is (verdict is OK)
    assert [from_dict(row) for row in found["findings"]] == rows


@pytest.mark.slow
def test_the_real_report_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EPEE_")]:
        monkeypatch.delenv(name)
    done = subprocess.run(
        [sys.executable, "-m", "epee", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=Path(__file__).resolve().parent.parent,
        check=False,
    )
    found = json.loads(done.stdout)
    assert done.returncode == (not found["works_on_cpu"])
    sections = {row["section"] for row in found["findings"]}
    assert sections == {*report.CPU_SECTIONS, "gpu"}
    assert all(row["remedy"] for row in found["findings"] if row["verdict"] != "ok")
    assert {"pidfd_getfd", "shared memory", "futex", "NVRTC", "driver"} <= {row["name"] for row in found["findings"]}


# buffers


def test_what_buffers_need_is_what_they_are_made_of() -> None:
    sizes = buffers.parse_sizes("2, 8,512,2,1024")
    found = {finding.name: finding for finding in buffers.needed(sizes)}
    assert {finding.verdict for finding in found.values()} == {OK}
    config = BufferConfig(2, 8, 512, 2, 1024, torch.bfloat16)
    slot = Buffer.slot_bytes_for(config)
    assert slot > 2 * 1024 * 512 * 2
    assert found["Buffer, GPUs"].value.startswith(f"{3 * slot / (1 << 20):.1f} MiB: 2 live results")
    assert "for 2048 rows" in found["Buffer, GPUs"].value
    assert f"6 slots of {config.slot_layout('expert', 1).nbytes / (1 << 20):.1f} MiB" in found["Buffer, CPUs"].value
    nbytes = LatencyBuffer.bytes_for(2, 8, 512, 2, 128)
    assert found["LatencyBuffer"].value.startswith(f"{nbytes / (1 << 20):.1f} MiB for 128 tokens")


def test_sizes_that_no_buffer_has_are_a_warning() -> None:
    found = {finding.name: finding for finding in buffers.needed(buffers.AskedSizes(3, 4, 512, 2, 16))}
    for name in ("Buffer, GPUs", "Buffer, CPUs", "LatencyBuffer"):
        assert found[name].verdict is WARN
        assert "multiple of the number of ranks" in found[name].value


@pytest.mark.parametrize("text", ["", "4", "4,256,7168,8", "4,256,7168,8,x", "4,256,7168,8,0", "4,256,7168,8,-1"])
def test_sizes_are_five_numbers(text: str) -> None:
    with pytest.raises(InvalidArgument, match="RANKS,EXPERTS,HIDDEN,TOPK,TOKENS"):
        buffers.parse_sizes(text)


def test_sizes_are_asked_for_by_an_option() -> None:
    done = CliRunner().invoke(app, ["doctor", "--sizes", "2,8,512,2,1024", "--json"])
    assert done.exit_code == 0
    assert [finding["section"] for finding in json.loads(done.stdout)] == ["buffers"] * 5
    assert CliRunner().invoke(app, ["doctor", "--sizes", "2,8", "--json"]).exit_code
    assert CliRunner().invoke(app, ["doctor", "--sizes", "2,8,512,2,1024", "--listen"]).exit_code


def test_memory_in_use_is_told_by_what_it_is_for() -> None:
    region = SharedRegion.create(8 << 20, "doctors-own-3-0")
    other = SharedRegion.attach(region.blob)
    try:
        region.mapping[4096 : 4096 + (2 << 20)] = bytes(2 << 20)
        (mine,) = [held for held in buffers.shared_regions() if held.name == "doctors-own"]
        assert mine.pids == {os.getpid()}
        assert mine.nbytes == region.mapped_bytes
        assert 2 << 20 <= mine.used_bytes < 3 << 20, "pages that were written"
        found = one(buffers.in_use())
        assert found.verdict is OK
        assert "of RAM in" in found.value
    finally:
        other.close()
        region.close()
    assert not [held for held in buffers.shared_regions() if held.name == "doctors-own"]


def test_no_memory_in_use_is_said(tmp_path: Path) -> None:
    (tmp_path / "17" / "fd").mkdir(parents=True)
    (tmp_path / "17" / "fd" / "3").symlink_to("/dev/null")
    (tmp_path / "self").mkdir()
    assert one(buffers.in_use(str(tmp_path))).value.startswith("nothing")
