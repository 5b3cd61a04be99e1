"""Steps of a program that uses one Buffer while ranks die, and what must be true of each of them.

A step is a dispatch and a combine; a step that a loss ends is made again, as a trainer would. Rows say whose they are
and of which step, so a stale row, a row of another step or of a rank that is not in `got` is seen at once. What comes
back is compared with the sum over the ranks that the combine names.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee.ep.members.header import OP_NAMES
from epee.ep.members.rows import RowsPlan
from epee.ep.throughput import cpu
from epee.errors import EpeeError, EvictedError, PeerError, StaleHandleError
from tests.ep.moments import after_publishing

HIDDEN, NUM_TOPK, NUM_TOKENS, LOCAL = 128, 3, 5, 2
TIMEOUT_S = 20.0
POINTS = (
    "before dispatch",
    "dispatch: first row",
    "dispatch: rows",
    "dispatch: first data",
    "dispatch: data",
    "between",
    "combine: first row",
    "combine: rows",
    "combine: pulled",
)


def die() -> None:
    """End this process like the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


_policy: dict[str, str] = {}  # what buffers on a group of another backend are told


def start(
    rank: int,
    num_ranks: int,
    folder: str,
    mode: str,
    joins: bool = False,
    backend: str = "epee",
    **options: Any,
) -> Any:
    """Make the group; on another backend the buffers get what else is the group's affair."""
    os.environ["EPEE_POISON"] = "1"
    store = dist.FileStore(f"{folder}/store", num_ranks)
    _policy.clear()
    if backend != "epee":
        _policy.update({"fault_mode": mode, "on_stall": options.get("on_stall", "error")})
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
        return dist.group.WORLD
    given = {"fault_mode": mode, "op_timeout": TIMEOUT_S, "is_extension": joins, **options}
    dist.init_process_group(
        "epee", store=store, rank=rank, world_size=num_ranks, pg_options=epee.BackendOptions(**given)
    )
    return dist.group.WORLD


def make_buffer(group: Any, timeout: float = TIMEOUT_S) -> epee.Buffer:
    """Make the buffer of the tests."""
    return epee.Buffer(
        group,
        num_experts=LOCAL * group.size(),
        hidden=HIDDEN,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=16,
        dtype=torch.float32,
        timeout=timeout,
        fault_mode=_policy.get("fault_mode"),
        on_stall=_policy.get("on_stall"),
    )


def routing(rank: int, num_ranks: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `topk_idx` and `topk_weights` of a rank's tokens in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    idx = torch.stack([torch.randperm(LOCAL * num_ranks, generator=generator)[:NUM_TOPK] for _ in range(NUM_TOKENS)])
    return idx, torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator) + 0.5


def rows(rank: int, step: int) -> torch.Tensor:
    """Return a rank's tokens: each element names rank, step and token."""
    return (100.0 * step + 10.0 * rank + torch.arange(NUM_TOKENS))[:, None].expand(-1, HIDDEN).contiguous()


def payload(rank: int, step: int, is_fp8: bool) -> Any:
    """Return what is dispatched: `rows`, or a pair whose scales carry what FP8 cannot."""
    if not is_fp8:
        return rows(rank, step)
    return torch.ones(NUM_TOKENS, HIDDEN).to(torch.float8_e4m3fn), rows(rank, step)[:, :1].contiguous()


def decoded(x: Any) -> torch.Tensor:
    """Return received rows as float32, `[num_recv, hidden]`."""
    return x[0].float() * x[1] if isinstance(x, tuple) else x


