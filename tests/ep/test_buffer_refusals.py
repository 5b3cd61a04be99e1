"""Bad arguments: refused where they are given, told to the peers at once, and the buffer works afterwards.

Each row of `REFUSALS` is one bad call. All of them run one after another on the same two buffers: rank 1 makes the bad
call, rank 0 a good one, then both make a good one whose result is compared with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import epee
from tests.ep.buffer_cases import make_buffer, same_bits
from tests.ep.test_buffer_corners import setup_of
from tests.harness import run_ranks

HIDDEN, NUM_TOPK, MAX_TOKENS, NUM_EXPERTS = 128, 2, 8, 4
BAD_RANK = 1


class Scene:
    """What a bad call may use: a good dispatch's arguments and handle, and the foreign handles."""

    def __init__(self, rank: int, buffer: epee.Buffer) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.rank = rank
        self.buffer = buffer
        self.x = torch.randn(6, HIDDEN, generator=generator).to(torch.bfloat16)
        self.idx = torch.randint(-1, NUM_EXPERTS, (6, NUM_TOPK), generator=generator)
        self.weights = torch.rand(6, NUM_TOPK, generator=generator)
        self.mask = torch.ones(6, 2, dtype=torch.bool)
        self.handle = buffer.dispatch(self.x, self.idx, self.weights).handle
        self.by_mask = buffer.dispatch(self.x, is_token_in_rank=self.mask).handle
        self.y = torch.randn(self.handle.num_recv, HIDDEN, generator=generator).to(torch.bfloat16)
        self.bias = torch.zeros(6, HIDDEN, dtype=torch.bfloat16)
        self.foreign: epee.Handle | None = None
        self.closed: epee.Handle | None = None

    def fp8(self) -> torch.Tensor:
        """`[6, HIDDEN]` float8 values."""
        return torch.zeros(6, HIDDEN, dtype=torch.float8_e4m3fn)

    def changed(self, token: int, k: int, value: int) -> torch.Tensor:
        """The routing with one id replaced."""
        idx = self.idx.clone()
        idx[token, k] = value
        return idx

    def dispatch(self, x: Any = None, topk_idx: Any = None, topk_weights: Any = None, **options: Any) -> Any:
        """A dispatch, good where nothing is given."""
        x = self.x if x is None else x
        routed = {"handle", "is_token_in_rank"} & set(options)
        topk_idx = self.idx if topk_idx is None and not routed else topk_idx
        return self.buffer.dispatch(x, topk_idx, topk_weights, **options)

    def combine(self, y: Any = None, handle: Any = None, **options: Any) -> Any:
        """A combine, good where nothing is given."""
        return self.buffer.combine(self.y if y is None else y, self.handle if handle is None else handle, **options)


class Refusal(NamedTuple):
    """A bad call, the exception's type and what its message must say."""

    op: str
    call: Callable[[Scene], Any]
    says: tuple[str, ...]
    raises: str = "InvalidArgument"


def bad_dispatch(call: Callable[[Scene], Any], *says: str, raises: str = "InvalidArgument") -> Refusal:
    """A row for a bad dispatch."""
    return Refusal("dispatch", call, says, raises)


def bad_combine(call: Callable[[Scene], Any], *says: str, raises: str = "InvalidArgument") -> Refusal:
    """A row for a bad combine."""
    return Refusal("combine", call, says, raises)


