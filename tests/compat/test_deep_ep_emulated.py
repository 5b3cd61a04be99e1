"""DeepEP's buffers over GPU buffers, without a GPU: the cases of the CPU, kernels built by g++, real rank processes.

What the layer does otherwise on GPUs is tested here: results that nobody waits for, capped rooms, orders by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import epee
import epee.compat.deep_ep as deep_ep
from epee import reference
from epee.compat.deep_ep.shared.layout import recv_channel_prefix_matrix
from epee.ep.pool import latency as latency_rooms
from epee.ep.pool import needs, pool
from epee.ep.pool import throughput as rooms
from epee.errors import InvalidArgument, InvalidState, MismatchError, RankFailedError
from tests.compat import cut_cases, hybrid_cases
from tests.compat import test_deep_ep_buffer as v1
from tests.compat import test_deep_ep_elastic as v2
from tests.compat.deep_ep_cases import v1_handle, world
from tests.csrc.emulated import EmulatedKernel, has_compiler
from tests.csrc.emulated_buffer import EmulatedBuffer
from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer
from tests.ep.buffer_cases import make_input
from tests.ep.test_latency_rejoin import die, lose, start
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first case for a number of ranks builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]


def _emulated(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with rooms on the emulated GPU."""
    rooms.Buffer = EmulatedBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    result = function(rank, num_ranks, *args)
    dist.barrier()  # a rank that leaves while another is still in its last call is a death to it, as it should be
    return result


def _run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(_emulated, num_ranks, function, *args, timeout_s=200)


