// All ranks of a buffer meet on the device. One block.
#pragma once
#include "../common/call.cuh"

extern "C" __global__ void __launch_bounds__(32, 1) barrier(const __grid_constant__ BarrierParams p) {
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  meet_all(p.call, tag, kControlBarrierOffset, 6);
  finish_call(p.call, tag);
}
