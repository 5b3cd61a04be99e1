// What kernels tell the host when something is wrong: numbers in pinned memory, a few slots, the first one of a call
// wins.
#pragma once
#include "../ptx/memory.cuh"

enum FailureCode : int {
  kTimeout = 1,
  kAborted,
  kMismatch,
  kRefused,
  kOverflow,
  kBadCount,
  kBadExpert,
  kBadRow,
  kPeerGaveUp,
  kPeerDead
};

/// A failure that the host will raise at its next touch; all words are numbers, the host finds the words for them.
struct Failure {
  FailureCode code;
  int peer;
  u64 expected;
  u64 got;
  u64 where;
};

/// Writes a report, unless the call has one already.
DEVICE void add_report(u64* reported, u64* reports, u64 tag, u64 code_and_op, i64 peer, u64 expected, u64 got,
                       u64 where) {
  if (atom_exch_relaxed_gpu(reported, tag) == tag) return;
  u64* report = reports + (tag % kNumReports) * 8;
  st_relaxed_sys(report + 1, tag);
  st_relaxed_sys(report + 2, code_and_op >> 32);
  st_relaxed_sys(report + 3, static_cast<u64>(peer));
  st_relaxed_sys(report + 4, expected);
  st_relaxed_sys(report + 5, got);
  st_relaxed_sys(report + 6, where);
  st_release_sys(report, code_and_op & 0xFFFFFFFF);
}

/// Marks a call as failed and writes a report.
DEVICE_COLD void write_report(u64* failed, u64* reported, u64* reports, u64 tag, u64 code_and_op, i64 peer,
                              u64 expected, u64 got, u64 where) {
  st_relaxed_sys(failed, tag);
  add_report(reported, reports, tag, code_and_op, peer, expected, got, where);
}
