"""A program that knows nothing of hosts; it prints on which of them its ranks are."""

import torch
import torch.distributed as dist

import epee

# --8<-- [start:program]
dist.init_process_group("epee")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
x = torch.full((4,), float(rank))
dist.all_reduce(x)
with epee.Buffer(num_experts=2 * num_ranks, hidden=64, num_topk=2, max_tokens_per_rank=32) as buffer:
    tokens = torch.randn(32, 64, dtype=torch.bfloat16)
    weights, topk_idx = torch.rand(32, 2 * num_ranks).softmax(-1).topk(2)
    received = buffer.dispatch(tokens, topk_idx, weights, layout="expert")
    out = buffer.combine(received.x, received.handle).x
    sent = received.handle.num_sent_to_hosts  # rows that crossed the network, for each host; None on one host
print(f"rank {rank}: hosts {dist.group.WORLD.hosts}, sum {x[0]:.0f}, rows sent to hosts {sent}")
dist.destroy_process_group()
# --8<-- [end:program]
