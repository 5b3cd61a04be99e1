"""The example of the README: two ranks, eight experts, one dispatch and one combine."""

import torch
import torch.distributed as dist

import epee

dist.init_process_group("epee")  # or gloo, nccl: any group will do for a Buffer
with epee.Buffer(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=32) as buffer:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    weights, topk_idx = torch.rand(32, 8).softmax(-1).topk(2)

    # one block of rows per local expert, wherever the tokens came from
    d = buffer.dispatch(x, topk_idx, weights, layout="expert")
    y = buffer.combine_input(d.handle)  # memory that combine need not copy
    for block, result in zip(d.x.split(d.num_tokens_per_expert), y.split(d.num_tokens_per_expert), strict=True):
        result.copy_(block * 2)  # your expert goes here
    c = buffer.combine(y, d.handle)  # weighted sum over each token's experts, back in token order

    torch.testing.assert_close(c.x.float(), 2 * x.float() * weights.sum(-1, keepdim=True), rtol=2e-2, atol=2e-2)
    print(f"rank {dist.get_rank()}: received {d.handle.num_recv} rows, sent {d.handle.num_sent}")
dist.destroy_process_group()