def check_dispatch(d: epee.Dispatched, rank: int, num_ranks: int, step: int, alignment: int) -> None:
    """Every row is of this step and of a rank that is in, all rows of these are there, counts agree."""
    got = d.got.tolist()
    src, token = d.handle.src_rank, d.handle.src_token
    x = decoded(d.x)
    assert x.shape == (d.handle.num_recv, HIDDEN)
    is_row = src >= 0
    assert bool((x[~is_row] == 0).all())
    want = 100.0 * step + 10.0 * src[is_row] + token[is_row]
    assert torch.equal(x[is_row], want[:, None].float().expand(-1, HIDDEN))
    counts = torch.zeros(LOCAL, dtype=torch.int64)
    first = LOCAL * rank
    for peer in range(num_ranks):
        idx, weights = routing(peer, num_ranks, step)
        local = (idx >= first) & (idx < first + LOCAL)
        if d.handle.layout == "expert":
            expected = int(local.sum())
        else:
            expected = int(local.any(1).sum())
        assert int((src == peer).sum()) == (expected if got[peer] else 0), (peer, got)
        assert d.handle.num_received[peer] == (expected if got[peer] else 0)
        if got[peer]:
            counts += torch.bincount(idx[local] - first, minlength=LOCAL)
            _check_weights(d, peer, weights, local)
    padded = [-(-int(count) // alignment) * alignment for count in counts]
    assert d.num_tokens_per_expert == padded


def _check_weights(d: epee.Dispatched, peer: int, weights: torch.Tensor, local: torch.Tensor) -> None:
    mine = d.handle.src_rank == peer
    assert d.topk_weights is not None
    if d.handle.layout == "rank":
        token = d.handle.src_token[mine]
        assert torch.equal(d.topk_weights[mine], torch.where(local, weights, 0.0)[token])
    else:
        assert d.handle.src_k is not None
        token, k = d.handle.src_token[mine], d.handle.src_k[mine]
        assert torch.equal(d.topk_weights[mine], weights[token, k])


def check_combine(c: epee.Combined, layout: str, rank: int, num_ranks: int, step: int) -> None:
    """What came back is the sum over the ranks that the combine names, and the lost weight is that of the others."""
    idx, weights = routing(rank, num_ranks, step)
    owner = idx // LOCAL
    there = c.got.bool()[owner]
    x = rows(rank, step)[:, 0]
    if layout == "rank":  # every rank has sent the row back as it came
        times = torch.zeros(NUM_TOKENS, num_ranks).scatter_(1, owner, there.float())
        want = times.sum(1) * x
    else:
        want = torch.where(there, weights, 0.0).sum(1) * x
    torch.testing.assert_close(c.x, want[:, None].expand(-1, HIDDEN), rtol=1e-5, atol=0)
    assert bool((c.x[~there.any(1)] == 0).all())
    torch.testing.assert_close(c.lost_weight, torch.where(there, 0.0, weights).sum(1))


def arm(buffer: epee.Buffer, point: str, act: Callable[[], None] = die) -> None:
    """Let this process act at a point of the step that it begins now."""
    exchange: Any = buffer._exchange
    path: Any = buffer._path
    op = point.split(":")[0]
    wait_data, pull = exchange.wait_data, path._pull

    def wait(*args: Any) -> Any:
        if point == "dispatch: data":
            act()
        return wait_data(*args)

    def pulled(*args: Any) -> Any:
        result = pull(*args)
        if point.endswith("pulled"):
            act()
        return result

    write = cpu.write_rows

    def wrote(*args: Any) -> None:
        write(*args)
        cpu.write_rows = write
        act()

    if point.endswith("first data"):
        cpu.write_rows = wrote
    _arm_engine(exchange, op, point, act)
    exchange.wait_data, path._pull = wait, pulled  # type: ignore[method-assign]
    if point == "before dispatch":
        act()


def _arm_engine(exchange: Any, op: str, point: str, act: Callable[[], None]) -> None:
    """Let this process act at a point of the exchange of rows, where that is a call of an engine.

    The engine stores a row once, for all ranks: at "first row" its bytes are there and its header is not.
    """
    make = exchange._row

    def make_row(header: Any, *args: Any) -> Any:
        row = make(header, *args)
        if OP_NAMES[header.op] == op and point.endswith("row"):
            plan_it = row.plan

            def planned(*given: Any, **named: Any) -> Any:
                plan = plan_it(*given, **named)
                put = plan.put
                plan.put = lambda *where: (put(*where), act())
                return plan

            row.plan = planned
        if OP_NAMES[header.op] == op and point.endswith("rows"):
            after_publishing(exchange, RowsPlan, act)
        return row

    exchange._row = make_row


def make_step(
    buffer: epee.Buffer, step: int, layout: str, is_fp8: bool = False, between: Callable[[], None] | None = None
) -> tuple[Any, ...]:
    """Make a step and check it; return what all survivors must agree on."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, weights = routing(rank, num_ranks, step)
    alignment = 4 if layout == "expert" else 1
    d = buffer.dispatch(payload(rank, step, is_fp8), idx, weights, layout=layout, expert_alignment=alignment)
    check_dispatch(d, rank, num_ranks, step, alignment)
    if between is not None:
        between()
    y = decoded(d.x)
    if step % 2:
        y = buffer.combine_input(d.handle).copy_(y)
    c = buffer.combine(y, d.handle)
    check_combine(c, layout, rank, num_ranks, step)
    return step, c.epoch, tuple(c.got.tolist())


def go_on(
    buffer: epee.Buffer,
    num_steps: int,
    victims: dict[int, tuple[int, str]],
    layout: str = "rank",
    is_fp8: bool = False,
    first: int = 0,
) -> tuple[list[Any], list[str]]:
    """Make steps `first ... num_steps - 1`; a step that a loss ends is made again.

    Args:
        victims: rank -> (step, point) at which it dies.
    Returns:
        What each step has ended with, and the errors on the way.
    """
    done, errors = [], []
    at, point = victims.get(buffer.rank, (-1, ""))
    step = first
    while step < num_steps:
        between = None
        if step == at:
            arm(buffer, point)
            between = die if point == "between" else None
        try:
            done.append(make_step(buffer, step, layout, is_fp8, between))
            step += 1
        except EvictedError:
            raise
        except (PeerError, StaleHandleError) as error:
            errors.append(type(error).__name__)
            assert len(errors) < 20, errors
    return done, errors


def run(
    rank: int,
    num_ranks: int,
    folder: str,
    mode: str,
    victims: dict[int, tuple[int, str]],
    layout: str,
    is_fp8: bool,
    num_steps: int,
    backend: str = "epee",
) -> Any:
    """One rank's program."""
    group = start(rank, num_ranks, folder, mode, backend=backend)
    with make_buffer(group) as buffer:
        kept = None
        if not victims:
            kept = buffer.dispatch(rows(rank, 99), routing(rank, num_ranks, 99)[0])
        done, errors = go_on(buffer, num_steps, victims, layout, is_fp8)
        mask = buffer.sync().tolist()
        del kept
        return done, errors, mask, buffer.epoch


def refused(call: Callable[[], object]) -> str:
    """Return the type of the error that a call ends with."""
    try:
        call()
    except EpeeError as error:
        return type(error).__name__
    return "nothing"
