"""A program written for DeepEP. It does not mention epee; the launcher answers for `deep_ep`."""

# --8<-- [start:program]
import os

import deep_ep
import torch
import torch.distributed as dist

NUM_EXPERTS = 8
use_gpus = torch.cuda.device_count() >= 2
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
if use_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if use_gpus else "gloo")
buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 26, 0)
x = torch.randn(32, 128, dtype=torch.bfloat16, device=device)
weights, topk_idx = torch.rand(32, NUM_EXPERTS, device=device).softmax(-1).topk(2)

per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
recv_x, _, recv_weights, num_per_expert, handle, _ = buffer.dispatch(
    x,
    topk_idx=topk_idx,
    topk_weights=weights,
    num_tokens_per_rank=per_rank,
    is_token_in_rank=in_rank,
    num_tokens_per_expert=per_expert,
)
out, _, _ = buffer.combine(recv_x, handle)
torch.testing.assert_close(out, in_rank.sum(-1, keepdim=True) * x)  # each rank has sent the row back once
print(f"rank {dist.get_rank()}: received {len(recv_x)} rows, by {deep_ep.__name__} {deep_ep.__version__}")
dist.destroy_process_group()
# --8<-- [end:program]
