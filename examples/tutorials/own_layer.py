"""A Mixture-of-Experts layer of your own with gradients, made of `epee.nn.dispatch` and `epee.nn.combine`."""

import torch
import torch.distributed as dist

import epee

HIDDEN, NUM_EXPERTS = 32, 8
dist.init_process_group("epee")
rank, num_ranks = dist.get_rank(), dist.get_world_size()


# --8<-- [start:layer]
class Layer(torch.nn.Module):
    def __init__(self, buffer: epee.Buffer) -> None:
        super().__init__()
        self.buffer = buffer
        torch.manual_seed(0)  # the router begins equal on every rank
        self.router = torch.nn.Linear(HIDDEN, NUM_EXPERTS)
        torch.manual_seed(1 + rank)  # each rank has experts of its own
        experts = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS // num_ranks)]
        self.experts = epee.nn.mark_experts(torch.nn.ModuleList(experts))  # DDP and FSDP leave them alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, topk_idx = self.router(x).softmax(-1).topk(2)
        received = epee.nn.dispatch(self.buffer, x, topk_idx, weights)  # the expert layout is the default here
        blocks = received.x.split(received.num_tokens_per_expert)
        y = torch.cat([expert(block) for expert, block in zip(self.experts, blocks, strict=True)])
        return epee.nn.combine(self.buffer, y, received)  # a tensor, not a `Combined`


# --8<-- [end:layer]
# --8<-- [start:training]
buffer = epee.Buffer(num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=2, max_tokens_per_rank=64, dtype=torch.float32)
layer = Layer(buffer)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
x = torch.randn(64, HIDDEN)
losses = []
for _ in range(40):
    loss = (layer(x) - x.flip(-1)).square().mean()
    loss.backward()
    epee.nn.sync_gradients(layer)  # averages the router, scales the experts
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
# --8<-- [end:training]
routers = [torch.empty_like(layer.router.weight) for _ in range(num_ranks)]
dist.all_gather(routers, layer.router.weight.detach())
assert all(torch.equal(router, routers[0]) for router in routers)
assert losses[-1] < losses[0] / 2, losses
print(f"rank {rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
buffer.close()
dist.destroy_process_group()
