"""The backend of a data-parallel program is replaced: one word changes."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import epee

# --8<-- [start:program]
dist.init_process_group("epee")  # was "gloo"; `import epee` makes the name known
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn(32, 16)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# --8<-- [end:program]
# --8<-- [start:mistake]
x = torch.ones(4 + dist.get_rank())  # a mistake: the sizes differ
try:
    dist.all_reduce(x)
except epee.MismatchError as error:  # on every rank; x is as it was, and the group works on
    print(f"rank {dist.get_rank()}: {error}")
dist.barrier()
# --8<-- [end:mistake]
print(f"rank {dist.get_rank()}: loss {loss.item():.3f}")
dist.destroy_process_group()
