// How kernels wait: one loop that ends, and one look at what else may end it. What is polled, and what an early end
// means (a report, a source that is late), is said by who waits.
//
// The host gives the kernels of a buffer three words in its memory (`abort` of a call). It writes the first two:
//   kHostAbort    not 0: all waits end
//   kHostDead     a bit for each rank that is dead
//   kHostWaiting  written by kernels: when a thread last found that its wait had lasted `kLongWaitNs`; 0 before
// Nobody resets the third. The host's thread that tells of deaths (`gpu/death_notifier.py`) compares it with what it
// was: while it moves somebody waits, and the thread looks at the ranks' processes more often than it does else.
// Nothing is ordered by these words, they are news: who misses one reads it at the next look.
//
// That memory is far away, and loads of one word of it queue up at 1.3 us each (measured). So a GPU keeps a copy of the
// first two in device memory, with the times of the last look and of the last word to the host (`NewsWord`). A thread
// that waits looks at the copy, every so many polls; one at a time renews it, and one tells the host, when it is time.
#pragma once
#include "../ptx/memory.cuh"

enum HostWord : int { kHostAbort = 0, kHostDead, kHostWaiting };
enum NewsWord : int { kNewsLooked = 0, kNewsDead, kNewsTold, kNewsAborted };  // all near; the first and third are times

constexpr u64 kNewsPeriodNs = 20000;  // between two looks of a GPU into the host's memory
constexpr u64 kLongWaitNs = 1000000;  // a wait that the host hears of; also the least time between two such words

/// Between two polls of memory that another block, GPU or process writes: in the emulation the writer must run.
DEVICE void poll_pause() {
#ifndef __CUDACC__
  emulation::yield();
#endif
}

/// What was polled for has come.
DEVICE void note_arrival() {
#ifndef __CUDACC__
  emulation::note_move();
#endif
}

/// The most polls between two looks of a wait. A poll of the emulation gives the processor away or sleeps, which takes
/// longer than a look.
#ifdef __CUDACC__
constexpr u32 kMostPolls = ~0u;
#else
constexpr u32 kMostPolls = 16;
#endif

/// Whether `period_ns` have passed since `then`, which may be a little later than `now`: another thread's look.
DEVICE bool has_passed_since(u64 then, u64 now, u64 period_ns) {
  return static_cast<i64>(now - then) >= static_cast<i64>(period_ns);
}

/// What the host has said of late; a bit for each rank that is dead, of 64.
struct HostState {
  u64 dead;
  u64 aborted;
};

/// What the host has said of late. For a thread that has waited since `start`; the host hears of it when that is long
/// ago. `host` are its words, `news` this GPU's.
DEVICE HostState latest_news(u64* host, u64* news, u64 start, u64 now) {
  const auto is_mine = [&](u64* time, u64 period_ns) {  // one thread at a time
    const u64 last = ld_relaxed_sys(time);
    return has_passed_since(last, now, period_ns) && atom_cas_relaxed_gpu(time, last, now) == last;
  };
  if (has_passed_since(start, now, kLongWaitNs) && is_mine(news + kNewsTold, kLongWaitNs))
    st_relaxed_sys(host + kHostWaiting, now);
  if (is_mine(news + kNewsLooked, kNewsPeriodNs)) {
    st_relaxed_sys(news + kNewsAborted, ld_relaxed_sys(host + kHostAbort));
    st_relaxed_sys(news + kNewsDead, ld_relaxed_sys(host + kHostDead));
  }
  return {ld_relaxed_sys(news + kNewsDead), ld_relaxed_sys(news + kNewsAborted)};
}
DEVICE bool is_aborted(const HostState& news) { return news.aborted; }
/// Those of this NVLink domain.
DEVICE u32 dead_ranks(const HostState& news) { return static_cast<u32>(news.dead); }

/// What a wait does when it is told to end. This thread may have stood still since its last poll, so where all that
/// came in time counts it polls once more.
enum AtEnd : int { kLeave, kPollAgain };

struct Never {
  DEVICE bool operator()() const { return false; }
};

/// Polls until `poll()` is true. False when the wait was ended by `must_end()`, which is asked every `kPollsPerLook`
/// polls, or by `is_idle()`, which costs nothing and is asked each time.
template <u32 kPollsPerLook, AtEnd kAtEnd = kLeave, class Poll, class Look, class Near = Never>
DEVICE bool bounded_wait(Poll poll, Look must_end, Near is_idle = {}) {
  bool is_last = false;
  for (u32 polls = 1;; ++polls) {
    if (poll()) {
      note_arrival();
      return true;
    }
    if (kAtEnd == kPollAgain && is_last) return false;
    poll_pause();
    is_last = is_idle() || (polls % kPollsPerLook == 0 && must_end());
    if (kAtEnd == kLeave && is_last) return false;
  }
}

/// The same for what this very GPU does, whatever peers and host do: nothing but the time ends it.
template <class Poll>
DEVICE bool bounded_wait_here(u64 limit_ns, Poll poll) {
  const u64 start = global_time_ns();
  return bounded_wait<1>(poll, [&] { return global_time_ns() - start >= limit_ns; });
}