REFUSALS = {
    # x
    "x is no tensor": bad_dispatch(lambda s: s.dispatch(x=s.x.float().numpy()), "x must be", "ndarray"),
    "x is an integer": bad_dispatch(lambda s: s.dispatch(x=s.x.int()), "x must be", "bfloat16", "int32"),
    "x is complex": bad_dispatch(lambda s: s.dispatch(x=s.x.to(torch.complex64)), "x must be", "complex64"),
    "x is wider than the buffer": bad_dispatch(
        lambda s: s.dispatch(x=s.x.float()), "x must be", "make the buffer with dtype=torch.float32, or x", "bfloat16"
    ),
    "x has another hidden": bad_dispatch(lambda s: s.dispatch(x=s.x[:, :120]), "x must", "[6, 120]; needs 128 columns"),
    "x is one row": bad_dispatch(lambda s: s.dispatch(x=s.x[0]), "x must", "[128]; pass 2 dimensions"),
    "x has too many rows": bad_dispatch(
        lambda s: s.dispatch(x=torch.zeros(9, HIDDEN, dtype=torch.bfloat16), topk_idx=torch.zeros(9, 2).long()),
        "max_tokens_per_rank=8",
        "9",
    ),
    "x is on meta": bad_dispatch(lambda s: s.dispatch(x=s.x.to("meta")), "x must", "meta", "CPU"),
    "x is sparse": bad_dispatch(lambda s: s.dispatch(x=s.x.to_sparse()), "x must", "sparse"),
    "x is a single FP8 tensor": bad_dispatch(lambda s: s.dispatch(x=s.fp8()), "x must be", "float8_e4m3fn"),
    "the pair has three parts": bad_dispatch(lambda s: s.dispatch(x=(s.x, s.x, s.x)), "pair", "3"),
    "the pair's values are not FP8": bad_dispatch(
        lambda s: s.dispatch(x=(s.x, torch.ones(6, 1))), "x[0] must be", "float8_e4m3fn", "bfloat16"
    ),
    "the pair's scales are half": bad_dispatch(
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(6, 1).half())), "x[1] must be", "float32", "float16"
    ),
    "the pair has too few scales": bad_dispatch(
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(5, 1))), "x[1] must", "6", "[5, 1]"
    ),
    "the pair has too many scales": bad_dispatch(
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(6, 9))), "x[1] must", "1 ... 8", "[6, 9]"
    ),
    "the pair has no scales": bad_dispatch(
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(6, 0))), "x[1] must", "1 ... 8", "[6, 0]"
    ),
    # routing
    "topk_idx is int32": bad_dispatch(lambda s: s.dispatch(topk_idx=s.idx.int()), "topk_idx must be int64", "int32"),
    "topk_idx is too wide": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.idx.repeat(1, 2)),
        "topk_idx must",
        "[6, 2]",
        "[6, 4]; needs 2 columns (num_topk)",
    ),
    "topk_idx has other rows": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.idx[:5]), "topk_idx must", "[5, 2]; needs 6 rows as x"
    ),
    "topk_idx is a list": bad_dispatch(lambda s: s.dispatch(topk_idx=s.idx.tolist()), "topk_idx must be", "list"),
    "an expert that does not exist": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.changed(3, 1, NUM_EXPERTS)), "topk_idx must", "got 4 at token 3, k 1", "-1"
    ),
    "an expert far away": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.changed(0, 0, 1 << 62)), "topk_idx must", str(1 << 62), "token 0, k 0"
    ),
    "an expert below -1": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.changed(5, 0, -2)), "topk_idx must", "got -2 at token 5, k 0"
    ),
    "an expert below -1 in the expert layout": bad_dispatch(
        lambda s: s.dispatch(topk_idx=s.changed(5, 0, -(1 << 63)), layout="expert"), "topk_idx must", "token 5, k 0"
    ),
    "topk_weights are half": bad_dispatch(
        lambda s: s.dispatch(topk_weights=s.weights.half()), "topk_weights must be float32", "float16"
    ),
    "topk_weights are double": bad_dispatch(
        lambda s: s.dispatch(topk_weights=s.weights.double()), "topk_weights must be float32", "float64"
    ),
    "topk_weights are too narrow": bad_dispatch(
        lambda s: s.dispatch(topk_weights=s.weights[:, :1]), "topk_weights must", "[6, 2]", "[6, 1]"
    ),
    "no routing": bad_dispatch(lambda s: s.buffer.dispatch(s.x), "topk_idx", "is_token_in_rank", "handle", "none"),
    "two routings": bad_dispatch(
        lambda s: s.buffer.dispatch(s.x, s.idx, is_token_in_rank=s.mask), "exactly one", "topk_idx, is_token_in_rank"
    ),
    "topk_idx beside a handle": bad_dispatch(
        lambda s: s.buffer.dispatch(s.x, s.idx, handle=s.handle), "exactly one", "topk_idx, handle"
    ),
    "a mask of numbers": bad_dispatch(
        lambda s: s.dispatch(is_token_in_rank=s.mask.int()), "is_token_in_rank must be bool", "int32"
    ),
    "a mask for three ranks": bad_dispatch(
        lambda s: s.dispatch(is_token_in_rank=torch.ones(6, 3, dtype=torch.bool)), "is_token_in_rank must", "[6, 3]"
    ),
    "a mask in the expert layout": bad_dispatch(
        lambda s: s.dispatch(is_token_in_rank=s.mask, layout="expert"), "is_token_in_rank", "expert", "topk_idx"
    ),
    "a mask with weights": bad_dispatch(
        lambda s: s.dispatch(is_token_in_rank=s.mask, topk_weights=s.weights), "topk_weights", "topk_idx"
    ),
    "an unknown layout": bad_dispatch(lambda s: s.dispatch(layout="row"), "layout must be", "'row'; 'expert' groups"),
    "alignment 0": bad_dispatch(lambda s: s.dispatch(expert_alignment=0), "expert_alignment must be", "got 0"),
    "alignment -8": bad_dispatch(lambda s: s.dispatch(expert_alignment=-8), "expert_alignment must be", "got -8"),
    "alignment 2.0": bad_dispatch(lambda s: s.dispatch(expert_alignment=2.0), "expert_alignment must be", "got 2.0"),
    "alignment 1 << 40": bad_dispatch(
        lambda s: s.dispatch(expert_alignment=1 << 40, layout="expert"), "expert_alignment must be", str(1 << 40)
    ),
    "capacity 0": bad_dispatch(lambda s: s.dispatch(capacity=0), "capacity must be an int of at least 1", "got 0"),
    "capacity -3": bad_dispatch(lambda s: s.dispatch(capacity=-3), "capacity must be", "got -3"),
    "capacity True": bad_dispatch(lambda s: s.dispatch(capacity=True), "capacity must be", "got True"),
    "capacity 2.0": bad_dispatch(lambda s: s.dispatch(capacity=2.0), "capacity must be", "got 2.0"),
    "capacity 0 by mask": bad_dispatch(
        lambda s: s.dispatch(is_token_in_rank=s.mask, capacity=0), "capacity must be", "got 0"
    ),
    "capacity beside a handle": bad_dispatch(
        lambda s: s.dispatch(handle=s.handle, capacity=5), "capacity must be None with a handle", "got 5"
    ),
    "capacity in the expert layout": bad_dispatch(
        lambda s: s.dispatch(layout="expert", capacity=5), "second exchange", raises="UnsupportedError"
    ),
    # time-outs
    "time-out 0": bad_dispatch(lambda s: s.dispatch(timeout=0), "timeout must be", "got 0"),
    "time-out -1": bad_dispatch(lambda s: s.dispatch(timeout=-1.5), "timeout must be", "-1.5"),
    "time-out NaN": bad_dispatch(lambda s: s.dispatch(timeout=float("nan")), "timeout must be", "nan"),
    "time-out infinite": bad_dispatch(lambda s: s.dispatch(timeout=float("inf")), "timeout must be", "inf"),
    "time-out text": bad_combine(lambda s: s.combine(timeout="soon"), "timeout must be", "'soon'"),
    # handles
    "a handle of another buffer": bad_dispatch(
        lambda s: s.dispatch(handle=s.foreign), "handle", "another buffer", raises="StaleHandleError"
    ),
    "a handle of a closed buffer": bad_dispatch(
        lambda s: s.dispatch(handle=s.closed), "handle", "closed", raises="StaleHandleError"
    ),
    "other rows than the handle's": bad_dispatch(
        lambda s: s.dispatch(x=s.x[:4], handle=s.handle), "x must", "6", "got 4"
    ),
    "a handle that is none": bad_dispatch(lambda s: s.dispatch(handle=(1, 2)), "handle must be", "tuple"),
    "weights for a mask's handle": bad_dispatch(
        lambda s: s.dispatch(handle=s.by_mask, topk_weights=s.weights), "topk_weights", "is_token_in_rank"
    ),
    "combine with another buffer's handle": bad_combine(
        lambda s: s.combine(handle=s.foreign), "handle", "another buffer", raises="StaleHandleError"
    ),
    "combine without a handle": bad_combine(lambda s: s.buffer.combine(s.y, None), "handle must be", "NoneType"),
    # combine
    "y has too few rows": bad_combine(
        lambda s: s.combine(y=s.y[:-1]), "y must", "128]; needs", "rows as the dispatch's x"
    ),
    "y has another hidden": bad_combine(lambda s: s.combine(y=s.y[:, :64]), "y must", "64]"),
    "y is FP8": bad_combine(lambda s: s.combine(y=s.y.to(torch.float8_e4m3fn)), "y must be", "float8_e4m3fn"),
    "y is a pair": bad_combine(lambda s: s.combine(y=(s.y, s.y)), "y must be", "tuple"),
    "y is wider than the buffer": bad_combine(
        lambda s: s.combine(y=s.y.double()), "y must be", "float64", "call .to(torch.bfloat16)"
    ),
    "bias has other rows": bad_combine(lambda s: s.combine(bias=s.bias[:5]), "bias must", "[6, 128]", "[5, 128]"),
    "bias is an integer": bad_combine(lambda s: s.combine(bias=s.bias.int()), "bias must be", "int32"),
    "three biases": bad_combine(lambda s: s.combine(bias=(s.bias,) * 3), "bias must be", "3"),
    "out has another dtype": bad_combine(lambda s: s.combine(out=s.bias.float()), "out must be", "float32"),
    "out is too small": bad_combine(lambda s: s.combine(out=s.bias[:5]), "out must", "[6, 128]", "[5, 128]"),
    "out overlaps itself": bad_combine(lambda s: s.combine(out=s.bias[:1].expand(6, -1)), "out must not overlap"),
    "weights back of another shape": bad_combine(
        lambda s: s.combine(topk_weights=torch.ones(s.handle.num_recv, 3)), "topk_weights must", "3]"
    ),
    "weights back in half": bad_combine(
        lambda s: s.combine(topk_weights=torch.ones(s.handle.num_recv, 2).half()), "topk_weights must be", "float16"
    ),
    "weights back for a mask": bad_combine(
        lambda s: s.combine(
            y=s.bias.repeat(2, 1), handle=s.by_mask, topk_weights=torch.ones(s.by_mask.num_recv, NUM_TOPK)
        ),
        "topk_weights",
        "is_token_in_rank",
    ),
}


