"""The second example of the README: a GPU for each of two ranks, and a matrix for each expert."""

import os

import torch
import torch.distributed as dist

import epee

use_gpus = torch.cuda.device_count() >= 2  # without them the same lines run on the CPU
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
dist.init_process_group("epee")
made = {"dtype": torch.bfloat16, "device": device}
experts = torch.randn(8, 256, 256, generator=torch.Generator().manual_seed(0)).to(**made) / 16
mine = experts.chunk(2)[dist.get_rank()]  # each rank owns four
with epee.Buffer(num_experts=8, hidden=256, num_topk=2, max_tokens_per_rank=128, device=device) as buffer:
    x = torch.randn(128, 256, **made)
    weights, topk_idx = torch.rand(128, 8, device=device).softmax(-1).topk(2)
    d = buffer.dispatch(x, topk_idx, weights, layout="expert")
    y = buffer.combine_input(d.handle)
    for expert, rows, out in zip(mine, *(t.split(d.num_tokens_per_expert) for t in (d.x, y)), strict=True):
        torch.mm(rows, expert, out=out)
    c = buffer.combine(y, d.handle)
    want = sum(weights[:, k, None] * torch.bmm(x[:, None], experts[topk_idx[:, k]])[:, 0] for k in range(2))
    torch.testing.assert_close(c.x.float(), want, rtol=2e-2, atol=2e-2)
    print(f"rank {dist.get_rank()} on {device}: received {d.handle.num_recv} rows, sent {d.handle.num_sent}")
dist.destroy_process_group()
