"""Other memory at the address of a peer's, on the fake driver: what shows there, and what a refusal leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from epee.errors import EpeeError, InvalidArgument, ResourceError, UnsupportedError
from epee.memory import cuda, cuda_mapping
from epee.memory.cuda import CudaRegion, lends_descriptors
from tests.memory.fake_driver import GIVES_BACK, GRANULE_BYTES, FakeDriver, Status, forget
from tests.memory.test_cuda_region import fake as fake  # a fixture


@contextlib.contextmanager
def three() -> Iterator[tuple[CudaRegion, CudaRegion, CudaRegion]]:
    """Memory that holds ones, memory that holds twos, and a region that has mapped the first."""
    first, second = (CudaRegion.create(1000, 0) for _ in range(2))
    for value, region in enumerate((first, second), 1):
        region.tensor(torch.uint8, 0, (1000,)).fill_(value)
    peer = CudaRegion.attach(first.blob, 1)
    try:
        yield first, second, peer
    finally:
        for region in (peer, first, second):
            region.close()


def shown(region: CudaRegion) -> int:
    """The value that a region holds."""
    (value,) = region.tensor(torch.uint8, 0, (1000,)).unique().tolist()
    return int(value)


def test_other_memory_takes_the_place_at_the_same_address(fake: FakeDriver) -> None:
    with three() as (first, second, peer):
        address, view = peer.address, peer.tensor(torch.uint8, 0, (1000,))
        peer.replace(second.blob)
        assert peer.address == address
        assert peer.blob == second.blob
        assert shown(peer) == int(view[0]) == 2
        view.fill_(3)
        assert shown(second) == 3
        assert shown(first) == 1
        peer.replace(first.blob)
        assert shown(peer) == int(view[0]) == 1
        del view
    assert fake.leaks() == {}


def test_memory_of_another_size_is_refused(fake: FakeDriver) -> None:
    with three() as (_, _, peer):
        large = CudaRegion.create(GRANULE_BYTES, 0)
        with pytest.raises(InvalidArgument, match="use equal sizes"):
            peer.replace(large.blob)
        assert shown(peer) == 1
        large.close()


def test_memory_that_is_lent_by_ipc_has_no_address_of_our_choice(fake: FakeDriver) -> None:
    with three() as (_, second, _):
        fake.attributes["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 0
        assert not lends_descriptors(0)
        region = CudaRegion.create(1000, 0)
        with pytest.raises((UnsupportedError, InvalidArgument)):
            region.replace(second.blob)
        region.close()
        fake.attributes["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"] = 1
        assert lends_descriptors(0)


@pytest.mark.parametrize("way", ["pidfd", "scm", "ipc"])
def test_a_forced_way_says_how_memory_is_lent(way: str, monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    monkeypatch.setenv("EPEE_CUDA_SHARE", way)
    assert lends_descriptors(0) == (way != "ipc")


def test_a_failure_of_any_call_leaves_what_was_there_and_the_next_attempt_succeeds(fake: FakeDriver) -> None:
    fake._local.context = 7001
    with three() as (_, second, peer):
        forget()
        fake.calls.clear()
        peer.replace(second.blob)
        names = list(fake.calls)
    assert {"cuMemRetainAllocationHandle", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"} <= set(names)
    for index, name in enumerate(names):
        if name in (*GIVES_BACK, "cuCtxGetCurrent") and name != "cuMemUnmap":
            continue  # may fail without a word
        with three() as (_, second, peer):
            forget()
            fake.calls.clear()
            fake.fail_at = index
            try:
                peer.replace(second.blob)
                assert name == "cuMemUnmap", name  # of the first mapping, which is given back
                assert shown(peer) == 2
            except EpeeError:
                assert shown(peer) == 1, f"call {index}, {name}"
                fake.fail_at = -1
                peer.replace(second.blob)
                assert shown(peer) == 2
            finally:
                fake.fail_at = -1
                fake._local.context = 7001
        for address, (nbytes, _) in list(fake.mapped.items()):  # what a failed release has left
            fake.cuMemUnmap(address, nbytes)
        for address, nbytes in list(fake.reserved.items()):
            fake.cuMemAddressFree(address, nbytes)
        assert fake.leaks() == {}, f"call {index}, {name}"


def test_where_not_even_the_old_memory_can_be_mapped_again_the_next_attempt_succeeds(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place = cuda.put_in_place

    def refused(*args: object) -> None:
        fake.refused["cuMemMap"] = Status.CUDA_ERROR_OUT_OF_MEMORY
        try:
            put_in_place(*args)  # type: ignore[arg-type]
        finally:
            fake.refused.clear()

    with three() as (first, second, peer):
        address = peer.address
        monkeypatch.setattr(cuda, "put_in_place", refused)
        for blob in (second.blob, first.blob):
            with pytest.raises(ResourceError, match="map"):
                peer.replace(blob)
            assert peer.blob == first.blob or blob == first.blob
        monkeypatch.undo()
        peer.replace(second.blob)
        assert peer.address == address
        assert shown(peer) == 2
    with three() as (_, second, peer):
        monkeypatch.setattr(cuda, "put_in_place", refused)
        with pytest.raises(ResourceError, match="map"):
            peer.replace(second.blob)
        monkeypatch.undo()
        peer.close()  # with nothing mapped
    assert fake.leaks() == {}


def test_an_interrupt_leaves_what_the_next_attempt_maps(fake: FakeDriver) -> None:
    with three() as (_, second, peer):
        fake.calls.clear()
        peer.replace(second.blob)
        names = list(fake.calls)
    unmap = names.index("cuMemUnmap")  # of what is to be replaced; new memory is mapped elsewhere before
    assert names[unmap : unmap + 3] == ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"]
    for index in range(unmap, unmap + 3):
        with three() as (first, second, peer):
            address = peer.address
            fake.calls.clear()
            fake.interrupt_at = index
            with pytest.raises(KeyboardInterrupt):
                peer.replace(second.blob)
            fake.interrupt_at = -1
            for value, blob in ((2, second.blob), (1, first.blob), (2, second.blob)):
                peer.replace(blob)
                assert shown(peer) == value, names[index]
            assert peer.address == address
        assert fake.leaks() == {}, names[index]


def interrupted_behind_its_mapping(monkeypatch: pytest.MonkeyPatch, undo_fails: bool) -> None:
    """A signal handler raises when the new memory is mapped; with `undo_fails` the old one cannot be mapped again."""
    fill, calls = cuda_mapping._fill, iter(range(2))

    def fills(*args: object) -> None:
        number = next(calls)
        if number == 1 and undo_fails:
            raise ResourceError("map the old memory again")
        fill(*args)  # type: ignore[arg-type]
        if number == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(cuda_mapping, "_fill", fills)


@pytest.mark.parametrize("undo_fails", [False, True])
def test_an_interrupt_behind_the_last_step_comes_out_whatever_the_undo_meets(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, undo_fails: bool
) -> None:
    with three() as (first, second, peer):
        blobs = first.blob, second.blob
        new = CudaRegion.attach(second.blob, 1)
        old = peer._mapping
        assert old is not None
        assert new._mapping is not None
        interrupted_behind_its_mapping(monkeypatch, undo_fails)
        with pytest.raises(KeyboardInterrupt):
            cuda_mapping.put_in_place(old, new._mapping)
        monkeypatch.undo()
        new.close()
        assert old.is_bare == undo_fails
        del old  # which would keep the addresses
        if not undo_fails:
            assert shown(peer) == 1
        for value, blob in ((2, blobs[1]), (1, blobs[0])):
            peer.replace(blob)
            assert shown(peer) == value
    assert fake.leaks() == {}
