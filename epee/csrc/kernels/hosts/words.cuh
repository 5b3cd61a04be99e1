// Calls between hosts on GPUs: the protocol between the kernels of an island's ranks, their proxies, and other islands.
//
// An island is a set of ranks whose GPUs map each other's memory; a "host" below is one. A token goes once to each
// other host that has one of its experts: as a record, to the gateway of its source there. Every rank of that host
// loads its rows out of the gateway's slots; nobody forwards. A combine sends one partial sum for each record back.
//
//   record    the row, and behind it in a dispatch: token, its place among the source's rows at each position of the
//             host (-1: none), expert ids, weights; the number of a record counts the source's tokens for that host
//   chunk     up to `chunk_records` adjacent records, in one slot of a stream
//   outlet    the slots from which the proxy of this rank sends to one partner
//   inlet     the slots in which a partner's chunks arrive, at this rank or at a neighbour of the island
//
// Words of the page (`epee/link/proxy/words.py` has the order and what a crash leaves):
//
//   word      written by                                        read by
//   posted    announcer of the block that completes a chunk   proxy
//   freed     proxy                                             watcher of this rank, for its packers
//   arrived   proxy of the gateway                              watchers of all ranks of the island
//   taken     announcer of the block that completes its reading  proxy of the gateway
//   ABORT, LOST  rank or proxy                                  watchers: the call fails
//
// One warp of a grid, the watcher, reads them (a read of the CPU's memory takes 1.3 us) and keeps copies in `copies`.
// From there the last warp of each block copies them into the block's shared memory, where all other warps poll: loads
// of a warp that moves rows wait behind the rows on their way into the SM, for more than 1 us each. Each copy is stored
// with release after the word was loaded with acquire, so a warp that has acquired the last copy reads the data behind
// the word. Bulk loads follow a proxy fence.
//
// `State`, one block of device memory for each rank: everything that counts. Peers of the island write `row_ready`,
// `combine_ready` and `gave_up`, and read `rows`; all else is this rank's. Numbers of rows and chunks are those of the
// streams, and grow from the epoch's
// first one on: kernels advance them at the end of a call, so a captured graph goes on by itself. A call that fails
// after it may have posted a chunk leaves its numbers as they were and sets `broken`: chunks that are under way would
// be taken for those of the next call, so every later call is refused until the next epoch sets numbers above. So does
// one whose rows of counts did not all come. A call that is refused by its counts, as all ranks find alike, moves
// nothing and breaks nothing; nor does a combine with the handle that it leaves, or with one of another view.
//
// Who gives a call up tells the others, whose watchers fail it there: neighbours by `gave_up` (a word for each of the
// last calls), partners by a refusal: a chunk of `kRefusalBytes` without flags, as no call has one, behind the last one
// that can still be sent. That ends the streams, so it is posted once, by a rank that sets `broken`. Ranks that hear of
// it do the same. A rank may hear of it while it ends the call before, which then fails there as well.
//
// A kernel that is killed at any line leaves chunks that are not posted or not taken. No word announces what is not
// there: an announcer counts a record after its stores are complete, or its loads.
//
// What a partner's words and records say is checked before use: a chunk must be as long as the counts say, counts and
// places lie in bounds, expert ids are compared. All waits end (`common/wait.cuh`).
//
// Slots. Each rank chooses which of its slots has the result of a dispatch, or the rows of a combine, and names it to
// its island: in its row of counts (`kRowGrant`), which `grants` of the control block keeps for the call, and in its
// `combine_ready`. Other hosts need not know.
#pragma once
#include "../../common/call.cuh"
#include "../../common/work.cuh"

/// Values of `broken`.
enum Broken : u64 { kIsBroken = 1, kPartnersTold };

enum RowWord : int { kRowSignature = 0, kRowRefusal, kRowTokens, kRowGrant, kRowCounts = 4 };

/// A row's word of what its rank grants: the slot for its result, and above `kHandleShift` the handle of a dispatch
/// that is made again, 0 for none.
constexpr int kHandleShift = 16;

DEVICE u64* state_words(const HostCall& h, int position, u64 offset) {
  return reinterpret_cast<u64*>(h.state[position] + offset);
}
DEVICE u64* state_words(const HostCall& h, u64 offset) { return state_words(h, h.call.rank, offset); }
DEVICE i32* state_counters(const HostCall& h, u64 offset) {
  return reinterpret_cast<i32*>(state_words(h, h.call.rank, offset));
}

/// By position: the slots of the island's ranks for the result of the dispatch in progress.
DEVICE i32* grants_of(const HostCall& h) {
  return reinterpret_cast<i32*>(control_at(h.call, h.call.rank, kControlGrantsOffset));
}

DEVICE const HostRoutes& routes_of(const HostCall& h) { return *reinterpret_cast<const HostRoutes*>(h.routes); }
DEVICE int rank_at(const HostRoutes& routes, int host, int position) {
  return routes.rank_at[host * kMaxLocal + position];
}
DEVICE int my_rank(const HostCall& h) { return rank_at(routes_of(h), h.host, h.call.rank); }

/// The word that announces chunk or row number `chunk`; `epee/link/proxy/words.py`.
DEVICE u64 chunk_word(u64 chunk, u64 num_bytes, u64 flags) { return (chunk + 1) << kChunkSizeBits | num_bytes | flags; }

/// As `must_stop` of `common/call.cuh`, for waits that name ranks of all hosts.
DEVICE bool must_stop(const HostCall& h, u64 tag, u64 start, int rank, u64 want, u64 got, u64 where) {
  const u32 why = why_stop(h.call, tag, start);
  if (!why) return false;
  const FailureCode code = static_cast<FailureCode>(why & 0xFF);
  if (code == kPeerDead) rank = rank_at(routes_of(h), h.host, static_cast<int>(why >> 16));
  if (code) report_failure(h.call, tag, {code, rank, want, got, where});
  return true;
}

/// Fails the call where the proxy of an inlet's page has ended, or its partner is lost.
DEVICE void check_inlet(const HostCall& h, u64 tag, int inlet) {
  const HostRoutes& routes = routes_of(h);
  const Inlet& at = routes.inlets[inlet];
  const u64 reason = ld_relaxed_sys(reinterpret_cast<const u64*>(routes.aborts[at.position]));
  if (reason) report_failure(h.call, tag, {kAborted, rank_at(routes, h.host, at.position), 0, reason, 38});
#pragma unroll 1
  for (int process = 0; process < routes.num_processes; ++process) {
    const u64 lost = ld_relaxed_sys(reinterpret_cast<const u64*>(at.lost) + process * kLineWords);
    if (lost >> at.partner & 1) report_failure(h.call, tag, {kPeerDead, at.rank, 0, lost, 39});
  }
}

/// Waits until `*word == want`, of which rank `rank` is the cause; acquires at system scope. False after a report.
/// `inlet`: of that rank, -1 for a rank of this island.
DEVICE bool wait_word(const HostCall& h, u64 tag, const u64* word, u64 want, int rank, u64 where, int inlet = -1) {
  perhaps_stall(tag, h.call.rank, 2);
  const u64 start = global_time_ns();
  u64 got;
  return bounded_wait<kPollsPerLook>([&] { return (got = ld_acquire_sys(word)) == want; },
                                     [&] {
                                       if (inlet >= 0) check_inlet(h, tag, inlet);
                                       return must_stop(h, tag, start, rank, want, got, where);
                                     });
}
