"""A model with an `epee.nn.MoELayer` in a training, without DDP."""

import torch
import torch.distributed as dist

import epee

dist.init_process_group("epee")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
# --8<-- [start:model]
num_experts = 4 * num_ranks
buffer = epee.Buffer(num_experts=num_experts, hidden=32, num_topk=2, max_tokens_per_rank=64, dtype=torch.float32)
torch.manual_seed(0)  # all that is not an expert begins equal on every rank
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32),
    epee.nn.MoELayer(32, 64, num_experts, 2, buffer),  # hidden, inner width, experts of all ranks, experts per token
    torch.nn.Linear(32, 16),
)
# --8<-- [end:model]
# --8<-- [start:training]
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
generator = torch.Generator().manual_seed(rank)
losses = []
for _ in range(20):
    x = torch.randn(64, 16, generator=generator)  # each rank trains on tokens of its own
    loss = (model(x) - x.flip(-1)).square().mean()
    (loss + 0.01 * model[1].aux_loss).backward()  # the second term balances the experts
    epee.nn.sync_gradients(model)  # once before each step of the optimiser
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"rank {rank}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, rows sent to each rank {model[1].num_sent}")
# --8<-- [end:training]
assert losses[-1] < losses[0] / 2
buffer.close()
dist.destroy_process_group()