def _run_refusals(rank: int, num_ranks: int) -> dict[str, tuple[str, str, bool]]:
    options = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": MAX_TOKENS}
    results = {}
    with (
        epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as buffer,
        epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as other,
    ):
        scene = Scene(rank, buffer)
        scene.foreign = other.dispatch(scene.x, scene.idx).handle
        with epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as short:
            scene.closed = short.dispatch(scene.x, scene.idx).handle
        want = scene.dispatch(topk_weights=scene.weights).x.clone()
        for name, refusal in REFUSALS.items():
            try:
                if rank == BAD_RANK:
                    refusal.call(scene)
                elif refusal.op == "dispatch":
                    scene.dispatch()
                else:
                    scene.combine()
                raised = ("nothing", "")
            except epee.EpeeError as exc:
                raised = (type(exc).__name__, str(exc))
            after = scene.dispatch(topk_weights=scene.weights).x
            results[name] = (*raised, torch.equal(after.view(torch.int16), want.view(torch.int16)))
    return results


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str, bool]]]:
    """What both ranks saw, per refusal: exception, message, whether the next dispatch was right."""
    return run_ranks(_run_refusals, 2)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_name_rule_and_value(refusals: list[dict[str, tuple[str, str, bool]]], name: str) -> None:
    kind, message, works = refusals[BAD_RANK][name]
    assert kind == REFUSALS[name].raises, message
    missing = [words for words in REFUSALS[name].says if words not in message]
    assert not missing, f"{missing} not in: {message}"
    assert works, "the dispatch after the refused call must be right"


