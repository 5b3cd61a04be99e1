"""A slot is idle when nobody but its own originals uses its memory, whatever the user has made of the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epee.ep.throughput.gpu.views import SlotViews

SHAPE = (4, 8)
OFFSET = 64


def make() -> tuple[SlotViews, torch.Tensor]:
    """A slot of bytes that count up, and those bytes for comparison."""
    values = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    base = values.clone()
    return SlotViews(base, values.view(torch.int64)), values


def test_an_alias_shows_the_slot_at_its_place() -> None:
    views, values = make()
    want = values[OFFSET : OFFSET + 64].view(torch.bfloat16).view(SHAPE)
    for num_rows in (4, 3, 0):
        got = views.alias((torch.bfloat16, OFFSET, SHAPE), num_rows)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.view(torch.int16), want[:num_rows].view(torch.int16))
    whole = views.alias((torch.int64, 0, (8, 4)), 8)
    whole.fill_(-1)
    assert bool((views.alias((torch.bfloat16, OFFSET, SHAPE), 4).view(torch.int16) == -1).all())


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x[1:, ::2],
        lambda x: x.view(torch.int16),
        lambda x: x.untyped_storage(),
        lambda x: x.numpy(),
        lambda x: (torch.ones(SHAPE, requires_grad=True) * x).grad_fn,  # saved for backward
        lambda x: torch.from_dlpack(x),
    ],
)
def test_whatever_uses_the_memory_keeps_the_slot(hold: Callable[[torch.Tensor], object]) -> None:
    views, _ = make()
    assert views.is_idle()
    held = hold(views.alias((torch.float16, 0, SHAPE), 4))
    other = views.alias((torch.int32, OFFSET, SHAPE), 2)
    assert not views.is_idle()
    del other
    assert not views.is_idle()
    del held
    assert views.is_idle()


def test_gradients_and_modes_of_one_result_do_not_reach_the_next() -> None:
    views, _ = make()
    with torch.inference_mode():
        first = views.alias((torch.float32, 0, SHAPE), 3)
    assert not first.is_inference()
    first = views.alias((torch.float32, 0, SHAPE), 3)
    first.mul_(torch.ones(1, requires_grad=True))
    assert first.requires_grad
    assert not views.is_idle()
    del first
    second = views.alias((torch.float32, 0, SHAPE), 3)
    assert not second.requires_grad
    second.requires_grad_()
    del second
    assert views.is_idle()


def test_many_shapes_leave_no_heap_of_originals_and_a_slot_stays_held_all_the_while() -> None:
    views, values = make()
    held = views.alias((torch.uint8, 0, (1, 1)), 1)
    for rows in range(1, 250):
        for columns in (1, 2):
            views.alias((torch.uint8, 2, (rows, columns) if rows * columns < 250 else (1, 250)), 1)
            assert not views.is_idle()
    for offset in range(0, 256, 2):
        assert torch.equal(views.alias((torch.uint8, offset, (1, 2)), 1)[0], values[offset : offset + 2])
    assert len(views._originals) <= 256
    del held
    assert views.is_idle()
