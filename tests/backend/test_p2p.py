"""Point to point: order, tags, any source, sizes, mismatches, progress without waiting."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from epee.errors import CommTimeoutError, MismatchError, ProtocolError
from tests.harness import run_ranks

from . import cases
from .cases import DTYPES, Placed, same, values

PATIENCE = timedelta(seconds=30)
SIZES = (0, 1, 1000, 16_384, 16_385, 100_000)


def ring(rank: int, num_ranks: int) -> None:
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for dtype in DTYPES:
        for strided in (False, True):
            for shape in ((), (3,), (0,), (4, 5)):
                out = Placed(torch.zeros(shape, dtype=dtype), strided)
                work = dist.isend(Placed(values(rank, shape, dtype), strided).tensor, right)
                assert dist.recv(out.tensor, left) == left
                work.wait()
                out.check(values(left, shape, dtype), f"{dtype} {shape} strided={strided}")
    for size in SIZES:
        out = torch.empty(size)
        work = dist.isend(values(rank, (size,), torch.float32), right)
        dist.recv(out, left)
        work.wait()
        same(out, values(left, (size,), torch.float32), f"{size} elements")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_of_every_dtype_layout_and_size_arrive(num_ranks: int) -> None:
    run_ranks(ring, num_ranks, backend="epee")


def larger_than_the_lane(rank: int, num_ranks: int) -> None:
    size = (40 << 20) // 4 + 3
    if rank == 0:
        dist.send(values(0, (size,), torch.float32), 1)
        dist.send(torch.ones(3), 1)
    else:
        out = torch.empty(size)
        dist.recv(out, 0)
        same(out, values(0, (size,), torch.float32), "40 MiB")
        small = torch.zeros(3)
        dist.recv(small, 0)
        assert small.tolist() == [1, 1, 1]


def test_a_message_larger_than_its_lane_arrives() -> None:
    run_ranks(larger_than_the_lane, 2, backend="epee")


def tags(rank: int, num_ranks: int) -> None:
    if rank == 0:
        works = [
            dist.isend(torch.full((n,), float(tag)), 1, tag=tag) for tag, n in ((1, 3), (2, 50_000), (1, 3), (7, 0))
        ]
        for work in works:
            work.wait()
    else:
        last, empty = torch.zeros(50_000), torch.zeros(0)
        dist.recv(empty, 0, tag=7)  # passes over the three before it
        dist.recv(last, 0, tag=2)
        assert last.unique().tolist() == [2.0]
        for _ in range(2):
            first = torch.zeros(3)
            dist.recv(first, 0, tag=1)
            assert first.tolist() == [1.0] * 3


def test_a_receive_takes_the_oldest_message_with_its_tag() -> None:
    run_ranks(tags, 2, backend="epee")


def many(rank: int, num_ranks: int, seed: int) -> None:
    """Random traffic of all pairs; receives are posted in another order than the sends."""
    plan = random.Random(seed)
    messages = [
        (src, dst, plan.randrange(3), plan.choice(SIZES[:4]), i)
        for i, (src, dst) in enumerate(
            (s, d) for _ in range(40) for s in range(num_ranks) for d in range(num_ranks) if s != d
        )
    ]
    sends = [m for m in messages if m[0] == rank]
    receives = [m for m in messages if m[1] == rank]
    order = list(range(len(receives)))
    random.Random(seed + rank).shuffle(order)
    # within one (source, tag) the posting order is the sending order, else the sizes would not fit
    queues: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for message in receives:
        queues.setdefault((message[0], message[2]), []).append(message)
    works = [dist.isend(values(i, (size,), torch.float32), dst, tag=tag) for _, dst, tag, size, i in sends]
    got = []
    for position in order:
        src, _, tag, _, _ = receives[position]
        message = queues[src, tag].pop(0)
        out = torch.empty(message[3])
        got.append((message, out, dist.irecv(out, src, tag=tag)))
    for message, out, work in got:
        work.wait()
        same(out, values(message[4], (message[3],), torch.float32), f"message {message}")
    for work in works:
        work.wait()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_keeps_order_per_source_and_tag(seed: int) -> None:
    run_ranks(many, 3, seed, backend="epee")


def more_than_the_window(rank: int, num_ranks: int) -> None:
    count = 700
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(i)), 1) for i in range(count)]
        for work in works:
            work.wait()
    else:
        time.sleep(0.2)
        for i in range(count):
            out = torch.zeros(2)
            dist.recv(out, 0)
            assert out.tolist() == [i, i]


def test_more_messages_than_a_lane_holds_queue_up_at_the_sender() -> None:
    run_ranks(more_than_the_window, 2, backend="epee")


def any_source(rank: int, num_ranks: int) -> None:
    if rank == 0:
        seen = {}
        for _ in range(2 * (num_ranks - 1)):
            out = torch.zeros(2)
            src = dist.recv(out)
            seen.setdefault(src, []).append(out[1].item())
            assert out[0].item() == src
        assert seen == {r: [0.0, 1.0] for r in range(1, num_ranks)}
        work = dist.irecv(torch.zeros(1), tag=5)
        work.wait()
        assert work._source_rank() == 1
    else:
        for i in range(2):
            dist.send(torch.tensor([float(rank), float(i)]), 0)
        if rank == 1:
            dist.send(torch.zeros(1), 0, tag=5)
    dist.barrier()  # a rank whose process ends would end a receive from any source


def test_a_receive_from_any_source_tells_which() -> None:
    run_ranks(any_source, 3, backend="epee")


def mismatch(rank: int, num_ranks: int) -> str:
    told = ""
    for bad in ((torch.ones(3), torch.zeros(5)), (torch.ones(3), torch.zeros(3, dtype=torch.int32)),
                (torch.ones(9_000_000), torch.zeros(1)), (torch.ones(1), torch.zeros(9_000_000))):  # fmt: skip
        sent, received = bad
        keep = received.clone()
        with pytest.raises(MismatchError) as caught:
            dist.send(sent, 1) if rank == 0 else dist.recv(received, 0)
        told = told or str(caught.value)
        assert torch.equal(received, keep)
        good = torch.full((4,), 1.0 - rank)
        if rank == 0:
            dist.send(good, 1)
        else:
            dist.recv(good, 0)
        assert good.tolist() == [1.0] * 4
    dist.barrier()
    return told


def test_a_size_or_dtype_mismatch_is_an_error_on_both_sides_and_both_live_on() -> None:
    for told in run_ranks(mismatch, 2, backend="epee"):
        assert "3 elements of float32" in told
        assert "5 elements of float32" in told


def batch(rank: int, num_ranks: int) -> None:
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    mine, out = torch.full((1000,), float(rank)), torch.zeros(1000)
    ops = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert out.unique().tolist() == [float(left)]


def test_batches_of_sends_and_receives_work() -> None:
    run_ranks(batch, 3, backend="epee")


def nobody_waits(rank: int, num_ranks: int) -> float:
    big = torch.full((6_000_000,), float(rank + 1))  # 24 MB: more than the group holds
    work = dist.isend(big, 1) if rank == 0 else dist.irecv(big, 0)
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert work.is_completed()
    return big[-1].item()


def test_a_message_nobody_waits_for_moves_by_itself() -> None:
    assert run_ranks(nobody_waits, 2, backend="epee") == [1.0, 1.0]


def late_receiver(rank: int, num_ranks: int) -> None:
    x = torch.ones(2)
    if rank == 0:
        work = dist.isend(x, 1)
        with pytest.raises(CommTimeoutError, match="wait"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.recv(x, 0)


def test_a_wait_that_timed_out_may_be_repeated() -> None:
    run_ranks(late_receiver, 2, backend="epee")


def timed_out_receive(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, op_timeout=0.3 if rank else 30.0)
    out = torch.full((3,), 5.0)
    if rank == 1:
        with pytest.raises(CommTimeoutError, match="src_rank=0") as caught:
            dist.recv(out, 0)
        assert caught.value.ranks == (0,)
        assert out.tolist() == [5.0] * 3
        dist.group.WORLD.set_timeout(PATIENCE)  # type: ignore[union-attr]
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(out, 0)
        assert out.tolist() == [1.0] * 3
    dist.destroy_process_group()


def test_a_receive_that_timed_out_leaves_tensor_and_lane_usable(tmp_path: object) -> None:
    run_ranks(timed_out_receive, 2, str(tmp_path), backend=None)


def cancelled_send(rank: int, num_ranks: int, folder: str) -> None:
    cases.init(rank, num_ranks, folder, op_timeout=30.0 if rank else 0.3)
    big = torch.full((9_000_000,), 2.0)  # does not fit the group, so it is partly written when it times out
    if rank == 0:
        with pytest.raises(CommTimeoutError):
            dist.send(big, 1)
        dist.group.WORLD.set_timeout(PATIENCE)  # type: ignore[union-attr]
        dist.barrier()
        dist.send(big.fill_(3.0), 1)
    else:
        dist.barrier()  # the first send has timed out
        dist.recv(big, 0)
        assert big.unique().tolist() == [3.0]
    dist.destroy_process_group()


def test_a_send_that_timed_out_half_way_is_skipped_by_the_receiver(tmp_path: object) -> None:
    run_ranks(cancelled_send, 2, str(tmp_path), backend=None)


FLOAT32 = 13 | 9 << 6 | 9 << 12  # the signature of point_to_point of float32 without its count


def lying_header(rank: int, num_ranks: int, lie: dict[int, int], tag: int) -> str:
    """Rank 0's first header holds `lie` (position -> value); rank 1 gets an error and nothing is written."""
    from epee.engine.p2p import ends

    if rank == 0:

        class Liar:
            def pack_into(self, words: memoryview, offset: int, *values: int) -> None:
                told = [lie.get(position, value) for position, value in enumerate(values)]
                real.pack_into(words, offset, *told)

        real, ends._HEADER = ends._HEADER, Liar()  # type: ignore[assignment]
        work = dist.isend(torch.ones(4), 1, tag=1)
        dist.barrier()
        assert not work.is_completed()
        dist.barrier()  # rank 1 may leave now, which ends the send
        return "rank 0"
    x = torch.full((4,), 7.0)
    with pytest.raises(ProtocolError) as caught:
        dist.recv(x, 0, tag=tag)
    assert x.tolist() == [7.0] * 4
    dist.barrier()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("lie", "tag"),
    [
        ({0: 1 << 63}, 1),  # number of the message
        ({0: 2}, 1),
        ({0: 1 << 63}, 0),  # the same, no receive wants it
        ({2: FLOAT32 | (1 << 38) << 23, 3: 1 << 40}, 0),  # more than the machine has, consistently
        ({3: 1 << 63}, 0),  # total bytes that do not fit the count
        ({3: 17}, 0),
        ({2: 13 | 63 << 6 | 9 << 12 | 4 << 23}, 0),  # a dtype that does not exist
        ({4: 1 << 62}, 1),  # bytes of the fragment
        ({4: 0}, 1),
        ({5: 7}, 1),  # kind
    ],
)
def test_a_header_that_cannot_be_right_is_refused_before_it_is_used(lie: dict[int, int], tag: int) -> None:
    assert "rank 0" in run_ranks(lying_header, 2, lie, tag, backend="epee")[1]
