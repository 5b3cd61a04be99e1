"""A rank is killed in a training; a new process takes its rank, with the step and the weights of the others.

`python examples/restart.py` starts three ranks and is their launcher.
"""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import epee


def train(role: str) -> None:
    options = epee.BackendOptions(fault_mode="mask", is_extension=role == "joiner")
    dist.init_process_group("epee", pg_options=options)  # a joiner waits here until the members take it in
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(8, 1)
    step = hand_over(model, -1 if role == "joiner" else 0)
    while step < 60 or len(group.last_contributors()) < num_ranks:  # the end waits for the lost rank
        if role == "victim" and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model)  # all_reduce of the gradients, over the ranks that are left
        step += 1
        lost = sorted(set(range(num_ranks)) - set(group.last_contributors()))  # the same on every rank
        if lost and all(group.get_peer_state(lost)):  # their new processes are waiting
            group.recover_ranks(lost)
            step = hand_over(model, step)  # from the rank that is furthest to all
    print(f"rank {rank}: done, ranks {group.last_contributors()}, error {(model.weight - 1).abs().max():.4f}")
    dist.destroy_process_group()


def train_step(model: torch.nn.Module) -> None:
    x = torch.randn(32, 8)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)  # over the ranks that are left
        weight.data -= 0.05 * weight.grad
        weight.grad = None
    time.sleep(0.02)  # stands for a larger model


def hand_over(model: torch.nn.Module, step: int) -> int:
    """Give the step and the weights of the rank that is furthest to all; return the step."""
    steps = [torch.tensor([-1]) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step]))
    step, source = max((int(each), rank) for rank, each in enumerate(steps))
    for value in model.state_dict().values():
        dist.broadcast(value, source)
    print(f"rank {dist.get_rank()}: begins at step {step}")
    return step


def launch() -> None:
    """Start three ranks, and a new process for each one that is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives the ranks, as torchrun's
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}

    def start(rank: int, role: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, __file__], env=os.environ | shared | {"RANK": str(rank), "ROLE": role})

    running = {rank: start(rank, "victim" if rank == 1 else "member") for rank in range(3)}
    while running:
        time.sleep(0.1)
        for rank, process in list(running.items()):
            if process.poll() == 0:
                del running[rank]
            elif process.poll() == -signal.SIGKILL:
                print(f"rank {rank} was killed, starting it again", flush=True)
                running[rank] = start(rank, "joiner")
            elif process.poll() is not None:  # an error, not a kill: the job ends
                for other in running.values():
                    other.terminate()
                sys.exit(f"rank {rank} ended with exit code {process.returncode}")


if "RANK" in os.environ:  # a process of the launcher below, or of torchrun
    train(os.environ.get("ROLE", "member"))
else:
    launch()
