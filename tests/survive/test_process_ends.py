"""However a process ends without `destroy_process_group`, its rank has failed for the others; with it, it has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import Program

VICTIM, NUM_RANKS = 1, 3
ONE_HOST, TWO_HOSTS, ALONE_ON_ITS_HOST = (0, 0, 0), (0, 0, 1), (0, 1, 0)
ENDS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "an exception": "raise ValueError('a bug of the program')",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "destroy": "dist.destroy_process_group(); sys.exit(0)",
}
PROGRAM = """
import json, os, signal, sys, time
from datetime import timedelta
rank, folder, placement = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
if len(set(placement)) > 1:
    host = placement[rank]
    os.environ.update(EPEE_TEST="1", EPEE_HOST_KEY=str(host), EPEE_HOST_IP=f"127.0.77.{1 + host}")
import torch
import torch.distributed as dist
import epee

torch.set_num_threads(1)
SIZES = dict(num_experts=6, hidden=64, num_topk=2, max_tokens_per_rank=16)

def begin(backend="epee", mode="raise"):
    options = {"pg_options": epee.BackendOptions(fault_mode=mode)} if backend == "epee" else {}
    store = f"file://{folder}/store"
    limit = timedelta(seconds=100)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=3, timeout=limit, **options)

def meet():
    open(f"{folder}/done{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/done{other}") for other in (0, 2)):
        time.sleep(0.005)

def say(*words):
    print(json.dumps(words), flush=True)

def tokens():
    weights, experts = torch.rand(16, 6).softmax(-1).topk(2)
    return torch.randn(16, 64, dtype=torch.bfloat16), experts, weights

def recover(call, again):
    try:
        call()
        say("no error")
    except epee.PeerError as error:
        say(type(error).__name__, list(error.ranks))
        say(again())
"""
USES = {
    "collective": """
def main():
    begin()
    x = torch.ones(1)
    dist.all_reduce(x)
    def call():
        dist.all_reduce(x)
        return x.item()
    if rank == 1:
        END
    recover(call, call)
""",
    "message": """
def main():
    begin()
    x = torch.full([1], float(rank))
    dist.barrier()
    if rank == 1:
        END
    def again():
        dist.send(x, 2 - rank) if rank == 0 else dist.recv(x, 2 - rank)
        return x.item()
    recover(lambda: dist.recv(x, 1), again)
""",
    "buffer": """
def main():
    begin()
    buffer = epee.Buffer(**SIZES)
    def step():
        d = buffer.dispatch(*tokens())
        y = buffer.combine_input(d.handle)
        y.copy_(d.x)
        return buffer.combine(y, d.handle).got.tolist()
    def again():
        assert buffer.sync(timeout=50.0).tolist() == [1, 0, 1]
        return step()
    step()
    if rank == 1:
        END
    recover(step, again)
""",
    "latency buffer": """
def main():
    begin()
    buffer = epee.LatencyBuffer(**SIZES)
    def step():
        x, experts, weights = tokens()
        d = buffer.dispatch(x, experts)
        buffer.combine(d.x, d.handle, topk_weights=weights)
        return True
    def again():
        mask = torch.tensor([1, 0, 1], dtype=torch.int32)
        buffer.sync(mask, timeout=50.0)
        return mask.tolist()
    step()
    if rank == 1:
        END
    recover(step, again)
""",
}
USES["buffer on gloo"] = (
    USES["buffer"].replace("begin()", "begin('gloo')").replace("**SIZES", "fault_mode='raise', **SIZES")
)
AGAIN = {
    "collective": lambda: [6.0],
    "message": lambda: [0.0],
    "buffer": lambda: [[1, 0, 1]],
    "buffer on gloo": lambda: [[1, 0, 1]],
    "latency buffer": lambda: [[1, 0, 1]],
}


def ended(use: str, end: str, placement: tuple[int, ...], folder: Path) -> list[list[object]]:
    """Run the ranks as programs of which one ends; return what the two others say."""
    code = PROGRAM + USES[use].replace("END", ENDS[end]) + "main()\nmeet()\n"
    programs = [Program(code, str(rank), str(folder), json.dumps(placement)) for rank in range(NUM_RANKS)]
    said = [program.communicate(timeout=100)[0] for program in programs]
    for program in programs:
        with program:
            pass
    lines = [[json.loads(line) for line in text.splitlines() if line.startswith("[")] for text in said]
    assert lines[VICTIM] == []
    assert all(len(lines[rank]) == 2 for rank in (0, 2)), said
    return [*lines[0], *lines[2]]


CASES = [
    *((end, ONE_HOST) for end in ("SIGKILL", "an exception", "sys.exit", "os._exit")),
    *((end, place) for place in (TWO_HOSTS, ALONE_ON_ITS_HOST) for end in ("an exception", "sys.exit")),
]


@pytest.mark.parametrize(("end", "placement"), CASES)
@pytest.mark.parametrize("use", USES)
def test_a_process_that_ends_without_destroying_its_groups_is_a_failed_rank(
    use: str, end: str, placement: tuple[int, ...], tmp_path: Path
) -> None:
    said = ended(use, end, placement, tmp_path)
    assert said[::2] == [["RankFailedError", [VICTIM]]] * 2
    assert [words[0] for words in said[1::2]] == AGAIN[use]() * 2


@pytest.mark.parametrize("placement", [ONE_HOST, TWO_HOSTS])
@pytest.mark.parametrize("use", USES)
def test_a_process_that_destroys_its_groups_has_left(use: str, placement: tuple[int, ...], tmp_path: Path) -> None:
    said = ended(use, "destroy", placement, tmp_path)
    assert said[::2] == [["PeerError", [VICTIM]]] * 2
    assert [words[0] for words in said[1::2]] == AGAIN[use]() * 2


FINISH = """
begin()
group, x = dist.new_group([0, 1, 2]), torch.ones(100_000)
pending = dist.all_reduce(x, group=group, async_op=True)
dist.broadcast(x, 0)
if rank == 0:
    dist.isend(torch.ones(1), 2)
if rank == 2:
    dist.recv(torch.ones(1), 0)
pending.wait()
dist.all_reduce(x)
if rank == int(sys.argv[4]):
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroys", [-1, 0, 1])
@pytest.mark.parametrize("placement", [ONE_HOST, TWO_HOSTS])
def test_programs_that_end_after_their_last_call_disturb_nobody(
    placement: tuple[int, ...], destroys: int, tmp_path: Path
) -> None:
    args = str(tmp_path), json.dumps(placement), str(destroys)
    programs = [Program(PROGRAM + FINISH, str(rank), *args) for rank in range(NUM_RANKS)]
    said = [program.communicate(timeout=100)[0] for program in programs]
    codes = [program.returncode for program in programs]
    for program in programs:
        with program:
            pass
    warning = "a group over several hosts: its secret goes through the rendezvous store"
    assert [[line for line in text.splitlines() if not line.startswith(warning)] for text in said] == [[]] * NUM_RANKS
    assert codes == [0] * NUM_RANKS