@pytest.mark.parametrize("name", REFUSALS)
def test_peers_learn_who_refused_and_why(refusals: list[dict[str, tuple[str, str, bool]]], name: str) -> None:
    kind, message, works = refusals[1 - BAD_RANK][name]
    reason = refusals[BAD_RANK][name][1]
    assert kind == "MismatchError", message
    assert f"rank {BAD_RANK}" in message
    assert REFUSALS[name].op in message
    assert reason[:100] in message
    assert works, "the dispatch after the refused call must be right"


def _refuse_often(rank: int, num_ranks: int) -> int:
    options = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": MAX_TOKENS}
    count = 0
    with epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as buffer:
        scene = Scene(rank, buffer)
        want = scene.combine().x.clone()
        for number in range(40):
            try:
                if number % 2:
                    scene.combine(y=scene.y if rank == 0 else scene.y[:, :8])
                else:
                    scene.dispatch(topk_idx=scene.idx if rank == 0 else scene.idx.int())
            except (epee.MismatchError, epee.InvalidArgument):
                count += 1
        same_bits(scene.combine().x, want, "the combine afterwards")
        assert torch.equal(scene.dispatch().handle.src_token, scene.handle.src_token)
    return count


def test_many_refusals_in_a_row() -> None:
    """Nothing is used up by calls that fail."""
    assert run_ranks(_refuse_often, 2) == [40, 40]