def _clear_tail(value: Any, num_real: int) -> None:
    """Rows behind those that came are undefined on GPUs: make them what the CPU has there."""
    for part in value if isinstance(value, tuple) else (value,):
        if part is not None:
            part[num_real:] = 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_v1_agrees_with_the_reference(num_ranks: int) -> None:
    setup = v1._setup(num_ranks)
    by_rank = _run(num_ranks, v1._run, setup)
    at = 0
    for call in setup.calls:
        inputs = [make_input(setup, call, rank) for rank in range(num_ranks)]
        wanted = reference.dispatch(inputs, setup.num_experts)
        for num_worst in (0,) if call.routing == "mask" else (0, v1.NUM_WORST):
            results = [results[at] for results in by_rank]
            for rank, got in enumerate(results):
                if num_worst:
                    num_recv = len(wanted[rank].src_rank)
                    for name in ("x", "again", "topk_weights"):
                        _clear_tail(got[name], num_recv)
                    if len(set(call.num_tokens)) > 1:  # where ranks have unlike numbers of tokens, this one is a guess
                        members = [v1.routing_of(setup, given)["is_token_in_rank"] for given in inputs]
                        got["handle"][2] = v1.v1_handle(members, wanted[rank], rank, v1.NUM_SMS // 2)[2]
            v1._check(setup, call, results, num_worst)
            at += 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_v2_agrees_with_the_reference(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, cases = v2._setup(num_ranks), v2._cases(num_ranks)
    by_rank = _run(num_ranks, v2._run, setup, cases)
    plain = v2._num_rows

    def num_rows(setup: Any, case: Any, want: Any) -> int:
        if case.do_cpu_sync is not False or not case.do_expand:
            return plain(setup, case, want)
        num_topk, num_local = setup.num_topk, setup.num_local_experts
        worst = num_ranks * v2.NUM_MAX * min(num_topk, num_local)
        room = max(num_ranks * v2.NUM_MAX, min(worst, needs.BALANCED_SHARES * num_topk * v2.NUM_MAX))
        return room + num_local * (case.call.expert_alignment - 1)

    monkeypatch.setattr(v2, "_num_rows", num_rows)
    for index, case in enumerate(cases):
        results = [results[index] for results in by_rank]
        inputs = [make_input(setup, case.call, rank) for rank in range(num_ranks)]
        options: Any = {"layout": case.call.layout, "expert_alignment": case.call.expert_alignment}
        for got, want in zip(results, reference.dispatch(inputs, setup.num_experts, **options), strict=True):
            if case.do_cpu_sync is False:
                num_recv = len(want.src_rank)
                for value in (got["x"], got["topk_weights"], got["again"][0], got["again"][2]):
                    _clear_tail(value, num_recv)
        v2._check(setup, case, results)


def test_hybrid_agrees_with_one_row_at_a_time() -> None:
    _run(2, hybrid_cases.run_calls)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_hybrid_asks_the_ranks_only_when_a_call_needs_more(num_ranks: int) -> None:
    assert _run(num_ranks, hybrid_cases.run_growth) == [6] * num_ranks


def _blind_refusals(rank: int, num_ranks: int) -> None:
    """Refuse rows that are not on the GPU, or are none, while the others' calls ask no rank."""
    buffer = deep_ep.HybridEPBuffer(world(), hybrid_cases.HIDDEN, hybrid_cases.MAX_TOKENS, hybrid_cases.NUM_LOCAL)
    mine = hybrid_cases.given(rank, num_ranks, 1)
    options: dict[str, Any] = {"hidden": mine.hidden, "routing_map": mine.routing_map, "probs": mine.probs}
    options |= {"num_permuted_tokens": 64, "non_blocking": True}
    hybrid_cases.check_call(buffer, rank, num_ranks, 1, None)
    for hidden, words in ((None, "x must be"), (mine.hidden, "hidden must be where it was")):
        if rank == 0:
            with pytest.MonkeyPatch.context() as settings:
                settings.setattr(pool.BufferPool, "is_gpu", lambda self, device: False)
                with pytest.raises(InvalidArgument, match=words):
                    buffer.dispatch_with_permute(**{**options, "hidden": hidden})
        else:
            with pytest.raises(MismatchError, match="rank 0 refused"):
                _dispatch_and_check(buffer, options)
        hybrid_cases.check_call(buffer, rank, num_ranks, 2, 4)


def _dispatch_and_check(buffer: deep_ep.HybridEPBuffer, options: dict[str, Any]) -> None:
    buffer.dispatch_with_permute(**options)
    buffer._pool().check()


def test_hybrid_refuses_what_is_not_on_the_gpu_where_the_others_call_it() -> None:
    _run(2, _blind_refusals)


def test_v2_refuses_everywhere_and_works_on() -> None:
    peer, here = _run(2, v2._refuse)
    for name, text in here.items():
        assert name in text, text
        assert "rank 1 refused" in peer[name]
        assert text[:60] in peer[name]


def test_rooms_grow_and_go() -> None:
    _run(2, v2._life)


class _Ops(TorchDispatchMode):
    """What torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _elastic(num_ranks: int, rank: int, **options: Any) -> tuple[Any, Any]:
    """A V2 buffer that has made a dispatch, and its handle."""
    buffer = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=5, num_cpu_timeout_secs=20)
    x = torch.full((3 + rank, 8), rank + 1.0, dtype=torch.bfloat16)
    idx = (torch.arange(2 * len(x)).view(-1, 2) + rank) % (3 * num_ranks)
    return buffer, buffer.dispatch(x, idx, num_experts=3 * num_ranks, do_cpu_sync=False, **options)[3]


def _read_sums(rank: int, num_ranks: int) -> set[str]:
    names: set[str] = set()
    for do_expand in (False, True):
        _, handle = _elastic(num_ranks, rank, do_expand=do_expand, expert_alignment=4)
        with _Ops() as ops:
            for name in v2.FIELDS[3:6]:
                getattr(handle, name)
        names |= ops.names
    return names


def test_v2_sums_are_the_kernels_own_so_a_graph_may_be_recorded_when_they_are_read() -> None:
    assert _run(2, _read_sums) == [{"slice"}] * 2


def _barriers(rank: int, num_ranks: int) -> tuple[list[str], int, int, str]:
    deep_ep.ElasticBuffer(world()).barrier()  # no memory yet: the hosts meet
    buffer, _ = _elastic(num_ranks, rank)
    launches: list[str] = []
    launch = EmulatedKernel.__call__

    def count(kernel: Any, *args: Any) -> None:
        launches.append(type(kernel.args).__name__)
        launch(kernel, *args)

    EmulatedKernel.__call__ = count  # type: ignore[method-assign]
    whole = buffer.runtime._rooms.whole
    control = whole._exchange
    before = control.seq
    for i in range(12):
        buffer.barrier(with_cpu_sync=i % 2 == 1)
    num_exchanges = control.seq - before
    whole._timeout = 0.5
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    error = ""
    try:
        buffer.barrier(with_cpu_sync=True)
    except epee.CommTimeoutError as late:
        error = str(late)
    if rank == 0:
        store.set("given up", "")
    whole._timeout = 20.0
    with pytest.raises(epee.errors.MismatchError, match="an earlier call has failed on one of rank"):
        buffer.barrier(with_cpu_sync=True)
    return launches[:12], len(launches), num_exchanges, error


def test_v2_barrier_is_one_kernel_and_names_a_silent_peer() -> None:
    here, late = _run(2, _barriers)
    for launches, num_launches, num_exchanges, _ in (here, late):
        assert launches == ["BarrierParams"] * 12
        assert num_launches == 14
        assert num_exchanges == 0
    assert "barrier (rank=0, peer=1, seq=14): rank 1 was silent too long" in here[3]
    assert late[3] == ""


def _handles_read_late(rank: int, num_ranks: int) -> set[str]:
    """Return what torch does in V1's calls; their handles are read behind calls that have taken their slots.

    The ranks have unlike numbers of tokens.
    """
    buffer = deep_ep.Buffer(world())
    given = [v1._tokens(src, 3 + src) for src in range(num_ranks)]
    mine = given[rank]
    with torch.no_grad():
        handles = [v1._goes_round(buffer, mine)]
        buffer.dispatch(**mine, num_worst_tokens=16)
        with _Ops() as ops:
            handles.append(v1._goes_round(buffer, mine))
        with _Ops() as blind:
            handles.append(buffer.dispatch(**mine, num_worst_tokens=16)[4])
        before = ops.names | blind.names
        for num_tokens in (2, 5, 1):
            v1._goes_round(buffer, v1._tokens(rank, num_tokens))
    routed = [reference.Routed(each["x"], each["topk_idx"]) for each in given]
    want = v1_handle([each["is_token_in_rank"] for each in given], reference.dispatch(routed, 4)[rank], rank, 10)
    for handle in handles[:2]:
        for part, expected in zip(reversed(handle), reversed(want), strict=True):
            assert torch.equal(part, expected)
        assert buffer._known(list(handle)) is buffer._known(handle)
    blind_handle = handles[2]
    assert blind_handle is not None
    assert torch.equal(blind_handle[0], want[0])
    assert torch.equal(blind_handle[3][: len(want[3])], want[3])
    assert bool((blind_handle[3][len(want[3]) :] == -1).all())
    assert len(blind_handle[3]) == 16
    return before


def test_v1_makes_no_matrix_and_no_host_waits_before_somebody_reads_the_handle() -> None:
    for names in _run(2, _handles_read_late):
        # `equal` is the test's own; the core copies rows, and what handles keep of them, out of slots that others need
        assert names <= {"empty", "new_empty", "detach", "equal", "clone", "copy_", "slice", "view"}, names


class _Asked:
    """Counts how often a pool asks the ranks."""

    def __init__(self, buffer: deep_ep.Buffer) -> None:
        self.times, original = 0, buffer._pool().agree

        def agree(wish: Any) -> Any:
            """Ask, and count."""
            self.times += 1
            return original(wish)

        buffer._pool().agree = agree  # type: ignore[method-assign]


def _room_grows(rank: int, num_ranks: int) -> list[int]:
    """Return how often the ranks were asked after each of some dispatches; one rank's tokens need more room twice."""
    needs._LEAST_TOKENS = 4
    buffer = deep_ep.Buffer(world())
    asked, times = _Asked(buffer), []
    for counts in ((3, 2), (4, 1), (2, 9), (9, 9), (33, 1), (0, 20)):
        given = [v1._tokens(src, count) for src, count in enumerate(counts[:num_ranks])]
        handle = v1._goes_round(buffer, given[rank])
        routed = [reference.Routed(each["x"], each["topk_idx"]) for each in given]
        want = v1_handle([each["is_token_in_rank"] for each in given], reference.dispatch(routed, 4)[rank], rank, 10)
        assert all(torch.equal(part, expected) for part, expected in zip(handle, want, strict=True))
        times.append(asked.times)
    return times


def test_v1_asks_the_ranks_only_where_somebody_needs_more_room() -> None:
    assert _run(2, _room_grows) == [[1, 1, 2, 2, 3, 3]] * 2


def _wrong_behind_a_room(rank: int, num_ranks: int) -> list[str]:
    buffer = deep_ep.Buffer(world())
    given = v1._tokens(rank, 3)
    v1._goes_round(buffer, given)
    told = []
    for _ in range(2):
        try:
            buffer.dispatch(**({**given, "num_tokens_per_rank": None} if rank == 1 else given))
        except (InvalidArgument, MismatchError) as error:
            told.append(type(error).__name__)
    v1._goes_round(buffer, given)
    return told


def test_v1s_refused_call_is_refused_at_once_where_nobody_asks() -> None:
    assert _run(2, _wrong_behind_a_room) == [["MismatchError"] * 2, ["InvalidArgument"] * 2]


@pytest.mark.parametrize("seed", range(5))
def test_channels_are_found_behind_a_tail_and_among_unlike_ranks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_channels, most = 4, (0, 1, 7, 12, 40)[seed]
    num_tokens = [most, most // 2, most]
    parts = [torch.rand(count, generator=generator).lt(0.6).nonzero()[:, 0] for count in num_tokens]
    want = [
        [int((part < channel * max(1, -(-count // num_channels))).sum()) for channel in range(num_channels)]
        for part, count in zip(parts, num_tokens, strict=True)
    ]
    received = torch.tensor([len(part) for part in parts]).cumsum(0)
    tail = torch.full((5,), -1)
    for rows in (torch.cat(parts), torch.cat([*parts, tail])):
        counts = torch.tensor(num_tokens)
        assert recv_channel_prefix_matrix(rows, received, counts, most + 3, num_channels).tolist() == want


def _replaced(slot: int, num_processes: int, folder: str) -> str:
    """Process 2 takes the place of rank 1: the old buffer says that all need a new one, which works for all."""
    rank = min(slot, 1)
    if slot == 2:
        stages.wait_for(folder, "lost", 150)
    group = start(rank, 2, folder, joins=slot == 2)
    if slot < 2:
        buffer = deep_ep.Buffer(group, explicitly_destroy=True)
        handle = v1._goes_round(buffer, v1._tokens(rank, 3))
        stages.meet(folder, "made", rank, range(2))
        if slot == 1:
            die()
        given = v1._tokens(rank, 3)
        calls = {
            "fresh": lambda: buffer.dispatch(**given),
            "again": lambda: buffer.dispatch(given["x"], handle=handle),
            "back": lambda: buffer.combine(given["x"], handle),
        }
        _expect_words(calls)
        lose(group, folder, 1, "lost")
        _expect_words(calls)  # whoever has come into the group has no part in the old buffer
        buffer.destroy()
        with pytest.raises(InvalidState, match="destroyed"):
            buffer.combine(given["x"], handle)
    buffer = deep_ep.Buffer(group)
    for num_tokens in (200, 5, 3):
        new = v1._goes_round(buffer, v1._tokens(rank, num_tokens))
    x = torch.zeros(buffer._known(new).handle.num_recv, 8, dtype=torch.bfloat16)
    if slot == 0:
        with pytest.raises(InvalidArgument, match="handle must be what a dispatch of this buffer returned"):
            buffer.combine(x, handle)
    else:
        with pytest.raises(MismatchError, match="rank 0 refused"):
            buffer.combine(x, new)
    v1._goes_round(buffer, v1._tokens(rank, 4))
    stages.meet(folder, "end", rank, range(2))
    return "ok"


def _expect_words(calls: dict[str, Callable[[], object]]) -> None:
    """Each call names the rank that is gone, and what there is to do."""
    for call in calls.values():
        with pytest.raises(RankFailedError, match=r"DeepEP's buffers have no sync: .* make a new one") as caught:
            call()
        assert caught.value.ranks == (1,)


def test_a_lost_rank_ends_a_buffer_in_words_and_its_replacement_is_in_the_next_one() -> None:
    assert run_mortal(_mortal, 3, _replaced, dead={1}, timeout_s=45) == ["ok", DEAD, "ok"]


def _mortal(slot: int, num_processes: int, folder: str, function: Callable[..., Any]) -> Any:
    """Run a process's function with rooms on the emulated GPU."""
    rooms.Buffer = EmulatedBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    return function(slot, num_processes, folder)


def _early(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with memory that constructors make on the emulated GPU."""
    rooms.Buffer = EmulatedBuffer  # type: ignore[misc]
    pool.BufferPool.is_gpu = lambda self, device: True  # type: ignore[method-assign]
    pool.current_gpu = lambda: torch.device("cpu")
    latency_rooms.LatencyBuffer = EmulatedLatencyBuffer  # type: ignore[misc]
    return function(rank, num_ranks, *args)


def _no_group(*args: object, **more: object) -> None:
    raise AssertionError("a call went through the process group")


def _v1_round(buffer: Any, given: dict[str, Any]) -> None:
    """What V1 sends comes back."""
    v1._goes_round(buffer, given)


def _v2_round(buffer: Any, given: dict[str, Any]) -> None:
    """What V2 sends comes back, expanded as well."""
    num_experts, most = given["num_tokens_per_expert"].numel(), max(64, len(given["x"]))
    for do_expand in (False, True):
        sizes = {"num_experts": num_experts, "num_max_tokens_per_rank": most, "do_expand": do_expand}
        got = buffer.dispatch(given["x"], given["topk_idx"], given["topk_weights"], **sizes)
        assert torch.equal(buffer.combine(got[0], got[3])[0], given["x"])


def _made_in_the_constructor(rank: int, num_ranks: int) -> None:
    """Calls of all sizes find their place in the bytes that were given, without the group, under capture as well."""
    sizes = {"num_max_tokens_per_rank": 64, "hidden": 64, "num_topk": 1}
    for buffer, goes_round in (
        (deep_ep.Buffer(world(), num_nvl_bytes=3 << 20), _v1_round),
        (deep_ep.ElasticBuffer(world(), num_cpu_timeout_secs=20, **sizes), _v2_round),
    ):
        assert buffer.runtime is not None
        before = buffer.runtime.nbytes
        gather, dist.all_gather_into_tensor = dist.all_gather_into_tensor, _no_group
        rooms.is_capturing = lambda: True
        for num_tokens, hidden, num_experts in ((3, 8, 4), (64, 64, 4), (0, 16, 8), (1, 8, 4), (40 * rank, 64, 8)):
            goes_round(buffer, v1._tokens(rank, num_tokens, hidden, num_experts))
        assert buffer.runtime.nbytes == before
        with pytest.raises(
            InvalidArgument, match=r"need \d+ bytes of memory, this buffer has \d+, and none can be made"
        ):
            goes_round(buffer, v1._tokens(rank, 3000, 1024))
        dist.all_gather_into_tensor = gather
        rooms.is_capturing = lambda: False
        goes_round(buffer, v1._tokens(rank, 3000, 1024))  # grows, once
        grown = buffer.runtime.nbytes
        assert grown > before
        for num_tokens, hidden in ((2000, 1024), (5, 8)):
            goes_round(buffer, v1._tokens(rank, num_tokens, hidden))
        assert buffer.runtime.nbytes == grown


def test_memory_is_made_in_the_constructor() -> None:
    run_ranks(_early, 2, _made_in_the_constructor, timeout_s=200)


def _dies_before_the_first_call(rank: int, num_ranks: int) -> str:
    buffer = deep_ep.Buffer(world(), num_nvl_bytes=3 << 20)
    elastic = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=64, hidden=64, num_topk=2)
    if rank == 1:
        die()
    given = v1._tokens(rank, 3)
    for call in (
        lambda: buffer.dispatch(**given),
        lambda: elastic.dispatch(given["x"], given["topk_idx"], given["topk_weights"], num_experts=4),
    ):
        with pytest.raises(RankFailedError, match="make a new one") as caught:
            call()
        assert caught.value.ranks == (1,)
    return "ok"


def test_a_death_before_the_first_call_is_told_to_all() -> None:
    assert run_ranks(_early, 2, _dies_before_the_first_call, dead={1}, timeout_s=100) == ["ok", DEAD]


def _bad_sizes(rank: int, num_ranks: int) -> None:
    """Sizes that kernels do not serve, on rank 1: the others hear of it at once, in each kind of call."""
    v1_buffer = deep_ep.Buffer(world(), num_nvl_bytes=3 << 20)
    v2_buffer: Any = deep_ep.ElasticBuffer(world(), num_max_tokens_per_rank=8, hidden=64, num_cpu_timeout_secs=60)
    latent: Any = deep_ep.Buffer(world(), num_rdma_bytes=64 << 20, low_latency_mode=True)
    calls: dict[str, Callable[[dict[str, Any]], Any]] = {
        "v1": lambda given: v1_buffer.dispatch(**given),
        "v2": lambda given: v2_buffer.dispatch(given["x"], given["topk_idx"], given["topk_weights"], num_experts=4),
        "low latency": lambda given: latent.low_latency_dispatch(given["x"], given["topk_idx"], 8, 4, use_fp8=False),
    }
    good, bad = v1._tokens(rank, 3, 64), v1._tokens(rank, 3, 12)
    for call in calls.values():
        call(good)
        with pytest.raises(InvalidArgument if rank else MismatchError, match="hidden" if rank else "refused"):
            call(bad if rank else good)
        call(good)


def test_sizes_that_kernels_do_not_serve_are_refused_on_all() -> None:
    run_ranks(_early, 2, _bad_sizes, timeout_s=60)


@pytest.mark.parametrize("name", list(cut_cases.NAMES))
def test_results_may_be_cut_to_the_rows_that_came(name: str) -> None:
    _run(2, cut_cases.cut_results, name)


def test_rows_that_came_may_not_be_cut_off() -> None:
    here, peer = _run(2, cut_cases.too_few, "deep_ep")
    assert all(text.startswith("InvalidArgument: y must have the 6 rows that the dispatch received") for text in here)
    assert all("rank 0" in text for text in peer)


def test_results_of_v1_may_be_cut_to_the_rows_that_came() -> None:
    _run(2, cut_cases.cut_by_v1)
