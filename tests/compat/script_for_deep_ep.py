"""A script as its author wrote it for DeepEP: it knows nothing of epee. `test_deep_ep_script.py` runs it.

A Mixture-of-Experts layer with an autograd function around dispatch and one around combine, checked against the same
layer without communication; then a forward pass with the V2 buffer.
"""

import deep_ep  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from deep_ep import Buffer, ElasticBuffer
from deep_ep.utils import EventHandle, EventOverlap

HIDDEN, NUM_TOPK, NUM_LOCAL = 128, 3, 4
Buffer.set_num_sms(24)
_buffer = None


def get_buffer(group, hidden_bytes):
    global _buffer
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), num_rdma_bytes)
    if _buffer is None or _buffer.group != group or _buffer.num_nvl_bytes < num_nvl_bytes:
        _buffer = Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return _buffer


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, num_experts, group):
        buffer = get_buffer(group, x.size(1) * 2)
        previous = EventOverlap(EventHandle())
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx, num_experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.group, ctx.handle = group, handle
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, *__):
        buffer = get_buffer(ctx.group, grad_x.size(1) * 2)
        back, weights, event = buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float(), async_finish=True
        )
        event.current_stream_wait()
        return back, None, weights, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, handle):
        buffer = get_buffer(group, x.size(1) * 2)
        with buffer.capture() as previous:
            combined, _, event = buffer.combine(x, handle=handle, previous_event=previous, async_finish=True)
        event.current_stream_wait()
        ctx.group, ctx.handle = group, handle
        return combined

    @staticmethod
    def backward(ctx, grad):
        buffer = get_buffer(ctx.group, grad.size(1) * 2)
        grad_x, _, _, _, _, event = buffer.dispatch(grad.contiguous(), handle=ctx.handle, async_finish=True)
        event.current_stream_wait()
        return grad_x, None, None


def experts_of(rows, idx, weights, scales, first):
    """Weighted sum over a row's experts: expert e multiplies by `scales[e]`."""
    chosen = torch.where(idx >= 0, scales[(idx + first).clamp(min=0)] * weights, torch.zeros(()))
    return (rows.float() * chosen.sum(1, keepdim=True)).to(rows.dtype)


def main():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    num_experts = NUM_LOCAL * num_ranks
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(20 + rank, HIDDEN, generator=generator).bfloat16().requires_grad_()
    topk_weights, topk_idx = torch.rand(20 + rank, num_experts, generator=generator).topk(NUM_TOPK)
    topk_idx = topk_idx.to(deep_ep.topk_idx_t)
    topk_weights = topk_weights.requires_grad_()
    scales = torch.linspace(0.5, 2.0, num_experts)

    recv_x, recv_idx, recv_weights, counts, handle = Dispatch.apply(x, topk_idx, topk_weights, num_experts, group)
    ends = handle[0][:, rank].tolist()
    assert ends[-1] == recv_x.size(0) == handle[3].numel()
    assert counts.tolist() == [(recv_idx == expert).sum() for expert in range(NUM_LOCAL)]
    combined = Combine.apply(experts_of(recv_x, recv_idx, recv_weights, scales, rank * NUM_LOCAL), group, handle)
    combined.float().sum().backward()

    alone_x, alone_weights = x.detach().requires_grad_(), topk_weights.detach().requires_grad_()
    alone = experts_of(alone_x, topk_idx, alone_weights, scales, 0)
    alone.float().sum().backward()
    torch.testing.assert_close(combined, alone, rtol=0.02, atol=0.02)
    torch.testing.assert_close(x.grad, alone_x.grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(topk_weights.grad, alone_weights.grad, rtol=0.02, atol=0.02)

    elastic = ElasticBuffer(
        group, num_max_tokens_per_rank=32, hidden=HIDDEN, num_topk=NUM_TOPK, explicitly_destroy=True
    )
    rows, no_idx, weights, handle, event = elastic.dispatch(
        x.detach(), topk_idx, topk_weights.detach(), num_experts=num_experts, expert_alignment=8, do_expand=True
    )
    assert no_idx is None
    assert event.event is None
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    start, factor = 0, torch.zeros(rows.size(0), 1)
    for expert, end in enumerate(ends):
        factor[start:end] = scales[rank * NUM_LOCAL + expert] * weights[start:end, None]
        start = -(-end // 8) * 8
    combined, _, _ = elastic.combine((rows.float() * factor).bfloat16(), handle)
    torch.testing.assert_close(combined, alone.detach(), rtol=0.03, atol=0.03)
    elastic.destroy()


if __name__ == "__main__":
    main()