DISAGREEMENTS: dict[str, tuple[Callable[[Scene], Any], tuple[str, ...]]] = {
    "layout": (lambda s: s.dispatch(layout="expert" if s.rank else "rank"), ("layout", "'rank'", "'expert'")),
    "alignment": (lambda s: s.dispatch(expert_alignment=1 + s.rank), ("expert_alignment", "1", "2")),
    "dtype": (lambda s: s.dispatch(x=s.x.half() if s.rank else s.x), ("dtype", "bfloat16", "float16")),
    "operation": (lambda s: s.dispatch() if s.rank else s.combine(), ("dispatch", "combine")),
    "handle or none": (lambda s: s.dispatch(handle=s.handle) if s.rank else s.dispatch(), ("handle",)),
    "which handle": (lambda s: s.dispatch(handle=s.handle if s.rank else s.by_mask), ("handle",)),
    "weights or none": (lambda s: s.dispatch(topk_weights=s.weights if s.rank else None), ("weights",)),
    "mask or top-k": (
        lambda s: s.dispatch(is_token_in_rank=s.mask) if s.rank else s.dispatch(),
        ("topk",),
    ),
    "pair or tensor": (
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(6, 1)) if s.rank else s.x),
        ("dtype", "float8_e4m3fn"),
    ),
    "kind of scales": (
        lambda s: s.dispatch(x=(s.fp8(), torch.ones(6, 1, dtype=torch.int32 if s.rank else torch.float32))),
        ("scale",),
    ),
    "capacity": (lambda s: s.dispatch(capacity=3 + s.rank), ("capacity", "rank 0 has 3", "rank 1 has 4")),
    "capacity of 1": (lambda s: s.dispatch(capacity=2 - s.rank), ("capacity", "rank 0 has 2", "rank 1 has 1")),
    "capacity or none": (
        lambda s: s.dispatch(capacity=1 << 40 if s.rank else None),
        ("capacity", "rank 0 has None", f"rank 1 has {(1 << 31) - 1}"),
    ),
    "capacity or handle": (
        lambda s: s.dispatch(handle=s.handle) if s.rank else s.dispatch(capacity=5),
        ("handle", "rank 0 has 0"),
    ),
    "combine's dtype": (lambda s: s.combine(y=s.y.half() if s.rank else s.y), ("dtype", "bfloat16", "float16")),
    "combine's weights": (
        lambda s: s.combine(topk_weights=torch.ones(s.handle.num_recv, NUM_TOPK) if s.rank else None),
        ("weights",),
    ),
}


