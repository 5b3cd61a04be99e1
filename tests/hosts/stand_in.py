"""The path over hosts on ranks that share memory: hosts are invented, outboxes are read where mirrors would be.

What is tested so is who takes part in which call of a buffer and what its result is; the engine's calls go through the
view of one host, as they do between hosts through the view of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from epee.engine.operation import Operation
from epee.engine.plan import Plan
from epee.ep import base
from epee.ep.members import bootstrap
from epee.ep.members.bootstrap import judge
from epee.ep.throughput.hosts import layout
from epee.link.topology import Topology

_exchange_over_hosts = base._exchange_over_hosts
CALLS = ("dispatch rows", "records", "combine rows", "sums")  # the engine's calls of a step
MOMENTS = ("before", "put", "second put", "merged", "before take", "taken")
POINTS = [
    f"{call}: {moment}"
    for call in CALLS
    for moment in MOMENTS
    if not (moment == "merged" and call != "sums") and not (moment == "second put" and call.endswith("rows"))
]


def invent_hosts(placement: Sequence[int], length: int = 2) -> None:
    """Let buffers of this process believe that rank r runs on host `placement[r]`; rounds have `length` tokens."""
    keys = [str(host) for host in placement]
    base.topology_of = lambda group, num_ranks: Topology(group.rank(), keys)  # type: ignore[assignment]
    bootstrap.judge = lambda records, num_hosts: judge(records)
    base._exchange_over_hosts = _exchange_over_hosts  # a worker may have had a `LatencyBuffer` before
    shorten_rounds(length)


def shorten_rounds(length: int = 2) -> None:
    """Let the few tokens of a test travel in several rounds, of `length` each."""
    layout.CHUNK_TOKENS = layout.MIN_SUMMED = length
    layout.CHUNK_BYTES = layout.SUM_BYTES = 1


def arm(engine: Any, point: str, act: Callable[[], None]) -> None:
    """Let this process act at a point ("records: taken") of the step that it begins now.

    put, merged: behind it, before anybody hears of it; before take: everything has come and is told; taken: behind the
    first round that this rank takes. Where a call does not have it, the next one is as good.
    """
    call, moment = point.split(": ")
    number = engine.seq + 1 + CALLS.index(call)
    made, renewed = Operation.__init__, Operation.renew

    def init(self: Operation, plan: Plan, seq: int, *args: Any, **kwargs: Any) -> None:
        made(self, plan, seq, *args, **kwargs)
        if seq == number:
            if moment == "before":
                act()
            _arm_plan(plan, moment, act)
        elif seq > number:  # another death has put more calls into the step: the point is not on the way
            act()

    def renew(self: Operation, peer_regions: Any, plan: Plan) -> None:  # another one has died before
        renewed(self, peer_regions, plan)
        if self.seq == number:
            _arm_plan(plan, moment, act)

    Operation.__init__, Operation.renew = init, renew  # type: ignore[method-assign]


def _arm_plan(plan: Plan, moment: str, act: Callable[[], None]) -> None:
    put, merge, take = plan.put, plan.merge, plan.take

    def armed_put(peer_regions: Any, k: int, offset: int) -> None:
        put(peer_regions, k, offset)
        if (moment, k) in (("put", 0), ("second put", 1)):
            act()

    def armed_merge(peer_regions: Any, k: int, *args: Any) -> None:
        merge(peer_regions, k, *args)
        if moment == "merged":
            act()

    def armed_take(peer_regions: Any, k: int, offsets: list[int]) -> None:
        if moment == "before take":
            act()
        take(peer_regions, k, offsets)
        if moment == "taken":
            act()

    plan.put, plan.merge, plan.take = armed_put, armed_merge, armed_take  # type: ignore[method-assign]
