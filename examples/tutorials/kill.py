"""A job that goes on without a killed rank and takes a new process in its place. Start it with `python`."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import epee

NUM_RANKS, NUM_STEPS = 3, 60


# --8<-- [start:rank]
def run(is_joiner: bool) -> None:
    options = epee.BackendOptions(fault_mode="mask", is_extension=is_joiner)
    dist.init_process_group("epee", pg_options=options)  # a joiner waits here until a member calls recover_ranks
    group, rank = dist.group.WORLD, dist.get_rank()
    # random routing: with room for all rows on one rank no step can end for want of room
    buffer = epee.Buffer(num_experts=6, hidden=64, num_topk=2, max_tokens_per_rank=16, max_recv_rows=NUM_RANKS * 16 * 2)
    state = torch.zeros(2)  # the step and one weight, for a whole model
    if is_joiner:
        dist.broadcast(state, 0)
        print(f"rank {rank}: joins at step {state[0]:.0f} with weight {state[1]:.0f}")
    while state[0] < NUM_STEPS:
        if state[0] == 20 and rank == 1 and not is_joiner:
            os.kill(os.getpid(), signal.SIGKILL)
        if state[0] == 40 and not is_joiner:
            while not group.get_peer_state([1])[0]:  # a collective call: the same answer on all members
                time.sleep(0.05)
            group.recover_ranks([1])  # the next call has the new process
            dist.broadcast(state, 0)
        step(group, buffer, state)
    print(f"rank {rank}: done, weight {state[1]:.0f}, ranks {group.last_contributors()}")
    buffer.close()
    dist.destroy_process_group()


# --8<-- [end:rank]
# --8<-- [start:step]
def step(group: dist.ProcessGroup, buffer: epee.Buffer, state: torch.Tensor) -> None:
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    weights, topk_idx = torch.rand(16, 6).softmax(-1).topk(2)
    while True:
        received = buffer.dispatch(x, topk_idx, weights, layout="expert")
        try:
            combined = buffer.combine(received.x, received.handle)
            break
        except epee.StaleHandleError:  # on all ranks: one was lost before all that are left had begun the combine
            print(f"rank {dist.get_rank()}: dispatches again, in epoch {buffer.epoch}")
    gradient = torch.ones(1)
    dist.all_reduce(gradient, dist.ReduceOp.AVG)  # over the ranks that take part
    state += torch.stack([torch.ones(()), gradient[0]])
    if state[0] in (20, 21, 41):
        lost = combined.lost_weight.sum().item()  # of experts whose rank is lost
        print(
            f"rank {dist.get_rank()} step {state[0]:.0f}: epoch {group.epoch}, got {combined.got.tolist()}, "
            f"weight lost {lost:.1f}"
        )


# --8<-- [end:step]
# --8<-- [start:launcher]
def launch() -> None:
    """Start the ranks, and a new process for each one that is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, so no rank's death ends it
    shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}

    def start(rank: int, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, __file__, *arguments], env=os.environ | shared | {"RANK": str(rank)})

    ranks = [start(rank) for rank in range(NUM_RANKS)]
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if process.poll() == -signal.SIGKILL:
                ranks[rank] = start(rank, "joins")
            elif process.poll():  # an error, not a kill: the job ends
                for other in ranks:
                    other.terminate()
        time.sleep(0.1)
    sys.exit(max(process.returncode for process in ranks))


# --8<-- [end:launcher]
if "RANK" in os.environ:
    run(is_joiner="joins" in sys.argv)
else:
    launch()