def _run_disagreements(rank: int, num_ranks: int) -> dict[str, tuple[str, str, bool]]:
    options = {"num_experts": NUM_EXPERTS, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": MAX_TOKENS}
    results = {}
    with epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as buffer:
        scene = Scene(rank, buffer)
        want = scene.dispatch(topk_weights=scene.weights).x.clone()
        for name, (call, _) in DISAGREEMENTS.items():
            try:
                call(scene)
                raised = ("nothing", "")
            except epee.EpeeError as exc:
                raised = (type(exc).__name__, str(exc))
            after = scene.dispatch(topk_weights=scene.weights).x
            results[name] = (*raised, torch.equal(after.view(torch.int16), want.view(torch.int16)))
    return results


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, tuple[str, str, bool]]]:
    """What both ranks saw, per disagreement."""
    return run_ranks(_run_disagreements, 2)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_get_the_same_mismatch(
    disagreements: list[dict[str, tuple[str, str, bool]]], name: str
) -> None:
    for kind, message, works in (results[name] for results in disagreements):
        assert kind == "MismatchError", message
        missing = [words for words in DISAGREEMENTS[name][1] if words not in message]
        assert not missing, f"{missing} not in: {message}"
        assert works, "the dispatch after the disagreement must be right"
    if name != "operation":
        assert disagreements[0][name][1] == disagreements[1][name][1], "the same text on all ranks"


# --- capacity ---


def _overflow(rank: int, num_ranks: int, layout: str) -> tuple[str, str, bool]:
    call_setup = setup_of(num_ranks=3)
    options = {"num_experts": 6, "hidden": 16, "num_topk": 2, "max_tokens_per_rank": 8, "max_recv_rows": 9}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5, call_setup.hidden, generator=generator).to(torch.bfloat16)
    everybody_to_one = torch.full((5, 2), 3)
    with epee.Buffer(dist.group.WORLD, dtype=torch.bfloat16, **options) as buffer:
        try:
            buffer.dispatch(x, everybody_to_one, layout=layout)
            raised = ("nothing", "")
        except epee.EpeeError as exc:
            raised = (type(exc).__name__, str(exc))
        own = torch.tensor([[2 * rank, -1]] * 5)  # five rows each fit
        after = buffer.dispatch(x, own, layout=layout).x
        return (*raised, torch.equal(after, x))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_overflow_is_the_same_error_on_every_rank(layout: str) -> None:
    results = run_ranks(_overflow, 3, layout)
    needed = "15" if layout == "rank" else "30"
    for kind, message, works in results:
        assert kind == "InvalidArgument", message
        for words in ("rank 1", needed, "9", "max_recv_rows"):
            assert words in message, message
        assert works
    assert len({message for _, message, _ in results}) == 1


# --- leases ---


def _double_use(rank: int, num_ranks: int) -> None:
    setup = setup_of(num_ranks=2)
    with make_buffer(setup, max_tokens_per_rank=8, max_recv_rows=64) as buffer:
        x = torch.ones(4, setup.hidden, dtype=torch.bfloat16)
        handle = buffer.dispatch(x, torch.tensor([[0, 2]] * 4)).handle
        place = buffer.combine_input(handle)
        place.fill_(1.0)
        for _ in range(4):  # the first is read in place; peers may still read it during the next, which copies it
            assert torch.equal(buffer.combine(place, handle).x, x * 2)


def test_leased_memory_may_be_combined_again() -> None:
    run_ranks(_double_use, 2)


# --- odd but right ---


def _odd(rank: int, num_ranks: int) -> None:
    call_setup = setup_of(num_ranks=2)
    x = torch.randn(4, call_setup.hidden, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    idx = torch.tensor([[0, 2]] * 4)
    with make_buffer(call_setup, max_tokens_per_rank=8, max_recv_rows=64) as buffer:
        want = buffer.dispatch(x, idx)
        flat = torch.cat([torch.zeros(1, dtype=torch.bfloat16), x.view(-1)])
        shifted = flat[1:].view(4, -1)  # starts two bytes behind an aligned address
        same_bits(buffer.dispatch(shifted, idx).x, want.x, "x at an odd address")
        same_bits(buffer.dispatch(x.clone().requires_grad_(), idx).x, want.x, "x that requires grad")
        same_bits(buffer.dispatch(x[:1].expand(4, -1), idx).x[0], want.x[0], "expanded x")
        weights = torch.tensor([[float("nan"), float("inf")]] * 4)
        got = buffer.dispatch(x, idx, weights)
        assert got.topk_weights is not None
        shown = got.topk_weights[:, rank]
        assert bool(shown.isinf().all() if rank else shown.isnan().all()), "weights are not judged"
        assert bool((got.topk_weights[:, 1 - rank] == 0).all()), "and not seen where they do not belong"


def test_odd_inputs_are_right() -> None:
    run_ranks(_odd, 2)
