// Where experts are: a table in device memory.
//
// Word 0 says whether experts are rank after rank, in the order of their numbers; word 1 + e is the place of expert e:
// the rank that has it * the number of experts of a rank + its index there. From the routing of a call on, kernels know
// experts by their places alone: in counts, handles and what ranks send each other. The host writes the table while no
// kernel runs on any rank, the same on all of them.
//
// A look into the table waits for memory, once the number of the expert is there: 0.4 us of a dispatch that takes 5
// (measured, also where the table was brought to shared memory before). So nobody looks where the order is the usual
// one: that word comes while the routing does.
#pragma once
#include "../ptx/memory.cuh"

struct Experts {
  const u16* table;
  bool is_in_order;

  /// The place of an expert that exists. Any thread.
  DEVICE u32 place(i64 expert) const { return is_in_order ? static_cast<u32>(expert) : table[1 + expert]; }
};

/// Any thread, before it asks for a place: the earlier, the less it waits.
DEVICE Experts open_experts(u64 address) {
  const u16* table = reinterpret_cast<const u16*>(address);
  return {table, table[0] != 0};
}
