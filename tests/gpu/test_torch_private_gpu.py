"""The private parts of torch that GPU calls use, compared with torch's public functions."""

from __future__ import annotations

import pytest
import torch

from epee import torch_private
from epee.gpu.event import current_stream, recorded_on, wait_on

pytestmark = [pytest.mark.gpu(1)]


def test_device_stream_and_capture_are_those_of_the_public_functions() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_private.current_index() == torch.cuda.current_device() == stream.device.index
        assert torch_private.current_raw_stream(stream.device.index) == stream.cuda_stream
        graph = torch.cuda.CUDAGraph()
        assert torch_private.is_capturing() is False
        with torch.cuda.graph(graph, stream=stream):
            assert torch_private.is_capturing() is True
            torch.zeros(1, device="cuda")  # torch warns of an empty graph


def test_events_are_those_under_the_public_class() -> None:
    assert issubclass(torch.cuda.Event, torch_private.CudaEvent)


def test_the_current_stream_is_that_of_the_public_function() -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert current_stream() == current_stream(stream.device_index) == torch.cuda.current_stream() == stream
            assert current_stream() is current_stream()


def test_a_stream_waits_for_an_event_that_is_recorded_by_less() -> None:
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    word = torch.zeros(1, device="cuda")
    torch.cuda._sleep(20_000_000)
    word.fill_(1)
    wait_on(second, recorded_on(first))
    with torch.cuda.stream(second):
        seen = word.clone().item()  # on that stream: the first one does not wait for the copy
    assert seen == 1


def test_tensors_are_made_on_the_current_gpu() -> None:
    make = torch_private.EMPTY_STRIDED["cuda"]
    assert make is not None
    tensor = make((4, 2), (2, 1), torch.bfloat16)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 2), (2, 1), torch.bfloat16)
    assert tensor.device.index == torch.cuda.current_device()
