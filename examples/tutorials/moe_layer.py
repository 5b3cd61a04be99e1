"""A Mixture-of-Experts layer over the ranks, written with `epee.Buffer`."""

import torch
import torch.distributed as dist

import epee

HIDDEN, NUM_EXPERTS, NUM_TOPK = 64, 8, 2

dist.init_process_group("epee")  # gloo or nccl will do as well
rank, num_ranks = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)  # the same router and experts on every rank
router = torch.randn(HIDDEN, NUM_EXPERTS, generator=generator)
experts = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=generator) / 8
own_experts = experts.chunk(num_ranks)[rank]  # a real model has no others in memory
buffer = epee.Buffer(
    num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=NUM_TOPK, max_tokens_per_rank=128, dtype=torch.float32
)


# --8<-- [start:layer]
def moe_layer(x: torch.Tensor) -> torch.Tensor:
    weights, topk_idx = (x @ router).softmax(-1).topk(NUM_TOPK)
    received = buffer.dispatch(x, topk_idx, weights, layout="expert")
    y = buffer.combine_input(received.handle)  # memory that the combine need not copy
    blocks = received.x.split(received.num_tokens_per_expert)
    results = y.split(received.num_tokens_per_expert)
    for expert, block, result in zip(own_experts, blocks, results, strict=True):
        torch.mm(block, expert, out=result)
    return buffer.combine(y, received.handle).x  # multiplied by the weights and summed for each token


# --8<-- [end:layer]
# --8<-- [start:check]
x = torch.randn(100, HIDDEN)  # each rank has tokens of its own
out = moe_layer(x)
weights, topk_idx = (x @ router).softmax(-1).topk(NUM_TOPK)
dense = sum(weights[:, k, None] * torch.bmm(x[:, None], experts[topk_idx[:, k]])[:, 0] for k in range(NUM_TOPK))
torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
print(f"rank {rank}: equal to a layer that has all experts")
# --8<-- [end:check]
buffer.close()
dist.destroy_process_group()
