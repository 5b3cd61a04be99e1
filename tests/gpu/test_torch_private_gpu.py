"""The private parts of torch that GPU calls use, compared with torch's public functions."""

from __future__ import annotations

import pytest
import torch

from epee import torch_private

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


def test_tensors_are_made_on_the_current_gpu() -> None:
    make = torch_private.EMPTY_STRIDED["cuda"]
    assert make is not None
    tensor = make((4, 2), (2, 1), torch.bfloat16)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 2), (2, 1), torch.bfloat16)
    assert tensor.device.index == torch.cuda.current_device()
