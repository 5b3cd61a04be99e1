"""What the loss of some ranks means for the others: who goes on, and what may be left behind of a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from epee.view.protocol.decision import has_quorum
from epee.view.transport.directory import remove_stale
from tests.harness import Pool
from tests.survive.campaign import leaks
from tests.survive.histories import Entry, check_histories


def is_outvoted(placement: Sequence[int], victims: Collection[int]) -> bool:
    """Return whether victims whose hosts are lost may outvote who is left: nobody knows whether they are dead."""
    left = {rank for rank in range(len(placement)) if rank not in victims}
    told = {rank for rank in victims if placement[rank] in {placement[other] for other in left}}
    return not has_quorum(range(len(placement)), told, left)


def is_whole_host(placement: Sequence[int], victims: Collection[int]) -> bool:
    """Return whether all ranks of some host are among the victims."""
    return any(all(rank in victims for rank in ranks_of(placement, host)) for host in set(placement))


def ranks_of(placement: Sequence[int], host: int) -> set[int]:
    """Return the ranks of a host."""
    return {rank for rank, at in enumerate(placement) if at == host}


def winners(placement: Sequence[int], host: int) -> set[int]:
    """Return who goes on when a host is cut off from all others: its ranks, or all the rest."""
    everybody, here = set(range(len(placement))), ranks_of(placement, host)
    return here if has_quorum(everybody, (), here) else everybody - here


def check_leftovers(pool: Pool, placement: Sequence[int], victims: Collection[int]) -> None:
    """See that nothing is left of a round on loopback addresses but the folders of hosts that are dead as a whole."""
    alive = {placement[rank] for rank in range(len(placement)) if rank not in victims}
    num_stale = remove_stale(Path(pool.runtime_folder))  # as the next job on that host does
    assert num_stale <= len(set(placement) - alive), f"{num_stale} folders of jobs are stale, of hosts {alive} too"
    left = leaks(pool)
    assert not left, f"left behind: {left}"


def check_survivors(histories: list[list[Entry]], num_hosts: int, num_ranks: int, victims: set[int]) -> None:
    """Compare the survivors with closed forms and each other, and see that they work at the end.

    Where one of three hosts is lost before it has told what it had said, a call that one host has completed fails on
    another (docs/hosts.md): then each survivor is looked at alone.
    """
    is_torn = any("lost with its host" in entry.text for history in histories for entry in history)
    for some in [[history] for history in histories] if num_hosts > 2 and is_torn else [histories]:
        check_histories(some, num_ranks, victims)
    for history in histories:
        last = [entry for entry in history if entry.op != "send_recv"][-1]  # messages with lost ranks fail for good
        assert last.status == "ok", f"the group does not work at the end: {last}"
