"""The private parts of torch that the package uses: one module holds them, and each does what is expected of it."""

from __future__ import annotations

import ast
import re
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import epee
from epee import torch_private, untraced
from tests.harness import run_ranks

PACKAGE = Path(epee.__file__).parent
FRAMES = {"_getframe", "f_back", "f_locals", "currentframe", "_current_frames"}
NAME = re.compile(r"torch(\.\w+)+")
OTHERS = {
    "compat/deep_ep/shared/known.py": {"torch.utils._pytree"},  # where a tuple of DeepEP's is registered
    "errors.py": {"frame.f_locals"},  # of a traceback: the interrupted frame is an argument of a signal handler
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of torch, and of stack frames, that a source uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in FRAMES or (NAME.fullmatch(name) and is_private(name)):
                yield name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (name for name in [f"{node.module}.{alias.name}" for alias in node.names] if is_private(name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch") and is_private(alias.name))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = torch._C._cuda_getDevice()", {"torch._C._cuda_getDevice", "torch._C"}),
        ("from torch._C import _cuda_getDevice", {"torch._C._cuda_getDevice"}),
        ("from torch.distributed.distributed_c10d import _world", {"torch.distributed.distributed_c10d._world"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("frame = sys._getframe(1).f_back", {"sys._getframe(1).f_back", "sys._getframe"}),
        ("x = torch.__version__, torch.cuda.current_device()", set()),
        ("from torch.distributed import batch_isend_irecv", set()),
    ],
)
def test_private_names_of_torch_are_found(line: str, found: set[str]) -> None:
    assert set(private_names(line)) == found


def test_one_module_uses_private_names_of_torch_and_reads_stack_frames() -> None:
    sources = {path: set(private_names(path.read_text())) for path in PACKAGE.rglob("*.py")}
    users = {str(path.relative_to(PACKAGE)): names for path, names in sources.items() if names}
    assert users.pop("torch_private.py")
    assert users == OTHERS


def test_this_torch_has_what_the_package_uses() -> None:
    assert torch_private.exclude_from_compiler(lambda: None, "why")
    assert torch_private.metadata_check_of(torch.zeros(2)) is not None
    assert torch_private.EMPTY_STRIDED["cpu"] is not None
    assert torch_private.reinterpret_tensor is not None
    assert len(torch_private.MODE_GUARDS) == 2
    assert issubclass(epee.BackendOptions, torch_private.CBackend.Options)
    assert torch_private.contract() is not None


def test_users_of_a_storage_are_counted() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    before = torch_private.count_storage_users(storage._cdata)
    view = tensor[1:]
    assert torch_private.count_storage_users(storage._cdata) == before + 1
    del view
    assert torch_private.count_storage_users(storage._cdata) == before


def test_gradients_are_divided_in_place() -> None:
    gradients = [torch.full((3,), 6.0), torch.full((2,), 3.0)]
    torch_private.foreach_div(gradients, 3.0)
    assert [gradient.tolist() for gradient in gradients] == [[2.0] * 3, [1.0] * 2]


def test_modes_of_the_thread_are_counted() -> None:
    assert (torch_private.num_dispatch_modes(), torch_private.num_function_modes()) == (0, 0)
    with TorchDispatchMode():
        assert torch_private.num_dispatch_modes() == 1
    with torch.overrides.TorchFunctionMode():
        assert torch_private.num_function_modes() == 1


def test_fake_tensors_are_known() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(torch.zeros(2))


class _Owner:
    """An object whose method calls a function, or itself once more."""

    def call(self, depth: int, function: Any) -> Any:
        return self.call(depth - 1, function) if depth else function()


def test_frames_of_an_object_are_counted_on_this_thread() -> None:
    one, other = _Owner(), _Owner()
    codes = {_Owner.call.__code__}
    counts: list[int] = []

    def count() -> None:
        counts.append(torch_private.count_frames(codes, one))

    count()
    one.call(2, count)
    other.call(2, lambda: one.call(0, count))
    other.call(2, count)
    one.call(0, lambda: _on_a_thread(count))
    assert counts == [0, 3, 1, 0, 0]


def _on_a_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("has_marks", [True, False])
def test_the_module_that_calls_an_untraced_method_is_known(has_marks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_marks:
        monkeypatch.setattr(torch_private, "_compiler", None)

    def wait() -> str:
        return torch_private.calling_module()

    method = untraced.untraced(lambda: wait())
    assert method() == __name__
    call = types.FunctionType(
        (lambda: method()).__code__, {"__name__": torch_private.C10D}, closure=(types.CellType(method),)
    )
    assert call() == torch_private.C10D


def _messages(rank: int, num_ranks: int) -> dict[str, list[Any]]:
    """Exchange messages by torch's functions, and return what their group could see of each caller."""
    kind: Any = type(dist.group.WORLD)
    seen: list[Any] = []

    def watched(method: Any) -> Any:
        def post(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
            made = torch_private.message_caller(tensors[0])
            is_below = made.frame is not None and torch_private.is_below(made.frame, made.depth)
            num_works = len([work for work in torch_private.works_of_batch() if isinstance(work, dist.Work)])
            seen.append((made.is_blocking, len(made.operations), made.position, is_below, num_works))
            return method(group, tensors, *args)

        return post

    kind.send, kind.recv = watched(kind.send), watched(kind.recv)
    sent, got, other = torch.ones(2), torch.empty(2), 1 - rank
    found: dict[str, list[Any]] = {}

    def note(name: str) -> None:
        found[name] = seen[:]
        seen.clear()

    works = [dist.isend(sent, other), dist.irecv(got, other)]
    for work in works:
        work.wait()
    note("asynchronous")
    for call in (dist.send, dist.recv) if rank else (dist.recv, dist.send):
        call(sent if call is dist.send else got, other)
    note("blocking")
    for _ in range(2):  # the second batch is found at the depth of the first
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]):
            work.wait()
    note("batches")
    works = [dist.group.WORLD.send([sent], other, 0), dist.group.WORLD.recv([got], other, 0)]
    for work in works:
        work.wait()
    note("methods")
    return found


def test_the_caller_of_a_message_is_found_on_the_stack() -> None:
    alone = (False, 0, 0, False, 0)
    batch = [(False, 2, 0, True, 0), (False, 2, 1, True, 1)]
    for found in run_ranks(_messages, 2, backend="epee", timeout_s=100):
        assert found == {
            "asynchronous": [alone] * 2,
            "blocking": [(True, 0, 0, False, 0)] * 2,
            "batches": batch * 2,
            "methods": [alone] * 2,
        }
