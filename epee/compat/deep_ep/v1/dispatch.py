"""V1 dispatches with routing, and the choice of the room in which they run.

A dispatch that matches an earlier one runs as that one did (`Pool.recall`). Otherwise the room is found by the needs of
the call: one that was agreed on for all ranks, or else a new one, for which the ranks exchange the sizes of their
calls. If a peer's call does not fit, all ranks are notified in the call itself (`NoRoomError`) and then agree on a
room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from epee.compat.deep_ep.config import Config, check_config
from epee.compat.deep_ep.shared.layout import align_up
from epee.compat.deep_ep.shared.owner import GPU_AT_ONCE, Running
from epee.compat.deep_ep.shared.rows import device_of, int64_routing
from epee.compat.deep_ep.v1.handle import V1Handle
from epee.compat.deep_ep.v1.wishes import Given, Wishes
from epee.ep import NO_FACTS, BufferPool, Dispatched, Need, NoRoomError, Room, Wish, checked_topk
from epee.errors import expected

# The options of a dispatch with routing: expert_alignment, num_worst_tokens, config. A plain tuple: to make one of a
# class of its own takes ten times as long.
Asked: TypeAlias = "tuple[int, int, Config]"


def asked_of(expert_alignment: int, num_worst_tokens: int, config: Config) -> tuple[int, int, int] | None:
    """Return the cache key of options; None if only the checks can determine it."""
    num_sms: Any = getattr(config, "num_sms", None)
    are_usual = type(expert_alignment) is type(num_worst_tokens) is type(num_sms) is int
    return (expert_alignment, num_worst_tokens, num_sms) if are_usual else None


class FreshDispatches:
    """The dispatches with routing of one buffer.

    Args:
        pool: the buffer's.
        rank, num_ranks: of the group.
    """

    def __init__(self, pool: BufferPool, rank: int, num_ranks: int) -> None:
        self._pool = pool
        self._rank = rank
        self._num_ranks = num_ranks
        self._wishes = Wishes(num_ranks)

    def run(
        self, given: Given, options: Asked, run: Running, may_stand: bool
    ) -> tuple[Dispatched, V1Handle, list[int]]:
        """Dispatch with routing, in a room found by the call's cache key, or else by an exchange with the ranks.

        Args:
            given, options, run: of the call.
            may_stand: whether a room may be used without an exchange: no rank was notified yet that a call does not
                fit.
        """
        key = None
        if run.is_gpu and may_stand:
            try:
                found = None if run is GPU_AT_ONCE else self.latest(given, options, run)  # it was tried before
                if found is None:
                    key = self._key(given, options)
                    like = None if key is None else self._pool.recall(key)
                    found = None if like is None else self._as(like, given, options, run)
            except NoRoomError:  # a peer's call does not fit, and all were notified in this call
                if options[1]:
                    raise
                found, may_stand = None, False
            if found is not None:
                return found
        return self._dispatch_asking(given, options, run, (key, may_stand))

    def latest(self, given: Given, options: Asked, run: Running) -> tuple[Dispatched, V1Handle, list[int]] | None:
        """Dispatch as one of the last few kinds of calls on a GPU; None, without any effect, if none matches.

        Args:
            given, options, run: of the call.
        """
        x, counts, topk_idx, topk_weights = given
        asked = asked_of(*options)
        like = None if asked is None else self._pool.latest(asked, x, topk_idx, topk_weights, *counts)
        return None if like is None else self._as(like, given, options, run)

    def _as(
        self, like: Any, given: Given, options: Asked, run: Running
    ) -> tuple[Dispatched, V1Handle, list[int]] | None:
        """Dispatch as `BufferPool.recall` has found; None, without any effect, if that is not possible now."""
        x, (_, is_token_in_rank, _), topk_idx, topk_weights = given
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        got = like.dispatch(x, topk_idx, topk_weights)
        if got is None:
            return None
        _, num_worst_tokens, config = options
        stream = self._pool.own_stream(device_of(x)) if run.has_own_stream else None
        made = V1Handle(like.room, got.handle, num_worst_tokens, like.extra, is_token_in_rank, config, stream)
        return got, made, [] if num_worst_tokens else got.num_tokens_per_expert

    def _dispatch_asking(
        self, given: Given, options: Asked, run: Running, found: tuple[object, bool]
    ) -> tuple[Dispatched, V1Handle, list[int]]:
        """Dispatch in a room found by the call's needs; the ranks exchange them if no room is usable without.

        Args:
            given, options, run: of the call.
            found: key under which the room is cached, None for none; whether a room may be used without an exchange.
        """
        x, counts, topk_idx, topk_weights = given
        key, may_stand = found
        expert_alignment, num_worst_tokens, config = options
        pool = self._pool
        device = device_of(x)
        is_gpu = pool.is_gpu(device)
        is_blind = is_gpu and num_worst_tokens != 0  # then the cpu waits for no rank
        try:
            check_config(config)
            routing = None if topk_idx is None else int64_routing(topk_idx)
            as_sent = x, counts, routing, topk_weights
            wish, need = self._wishes.find(as_sent, num_worst_tokens, device, is_gpu)
        except expected(Exception) as error:
            if is_blind:
                pool.refuse(error)
            else:
                pool.refuse_wish(error, is_gpu)
            raise
        _, is_token_in_rank, per_expert = counts
        assert is_token_in_rank is not None
        assert per_expert is not None

        def dispatch_in(room: Room) -> Dispatched:
            """Dispatch in a room."""
            return room.core.dispatch(
                x,
                routing,
                topk_weights,
                is_token_in_rank=is_token_in_rank if routing is None else None,
                expert_alignment=expert_alignment,
                num_sms=room.num_sms(config.num_sms),
                sync=not is_blind,
            )

        may_stand = may_stand and is_gpu and routing is not None and not is_blind
        local_counts = None
        standing = self._standing(need, dispatch_in) if may_stand else None
        wishes: Sequence[Wish] = [wish] * self._num_ranks
        if standing is not None:
            room, got = standing
        else:
            room, wishes = self._room(wish, device, is_blind)
            local_counts = None if routing is not None else self._local_counts(per_expert, expert_alignment)
            got = dispatch_in(room)
        if key is not None and topk_idx is not None and topk_weights is not None and (is_blind or standing is not None):
            how = ("rank", expert_alignment), room.num_sms(config.num_sms), not is_blind
            looks = asked_of(*options), (x, topk_idx, topk_weights, *counts)
            pool.remember(key, room, (x, topk_idx, topk_weights), how, wishes, looks)
        stream = pool.own_stream(device) if run.has_own_stream else None
        listed = [] if num_worst_tokens else got.num_tokens_per_expert if local_counts is None else local_counts
        known = V1Handle(room, got.handle, num_worst_tokens, wishes, is_token_in_rank, config, stream)
        return got, known, listed

    def _standing(self, need: Need, dispatch_in: Callable[[Room], Dispatched]) -> tuple[Room, Dispatched] | None:
        """Dispatch without an exchange if there is room for all ranks; None: they have to agree."""
        room = self._pool.standing_room(need)
        if room is None:
            return None
        try:
            return room, dispatch_in(room)
        except NoRoomError:
            return None  # a peer's call does not fit, and all were notified in this call

    def _room(self, wish: Wish, device: torch.device, is_blind: bool) -> tuple[Room, Sequence[Wish]]:
        """Return the room for a dispatch, and the ranks' requests: as exchanged, or all equal to this rank's."""
        pool = self._pool
        if is_blind:
            return pool.room(Need.unasked(wish, device)), [wish] * self._num_ranks
        wishes = pool.agree(wish)
        return pool.room(Need.of(wishes, device)), wishes

    def _key(self, given: Given, options: Asked) -> object:
        """Return the cache key of a dispatch; None if only the checks can determine it."""
        x, counts, topk_idx, topk_weights = given
        asked = asked_of(*options)
        if asked is None:
            return None
        counted: tuple[Any, Any, Any] = counts
        per_rank, is_in, per_expert = counted
        if not type(per_rank) is type(is_in) is type(per_expert) is torch.Tensor:
            return None
        try:
            checked = checked_topk(x, topk_idx, topk_weights)
        except expected(*NO_FACTS):
            return None
        return checked, is_in.shape, is_in.dtype, per_expert.shape, asked

    def _local_counts(self, num_tokens_per_expert: torch.Tensor, expert_alignment: int) -> list[int]:
        """Return the tokens of each local expert as all ranks counted them (routing without experts)."""
        total = self._pool.sum_counts(num_tokens_per_expert)
        local = total.view(self._num_ranks, -1)[self._rank].tolist()
        return [align_up(count, expert_alignment) for count in local]
