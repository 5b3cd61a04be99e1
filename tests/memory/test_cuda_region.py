"""`memory.cuda` on the fake driver: sharing between real processes in each way, and what is left when a call fails."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from epee.errors import EpeeError, InvalidState, ProtocolError, ResourceError, UnsupportedError
from epee.memory import cuda_share
from epee.memory.claim import make_claim, process_start_time
from epee.memory.cuda import BLOB_BYTES, HEADER_BYTES, CudaRegion
from epee.memory.cuda_mapping import on_device
from epee.memory.cuda_share import Way
from tests.csrc.emulated import all_gather_bytes
from tests.harness import run_ranks
from tests.memory.fake_driver import GIVES_BACK, GRANULE_BYTES, FakeDriver, Status, forget, installed

WAYS = ["pidfd", "scm", "ipc"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.delenv("EPEE_CUDA_SHARE", raising=False)
    with installed(FakeDriver()) as driver:
        before = held()
        yield driver
        assert driver.leaks() == {}
        assert held() == before


def held() -> tuple[int, int]:
    """Descriptors that could be regions' or their sockets', and threads."""
    kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)]
    return sum(kind.startswith("socket:") or "memfd:" in kind for kind in kinds), threading.active_count()


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_fresh_memory_is_zero_and_large_enough(fake: FakeDriver) -> None:
    region = CudaRegion.create(GRANULE_BYTES, 1)
    assert region.nbytes == 2 * GRANULE_BYTES - HEADER_BYTES
    assert region.device == 1
    assert not region.tensor(torch.uint8, 0, (region.nbytes,)).any()
    assert len(region.blob) == BLOB_BYTES
    assert region.ways == Way.PIDFD
    region.close()


def _share(rank: int, num_ranks: int, way: str) -> list[Any]:
    os.environ["EPEE_CUDA_SHARE"] = way
    with installed(FakeDriver()) as fake:
        before = held()
        region = CudaRegion.create(100_000, rank)
        mine = region.tensor(torch.int64, 4096, (1000,))
        mine.copy_(torch.arange(1000) + 1000 * rank)
        blobs = all_gather_bytes(region.blob)
        peer = CudaRegion.attach(blobs[1 - rank], rank)
        seen = peer.tensor(torch.int64, 4096, (1000,))
        is_right = bool((seen == torch.arange(1000) + 1000 * (1 - rank)).all())
        all_gather_bytes(b"read")
        seen[7] = -5
        all_gather_bytes(b"written")
        is_written = int(mine[7]) == -5
        peer.close()  # `seen` keeps the mapping
        kept = int(seen[8]) == 1000 * (1 - rank) + 8
        del seen
        again = CudaRegion.attach(blobs[1 - rank], 1 - rank)  # by another of our GPUs
        is_again = int(again.tensor(torch.int64, 4096, (1000,))[7]) == -5
        again.close()
        all_gather_bytes(b"done")
        region.close()
        del mine
        is_clean = all(now <= then for now, then in zip(held(), before, strict=True))  # threads of the harness may end
        return [is_right, is_written, kept, is_again, str(again.ways.name), fake.leaks(), is_clean]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_share_memory_both_ways(way: str) -> None:
    for result in run_ranks(_share, 2, way):
        assert result == [True, True, True, True, way.upper(), {}, True]


_EPERM = 1
_SECCOMP_MODE_FILTER, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 2, 22, 38


def forbid_pidfd_getfd() -> None:
    """Let the kernel refuse pidfd_getfd to this thread and those it starts, as a container's profile may."""
    load_number, equal, allow, refuse = (0x20, 0, 0, 0), (0x15, 0, 1, 438), 0x7FFF0000, 0x00050000 | _EPERM
    rules = [load_number, equal, (0x06, 0, 0, refuse), (0x06, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    filter_ = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0) == 0


def _share_under_seccomp(rank: int, num_ranks: int, forbidden: list[int]) -> list[Any]:
    if rank in forbidden:
        forbid_pidfd_getfd()
    with installed(FakeDriver()):
        region = CudaRegion.create(1000, rank)
        region.tensor(torch.int32, 0, (1,)).fill_(rank + 10)
        blobs = all_gather_bytes(region.blob)
        try:
            peer = CudaRegion.attach(blobs[1 - rank], rank)
            result: list[Any] = [int(region.ways), str(peer.ways.name), int(peer.tensor(torch.int32, 0, (1,))[0])]
            peer.close()
        except ResourceError as error:
            result = [int(region.ways), str(error), 0]
        all_gather_bytes(b"done")
        region.close()
        return result


def test_a_forbidden_pidfd_falls_back_to_the_socket() -> None:
    both = int(Way.PIDFD | Way.SCM)
    assert run_ranks(_share_under_seccomp, 2, [0, 1]) == [[both, "SCM", 11], [both, "SCM", 10]]


def test_a_pidfd_forbidden_to_one_peer_only_is_explained() -> None:
    """The owner cannot see a peer's filter; the peer says what to set."""
    mine, other = run_ranks(_share_under_seccomp, 2, [1])
    assert mine == [1, "PIDFD", 11]
    assert "pidfd_getfd from process" in other[1]
    assert "refused (Operation not permitted); set EPEE_CUDA_SHARE=scm on all ranks" in other[1]


def _wrong_claims(rank: int, num_ranks: int, way: str) -> list[str]:
    os.environ["EPEE_CUDA_SHARE"] = way
    with installed(FakeDriver()) as fake:
        region = CudaRegion.create(1000, rank)
        blob = all_gather_bytes(region.blob)[1 - rank]
        before, errors = held(), []
        no_gpu_memory = os.memfd_create("other")
        numbers = all_gather_bytes(no_gpu_memory.to_bytes(8, "little"))
        changed = {
            "start": blob[:16] + bytes([blob[16] ^ 1]) + blob[17:],
            "closed fd": blob[:24] + (900).to_bytes(8, "little") + blob[32:],
            "other fd": blob[:24] + numbers[1 - rank] + blob[32:],
            "larger": blob[:32] + (1 << 30).to_bytes(8, "little") + blob[40:],
            "cookie": blob[:40] + bytes([blob[40] ^ 1]) + blob[41:],
        }
        for data in changed.values():
            try:
                CudaRegion.attach(data, rank).close()
                errors.append("accepted")
            except EpeeError as error:
                errors.append(f"{type(error).__name__}: {error}")
        CudaRegion.attach(blob, rank).close()
        all_gather_bytes(b"done")
        os.close(no_gpu_memory)
        is_clean = held()[1] == before[1] and sum(fake.leaks().values()) == {"ipc": 1}.get(way, 2)  # our own region
        region.close()
        return [*errors, str(is_clean)]


def test_wrong_claims_are_refused_and_leave_nothing() -> None:
    for start, closed, other, larger, cookie, is_clean in run_ranks(_wrong_claims, 2, "pidfd"):
        assert start.startswith("OwnerEndedError: process") and "has ended" in start  # noqa: PT018
        assert closed.startswith("ProtocolError") and "no descriptor 900" in closed  # noqa: PT018
        assert other.startswith("ResourceError: import GPU memory of process")
        assert larger.startswith("ResourceError: map 1073741824 bytes")
        assert cookie.startswith("ProtocolError") and "cookie differs" in cookie  # noqa: PT018
        assert is_clean == "True"


def test_wrong_claims_over_the_socket_are_refused() -> None:
    for start, closed, _, larger, cookie, is_clean in run_ranks(_wrong_claims, 2, "scm"):
        assert "has ended" in start
        assert closed == "accepted"  # the socket's server knows which descriptor it lends
        assert larger.startswith("ResourceError: map 1073741824 bytes")
        assert cookie.startswith("ProtocolError") and "does not know the region" in cookie  # noqa: PT018
        assert is_clean == "True"


def test_wrong_claims_about_ipc_memory_are_refused() -> None:
    for start, _, _, larger, cookie, is_clean in run_ranks(_wrong_claims, 2, "ipc"):
        assert "has ended" in start
        assert larger.startswith("ProtocolError") and "1073741824 bytes promised, 2097152 there" in larger  # noqa: PT018
        assert cookie.startswith("ProtocolError") and "cookie differs" in cookie  # noqa: PT018
        assert is_clean == "True"


def _write_after_death(rank: int, num_ranks: int, way: str) -> None:
    os.environ["EPEE_CUDA_SHARE"] = way
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp()
    with installed(FakeDriver()) as fake:
        region = CudaRegion.create(1000, rank)
        blobs = all_gather_bytes(region.blob + os.getpid().to_bytes(8, "little"))
        folders = all_gather_bytes(tempfile.tempdir.encode())
        if rank == 1:
            signal.pause()
        peer = CudaRegion.attach(blobs[1][:BLOB_BYTES], rank)
        os.kill(int.from_bytes(blobs[1][BLOB_BYTES:], "little"), signal.SIGKILL)
        memory = peer.tensor(torch.float32, 0, (100,))
        memory.fill_(3)
        assert bool((memory == 3).all())
        del memory
        peer.close()
        region.close()
        assert fake.leaks() == {}
        while process_start_time(int.from_bytes(blobs[1][BLOB_BYTES:], "little")) != -1:
            time.sleep(0.01)  # bounded by the harness
        with pytest.raises(ResourceError, match="has ended"):
            CudaRegion.attach(blobs[1][:BLOB_BYTES], rank)
        assert [name for folder in folders for name in os.listdir(folder.rstrip(b"\0"))] == []
        raise AssertionError("all is well")  # the only way past the harness, which reports the killed rank


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_a_killed_peer_stays_usable_and_its_socket_leaves_no_name(way: str) -> None:
    with pytest.raises(AssertionError, match="all is well"):
        run_ranks(_write_after_death, 2, way)


def _fail_each_call(fake: FakeDriver, action: Any, num_calls: int) -> list[str]:
    """Run `action` once for every driver call, that call failing; return those whose failure was not raised."""
    silent = []
    for index in range(num_calls):
        forget()
        fake.calls.clear()
        fake.fail_at = index
        before, taken, context = held(), fake.leaks(), fake._context()
        try:
            action().close()
            silent.append(fake.calls[index])
        except EpeeError:
            pass
        failed = fake.calls[index]
        fake.fail_at = -1
        assert fake._context() == context or failed == "cuCtxSetCurrent"
        fake._local.context = context
        assert held()[1] == before[1], failed
        if failed in GIVES_BACK:
            leaked = fake.leaks()
            assert sum(leaked.values()) <= sum(taken.values()) + 2, failed  # what that call would have given back
            _give_back(fake)
        else:
            assert fake.leaks() == taken, f"call {index}, {failed}"
            assert held() == before, f"call {index}, {failed}"
    return silent


def _give_back(fake: FakeDriver) -> None:
    """Release by hand what a failed release has left."""
    for handle in list(fake.handles):
        fake.cuMemRelease(handle)
    for address, (nbytes, _) in list(fake.mapped.items()):
        fake.cuMemUnmap(address, nbytes)
    for address, nbytes in list(fake.reserved.items()):
        fake.cuMemAddressFree(address, nbytes)
    with on_device(0):
        for address in list(fake.allocated):
            fake.cuMemFree(address)


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_of_any_call_of_create_leaves_nothing(
    fake: FakeDriver, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPEE_CUDA_SHARE", way)
    fake._local.context = 7001  # another GPU's context is current, so it must be put back as well
    forget()
    CudaRegion.create(1000, 0).close()
    num_calls = len(fake.calls)
    assert num_calls > 10
    silent = _fail_each_call(fake, lambda: CudaRegion.create(1000, 0), num_calls)
    assert set(silent) <= {*GIVES_BACK, "cuCtxGetCurrent"}  # what gives something back may fail without a word
    assert fake._context() == 7001


@pytest.mark.parametrize("failure", [Status.CUDA_ERROR_NOT_SUPPORTED, Status.CUDA_ERROR_NOT_PERMITTED])
def test_a_refusal_at_any_call_ends_in_another_way_or_in_nothing(fake: FakeDriver, failure: Status) -> None:
    fake._local.context = 7000
    fake.failure = failure
    CudaRegion.create(1000, 0).close()
    num_calls = len(fake.calls)
    silent = set(_fail_each_call(fake, lambda: CudaRegion.create(1000, 0), num_calls))
    by_ipc_instead = {"cuMemCreate", "cuMemExportToShareableHandle"}
    assert by_ipc_instead <= silent <= {*by_ipc_instead, *GIVES_BACK}


def _fail_attach(rank: int, num_ranks: int, way: str) -> tuple[int, list[str]]:
    os.environ["EPEE_CUDA_SHARE"] = way
    with installed(FakeDriver()) as fake:
        if rank == 0:
            region = CudaRegion.create(1000, 0)
            all_gather_bytes(region.blob)
            all_gather_bytes(b"done")
            region.close()
            return 0, []
        blob = all_gather_bytes(b"")[0]
        fake._local.context = 7000
        forget()
        CudaRegion.attach(blob, 1).close()
        num_calls = len(fake.calls)
        silent = _fail_each_call(fake, lambda: CudaRegion.attach(blob, 1), num_calls)
        all_gather_bytes(b"done")
        return num_calls, silent


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_of_any_call_of_attach_leaves_nothing(way: str) -> None:
    _, (num_calls, silent) = run_ranks(_fail_attach, 2, way)
    assert num_calls > 8
    assert set(silent) <= {*GIVES_BACK, "cuCtxGetCurrent"}


@pytest.mark.parametrize("name", ["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"])
def test_a_gpu_without_descriptors_lends_by_ipc(fake: FakeDriver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.attributes[name] = 0
    region = CudaRegion.create(1000, 0)
    assert region.ways == Way.IPC
    with pytest.raises(UnsupportedError, match="cannot be attached in its own process"):
        CudaRegion.attach(region.blob, 0)
    region.close()
    monkeypatch.setenv("EPEE_CUDA_SHARE", "scm")
    with pytest.raises(
        UnsupportedError, match=rf"GPU 0 cannot lend .*{name.lower()} is 0.*leave EPEE_CUDA_SHARE unset"
    ):
        CudaRegion.create(1000, 0)


def test_a_gpu_that_lends_in_no_way_says_so(fake: FakeDriver) -> None:
    fake.refused = dict.fromkeys(("cuMemExportToShareableHandle", "cuIpcGetMemHandle"), Status.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(UnsupportedError, match=r"cannot lend memory .*by cudaIpc .*; use CPU tensors"):
        CudaRegion.create(1000, 0)


def test_a_full_gpu_is_an_error_and_no_reason_for_another_way(fake: FakeDriver) -> None:
    with pytest.raises(ResourceError, match=r"allocate 10737424\d+ bytes on GPU 0: .*OUT_OF_MEMORY; free GPU memory"):
        CudaRegion.create(100 << 30, 0)
    assert "cuMemAlloc" not in fake.calls


def test_gpus_without_a_link_are_named(fake: FakeDriver) -> None:
    fake.strangers = {(0, 1)}
    region = CudaRegion.create(1000, 1)
    with pytest.raises(UnsupportedError, match=rf"GPU 0 cannot reach GPU 1 of process {os.getpid()}: no NVLink or P2P"):
        CudaRegion.attach(region.blob, 0)
    unseen = region.blob[:-80] + b"x" * 16 + region.blob[-64:]  # a GPU that this process does not see: try it
    with pytest.raises(ResourceError, match=r"let GPU 0 reach the memory \(is there NVLink"):
        CudaRegion.attach(unseen, 0)
    CudaRegion.attach(region.blob, 1).close()
    region.close()


def test_ways_that_differ_between_ranks_are_named(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    region = CudaRegion.create(1000, 0)
    monkeypatch.setenv("EPEE_CUDA_SHARE", "ipc")
    with pytest.raises(InvalidState, match=rf"SHARE=ipc here, but process {os.getpid()} offers pidfd; set it alike"):
        CudaRegion.attach(region.blob, 0)
    region.close()


def test_the_process_is_looked_at_before_pidfd_is_trusted(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert cuda_share.why_pidfd_may_fail() == ""
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(cuda_share, "_may_trace_all", lambda: False)
    for value, reason in (("0", ""), ("1", "ptrace_scope is 1"), ("3", "ptrace_scope is 3"), ("odd", "")):
        scope.write_text(value)
        assert cuda_share.why_pidfd_may_fail(str(scope)).endswith(reason)
        assert bool(cuda_share.why_pidfd_may_fail(str(scope))) == bool(reason)
    monkeypatch.setattr(cuda_share, "_may_trace_all", lambda: True)
    scope.write_text("2")
    assert cuda_share.why_pidfd_may_fail(str(scope)) == ""
    scope.write_text("3")
    assert cuda_share.why_pidfd_may_fail(str(scope)) == "kernel.yama.ptrace_scope is 3"


def test_only_a_refusal_leads_to_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = make_claim(b"testtest", 5, 4096)._replace(pid=1, start_time=process_start_time(1))
    fetched: list[int] = []
    monkeypatch.setattr(cuda_share, "fetch_descriptor", lambda claim, fd: fetched.append(fd) or 77)
    both = Way.PIDFD | Way.SCM
    for error, kind in ((1, None), (38, None), (24, "Too many open files"), (9, "has no descriptor 5"), (3, "ended")):

        def refuse(pidfd: int, fd: int, error: int = error) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(cuda_share, "copy_by_pidfd", refuse)
        if kind is None:
            assert cuda_share.obtain_descriptor(claim, both, 8) == (77, Way.SCM)
        else:
            with pytest.raises((ResourceError, ProtocolError), match=kind):
                cuda_share.obtain_descriptor(claim, both, 8)
    assert fetched == [8, 8]


def test_a_region_whose_descriptor_was_closed_is_named(fake: FakeDriver) -> None:
    region = CudaRegion.create(1000, 0)
    blob = region.blob
    region.close()
    with pytest.raises(ProtocolError, match=r"has no descriptor|import GPU memory"):
        CudaRegion.attach(blob, 0)


def test_the_last_tensor_gives_the_memory_back_from_any_thread(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in WAYS:
        monkeypatch.setenv("EPEE_CUDA_SHARE", way)
        region = CudaRegion.create(1000, 0)
        released: list[int] = []
        kept = [region.lease(64, 100, lambda released=released: released.append(1))]  # type: ignore[misc]
        view = kept[0].view(torch.float32)[3:]
        region.close()
        with pytest.raises(InvalidState, match="closed"):
            region.tensor(torch.uint8, 0, (1,))
        kept.clear()
        view.fill_(2)
        assert (fake.leaks() != {}, released) == (True, [])
        holder = [view]
        del view
        thread = threading.Thread(target=holder.clear)  # a thread without a CUDA context
        thread.start()
        thread.join()
        assert (fake.leaks(), released) == ({}, [1])


def test_a_forgotten_region_is_given_back(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_CUDA_SHARE", "scm")
    before = held()
    region = CudaRegion.create(1000, 0)
    assert held()[1] == before[1] + 1
    del region
    assert (fake.leaks(), held()) == ({}, before)


def test_another_gpus_context_stays_current(fake: FakeDriver) -> None:
    with on_device(1):
        assert fake._context() == 7001
    assert fake._context() == 7001  # there was none: ours stays, as after any first CUDA call
    region = CudaRegion.create(1000, 0)
    CudaRegion.attach(region.blob, 0).close()
    assert fake._context() == 7001
    region.close()
    with pytest.raises(ResourceError, match="open GPU 5"):
        CudaRegion.create(1000, 5)
    assert fake._context() == 7001


def test_a_machine_without_the_bindings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    forget()
    with pytest.raises(UnsupportedError, match=r"need the package cuda-bindings .*`pip install cuda-bindings`"):
        CudaRegion.create(1000, 0)
