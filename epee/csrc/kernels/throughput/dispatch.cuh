// Dispatch into the rank layout: moves rows to the places where they stay. Runs behind throughput_layout, which has
// exchanged counts and grants.
//
// All warps are senders (sender.cuh) and take tokens from one counter. When a block is done it says so to
// every active rank (dispatch_done); block 0 waits for all blocks of all ranks, so the kernel's end means that
// everything has arrived. Only block 0 waits for anybody, so the blocks need not be co-resident.
#pragma once
#include "sender.cuh"

template <int kStages>
DEVICE void dispatch_by_rank(const DispatchParams& p) {
  u8* shared = dynamic_shared();
  __shared__ u64 barriers[32 * kStages];
  const int num_warps = static_cast<int>(blockDim.x / 32);
  init_barriers(barriers, num_warps * kStages);
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  const Destination to = open_destination(p);
  const u32 peers = has_failed(p.call, tag) ? 0 : active_ranks(p.call);
  if (peers) {
    u32* counter = reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset));
    const TokenSource tokens = {static_cast<i32>(blockIdx.x + gridDim.x * (threadIdx.x / 32)),
                                0,
                                p.num_tokens,
                                counter,
                                static_cast<i32>(gridDim.x) * num_warps,
                                0};
    sender<false, kStages>(p, tag, to, 0, tokens, shared + static_cast<i64>(warp_idx()) * kStages * p.chunk_bytes,
                           barriers + warp_idx() * kStages, nullptr);
    if (p.fill_tail)
      fill_tail(p, reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(to.slot), p.call.rank)),
                reinterpret_cast<const i32*>(p.recv_info)[kRecvInfoRows], static_cast<int>(blockIdx.x),
                static_cast<int>(gridDim.x));
    if (lane_idx() == 0) bulk_wait<0>();
  }
  announce_block(p.call, tag, kControlDispatchDoneOffset, peers);
  if (blockIdx.x != 0) return;
  const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
  await_blocks(p.call, tag, kControlDispatchDoneOffset, grants + 2 * kMaxRanks, peers != 0, 1);
  if (threadIdx.x == 0) *reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset)) = 0;
  finish_call(p.call, tag);
}

namespace epee {

__global__ void __launch_bounds__(1024, 1) dispatch_throughput_2(const __grid_constant__ DispatchParams p) {
  dispatch_by_rank<2>(p);
}

__global__ void __launch_bounds__(1024, 1) dispatch_throughput_4(const __grid_constant__ DispatchParams p) {
  dispatch_by_rank<4>(p);
}

}  // namespace epee
