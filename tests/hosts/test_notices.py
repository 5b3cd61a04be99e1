"""What members tell of their buffers over hosts: read back as it was, and nothing else is believed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epee.engine.bootstrap.group_note import Home
from epee.ep.config import BufferConfig
from epee.ep.members import notices
from epee.ep.members.notices import MAX_NOTICES, BufferNotice, notice_group_id, parse_notice
from epee.errors import UnsupportedError
from epee.view.process.board import MAX_TOLD_BYTES
from epee.view.transport.wire import GROUP_ID_LIMIT

LARGEST = BufferConfig(64, 1 << 20, 1 << 20, 32, 1 << 24, torch.float64, 64, 1 << 32, room_bytes=1 << 48)


def notice(config: BufferConfig, num_hosts: int = 2) -> BufferNotice:
    home = Home(GROUP_ID_LIMIT - 1, config.num_ranks, 1 << 20, "mask/evict", True, "nixl", True)
    return BufferNotice(7, num_hosts, 1 << 40, home, config.words())


def test_a_notice_of_the_largest_buffer_is_told_in_whole() -> None:
    for config in (LARGEST, BufferConfig(2, 2, 8, 1, 1, torch.bfloat16, is_latency=True)):
        told = notice(config)
        assert len(told.pack()) <= MAX_TOLD_BYTES
        assert parse_notice(told.pack()) == told


def test_what_cannot_be_right_is_no_notice() -> None:
    right = notice(LARGEST)
    for wrong in (right._replace(number=0), right._replace(num_hosts=1), right._replace(num_hosts=65)):
        assert parse_notice(wrong.pack()) is None
    assert parse_notice(right._replace(home=right.home._replace(num_ranks=8)).pack()) is None
    assert parse_notice(right._replace(home=right.home._replace(spans=False)).pack()) is None
    assert parse_notice(right._replace(home=right.home._replace(group_id=1 << 63)).pack()) is None
    data = right.pack()
    assert all(parse_notice(data[:length]) is None for length in range(len(data)))
    assert parse_notice(data + b"x") is None
    dice = random.Random(1)
    for _ in range(2000):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] = dice.randrange(256)
        found = parse_notice(bytes(damaged))
        assert found is None or parse_notice(found.pack()) == found


def test_a_buffer_that_stays_on_its_host_is_told_without_a_lane_between_hosts() -> None:
    told = notice(LARGEST, 1)
    right = told._replace(home=told.home._replace(spans=False))
    assert parse_notice(right.pack()) == right
    assert parse_notice(right._replace(num_hosts=2).pack()) is None
    assert parse_notice(right._replace(num_hosts=0).pack()) is None


def test_places_have_lanes_of_their_own() -> None:
    groups = {notice_group_id(group, place) for group in (5, 6) for place in range(MAX_NOTICES)}
    assert len(groups | {5, 6}) == 2 * MAX_NOTICES + 2
    assert all(0 <= group_id < GROUP_ID_LIMIT for group_id in groups)


@pytest.mark.parametrize("oldest", [1, 2])
def test_the_oldest_buffer_that_is_like_it_is_the_one_to_come_into(
    oldest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BufferConfig(4, 8, 16, 2, 8, torch.bfloat16)
    told = [notice(config, num_hosts)._replace(number=num_hosts) for num_hosts in (oldest, 3 - oldest)]
    monkeypatch.setattr(notices, "_running", lambda job_handle, own_rank, timeout_s: [(one, 0) for one in told])

    class OfJob:
        """Stands for the view's runtime, as a key as well."""

        member = SimpleNamespace(host="b")

        def host_of(self, slot: int) -> str:
            return "a"

    job_handle: Any = SimpleNamespace(is_joiner=True, spans=True, runtime=OfJob(), slots=[0])
    group: Any = SimpleNamespace(rank=lambda: 3)
    found = notices.find_on_one_host(group, job_handle, config, False, 1.0)
    assert (found is not None) is (oldest == 1)
    if found is not None:
        with pytest.raises(UnsupportedError, match="stays there"):
            found.require_here("Buffer", 3)
