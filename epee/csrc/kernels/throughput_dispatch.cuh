// Dispatch into the rank layout: moves rows to the places where they stay. Runs behind throughput_layout, which has
// exchanged counts and grants.
//
// All warps are senders (throughput_sender.cuh) and take tokens from one counter. When a block is done it says so to
// every rank (dispatch_done); block 0 waits for all blocks of all ranks, so the kernel's end means that everything has
// arrived. Only block 0 waits for anybody, so the blocks need not be co-resident.
#pragma once
#include "throughput_sender.cuh"

/// Rows behind the received ones say that no expert wants them (only used when the host does not know the count).
DEVICE void fill_tail(const DispatchParams& p) {
  const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
  u8* slot = reinterpret_cast<u8*>(p.slots[p.call.rank] + static_cast<u64>(grants[p.call.rank]) * p.slot_bytes);
  const i64 first = static_cast<i64>(reinterpret_cast<const i32*>(p.recv_info)[kRecvInfoRows]) * p.num_topk;
  const i64 end = static_cast<i64>(p.max_recv_rows) * p.num_topk;
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (i64 i = first + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step)
    reinterpret_cast<i64*>(slot + p.topk_idx_offset)[i] = -1;
}

template <int kStages>
DEVICE void dispatch_by_rank(const DispatchParams& p) {
  u8* shared = dynamic_shared();
  __shared__ u64 barriers[32 * kStages];
  const int num_warps = static_cast<int>(blockDim.x / 32);
  init_barriers(barriers, num_warps * kStages);
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  const Destination to = open_destination(p);
  const bool is_good = !has_failed(p.call, tag);
  if (is_good) {
    u32* counter = reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset));
    const TokenSource tokens = {static_cast<i32>(blockIdx.x + gridDim.x * (threadIdx.x / 32)),
                                0,
                                p.num_tokens,
                                counter,
                                static_cast<i32>(gridDim.x) * num_warps,
                                0};
    sender<false, kStages>(p, tag, to, 0, tokens, shared + static_cast<i64>(warp_idx()) * kStages * p.chunk_bytes,
                           barriers + warp_idx() * kStages, nullptr);
    if (p.fill_tail) fill_tail(p);
    if (lane_idx() == 0) bulk_wait<0>();
  }
  announce_block(p.call, tag, kControlDispatchDoneOffset, is_good);
  if (blockIdx.x != 0) return;
  const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
  await_blocks(p.call, tag, kControlDispatchDoneOffset, grants + 2 * kMaxRanks, is_good, 1);
  if (threadIdx.x == 0) *reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset)) = 0;
  finish_call(p.call, tag);
}

extern "C" __global__ void __launch_bounds__(1024, 1) throughput_dispatch_2(const __grid_constant__ DispatchParams p) {
  dispatch_by_rank<2>(p);
}

extern "C" __global__ void __launch_bounds__(1024, 1) throughput_dispatch_4(const __grid_constant__ DispatchParams p) {
  dispatch_by_rank<4>(p);
}
