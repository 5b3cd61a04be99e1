"""Steps of a decoding with `epee.LatencyBuffer`; on GPUs they are recorded in a CUDA graph."""

import os

import torch
import torch.distributed as dist

import epee

HIDDEN, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 256, 8, 2, 16
use_gpus = torch.cuda.device_count() >= 2  # otherwise the same lines run on CPU tensors
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
if use_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("epee")
# --8<-- [start:step]
buffer = epee.LatencyBuffer(
    num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=NUM_TOPK, max_tokens_per_rank=MAX_TOKENS, device=device
)
x = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
topk_idx = torch.full((MAX_TOKENS, NUM_TOPK), -1, dtype=torch.int64, device=device)  # -1: no expert
weights = torch.zeros(MAX_TOKENS, NUM_TOPK, dtype=torch.float32, device=device)


def step() -> torch.Tensor:
    received = buffer.dispatch(x, topk_idx, weights)
    y = received.x * 2  # the experts; rows of expert j: received.num_tokens_per_expert[j], the others are padding
    return buffer.combine(y, received.handle).x


# --8<-- [end:step]
# --8<-- [start:graph]
out = step()  # compiles the kernels, which a recording must not do
if use_gpus:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
# --8<-- [end:graph]
# --8<-- [start:decode]
for num_tokens in (16, 3, 0):  # sequences end; the shapes stay
    x.normal_()
    topk_idx.fill_(-1)
    topk_idx[:num_tokens] = torch.rand(num_tokens, NUM_EXPERTS, device=device).topk(NUM_TOPK).indices
    weights.fill_(0.5)
    if use_gpus:
        graph.replay()  # reads the new rows and the new routing
    else:
        out = step()
    torch.testing.assert_close(out[:num_tokens], 2 * x[:num_tokens])
    assert not out[num_tokens:].any()
# --8<-- [end:decode]
print(f"rank {dist.get_rank()} on {device}: three steps are right")
buffer.check()  # waits for the GPU, and raises what a kernel has met
buffer.close()
dist.destroy_process_group()
