"""Parts of torch that are not public, and all reading of stack frames. No other module of the package uses either.

An entry is here because calls would be wrong without it and torch has no public way, or because it saves more than 5 us
of a call. All were tried with torch 2.13 on CPUs and with torch 2.11 for CUDA 13.0 on GPUs;
`tests/test_torch_private.py` tries them with the torch that is installed. Times: torch 2.13, one core.

    entry                   reason                                            where torch lacks it
    exclude_from_compiler   45 us of a call in a compiled function, 2 us of   `untraced` wraps the function
                            others; the public way imports the compiler
    metadata_check_of       7 us of a call with three tensors                 callers compare the metadata themselves
    EMPTY_STRIDED,          4 and 7 us for each tensor that a call makes      public functions
    reinterpret_tensor
    CUDA's current device,  together more than 5 us of a GPU call: torch's    GPU calls fail
    stream, events          public functions make objects
    foreach_div             a kernel for each gradient                        averaging gradients fails
    count_storage_users     correctness: memory is reused once no tensor of   buffers on GPUs fail
                            the program uses it
    modes of the thread     correctness: results are written under modes      no import
                            that would replace the operators
    is_profiling            a range that no profiler records costs more       no import
                            than a launch
    is_fake                 correctness: fake tensors are refused             they are refused at their first copy
    CBackend                correctness: the base of a backend's options      no import
    contract                correctness: FSDP leaves experts alone            a warning names the remedy
    message_caller,         a launch for each message of a batch, and a       each message is launched alone
    is_below                wait for each blocking one
    works_of_batch          correctness: messages of one batch are not        they are ordered, and may time out
                            ordered against each other
    calling_module          correctness: a blocking call that fails has no    -
                            `Work` in the program that could end it
    count_frames            correctness: a signal handler may interrupt a     -
                            call anywhere, so no variable can say whether
                            this thread is inside one (frames of ours)

Only this process's own state is read; a crash leaves nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend

from .errors import expected

# ---- torch's compiler

_compiler: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
MetadataCheck = Callable[..., bool]
MAX_CHECKS = 4  # kinds of calls for which one caller keeps checks: each that does not match costs a call 0.2 us


def exclude_from_compiler(function: Any, why: str) -> bool:
    """Exclude a function, and the functions it calls, from the compiler; False where torch knows no such marks.

    It is marked like one that `torch.compiler.disable` has made: an attribute, which keeps the compiler from tracing
    into it, and a word in its code object that makes the interpreter run it, and all that it calls, unchanged.
    """
    try:
        skip = _compiler._FrameAction.SKIP
        _compiler.set_code_exec_strategy(function.__code__, _compiler._FrameExecStrategy(skip, skip))
    except expected(AttributeError, TypeError):
        return False
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True
    function._torchdynamo_disable_msg = why
    return True


def metadata_check_of(*tensors: Any) -> MetadataCheck | None:
    """Return a check whether as many values are tensors with the metadata of these; None where that cannot be checked
    so.

    Reading the metadata from torch, and comparing it, costs the cpu microseconds a call; torch's compiler guards its
    programs by one function that compares all of it. It is used only where it proves to distinguish tensors, once in a
    process. The metadata is class, dtype, device, shape and strides, whether gradients are required, and the flags of
    lazy operations, inference mode and the like. False may also mean only that the thread has other modes.
    """
    if any(type(tensor) is not torch.Tensor for tensor in tensors) or not _is_right():
        return None
    return _check_of(*tensors)


def _check_of(*tensors: torch.Tensor) -> MetadataCheck | None:
    try:
        check: MetadataCheck = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except expected(AttributeError, TypeError, RuntimeError):
        return None
    return check


@cache
def _is_right() -> bool:
    """Return whether the function of this torch detects all required differences."""
    with torch.inference_mode(False):
        first = torch.zeros(4, 8, dtype=torch.float32, device="cpu")
        wide = torch.zeros(4, 16, dtype=torch.float32, device="cpu")
        check = _check_of(first, first)
        if check is None:
            return False
        others = (first[:3], first[:, :7], wide[:, :8], wide[:, ::2], first.double(), first.to("meta"), None, (first,))
        try:
            negated = torch._neg_view(first)
            return check(first, first.clone()) is True and not any(check(first, other) for other in (*others, negated))
        except expected(AttributeError, TypeError, RuntimeError):
            return False


# ---- tensors

# by type of the current device: makers of uninitialised tensors (size, strides, dtype)
EMPTY_STRIDED = {kind: getattr(_guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
reinterpret_tensor: Any = getattr(_guards, "_reinterpret_tensor", None)  # (tensor, size, strides, offset)
count_storage_users: Callable[[int], int] = torch._C._storage_Use_Count
foreach_div: Callable[[list[torch.Tensor], float], None] = torch._foreach_div_


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of `FakeTensorMode`; wrappers around real ones are none."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# ---- modes of the calling thread

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
MODE_GUARDS: Any = (torch._C._DisableTorchDispatch, torch._C.DisableTorchFunction)  # contexts without such modes

# ---- CUDA; a build without CUDA has none of them

current_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
CudaEvent: Any = getattr(torch._C, "_CudaEventBase", None)


# ---- distributed

CBackend = _Backend


def contract() -> Any:
    """Return the decorator of APIs that exclude each other on a module; raises `ImportError` where torch has none."""
    from torch.distributed._composable.contract import contract as found

    return found()


# ---- stack frames

_TORCH = "torch."  # tensor subclasses call back through other modules
C10D = "torch.distributed.distributed_c10d"
_BETWEEN = ("epee.untraced", "epee.profiling", "torch._dynamo.eval_frame")
_MAX_DEPTH = 24
_SEND, _RECV, _BATCH = (
    getattr(inspect.unwrap(call), "__code__", None) for call in (dist.send, dist.recv, dist.batch_isend_irecv)
)


def count_frames(codes: Collection[CodeType], owner: object) -> int:
    """Return the number of calls on the stack of this thread of methods with these codes, of one object."""
    frame: Any = sys._getframe(1)
    found = 0
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            found += 1
        frame = frame.f_back
    return found


def calling_module() -> str:
    """Return the module that called the untraced method to which the calling function belongs.

    The frames of a call: the function that asks, its method, those between (`profiling.py`, torch's compiler), the
    caller.
    """
    frame = sys._getframe(2).f_back  # the frame above the method
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def works_of_batch() -> list[Any]:
    """Return what the `batch_isend_irecv` on the stack, if there is one, has in its lists so far: its works, too."""
    frame: Any = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_name == "batch_isend_irecv" and frame.f_globals.get("__name__") == C10D
    ):  # by name: a program may have replaced the function of `dist` by one of its own
        frame = frame.f_back
    lists = () if frame is None else [value for value in frame.f_locals.values() if isinstance(value, list)]
    return [work for works in lists for work in works]


class MessageCaller(NamedTuple):
    """The torch call that a message belongs to: a blocking one, an asynchronous one, or a batch.

    torch makes the messages of a `batch_isend_irecv` one by one, and reports neither its begin nor its end; nor does it
    report to a group whether it will wait at once. A call of a group's methods without torch's functions makes an
    asynchronous message.

    Attributes:
        is_blocking: it is waited for at once.
        frame: of torch's function that makes the batch that it belongs to; identifies the batch.
        depth: of that frame, from the caller of `message_caller`.
        operations: of the batch that it belongs to, else empty.
        position: among those.
    """

    is_blocking: bool = False
    frame: Any = None
    operations: Sequence[Any] = ()
    position: int = 0
    depth: int = 0


_BLOCKING, _ALONE = MessageCaller(True), MessageCaller()
_usual = [0]  # depth of the last batch's frame, which is tried first


def is_below(frame: Any, depth: int) -> bool:
    """Whether a frame is at this depth on the stack, counted from the caller."""
    try:
        return sys._getframe(1 + depth) is frame
    except expected(ValueError):  # the stack is not so deep
        return False


def message_caller(tensor: torch.Tensor) -> MessageCaller:
    """Return the caller that makes a message of a tensor, found on the stack."""
    try:
        found = _of_batch(sys._getframe(1 + _usual[0]), _usual[0])
    except expected(ValueError):
        found = None
    if found is not None and found.operations[found.position].tensor is tensor:
        return found
    frame: Any = sys._getframe(1)
    is_torchs = False
    for depth in range(_MAX_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        if code is _SEND or code is _RECV:
            return _BLOCKING
        if code is _BATCH:
            _usual[0] = depth
            return _of_batch(frame, depth) or _ALONE
        module = frame.f_globals.get("__name__", "")
        if module == C10D:
            is_torchs = True
        elif is_torchs and not module.startswith(_TORCH):
            break
        frame = frame.f_back
    return _ALONE


def _of_batch(frame: Any, depth: int) -> MessageCaller | None:
    """Return the message made next by the batch of `frame`. Other versions of torch are not recognised: their messages
    are made one by one, on streams of their own."""
    if frame.f_code is not _BATCH:
        return None
    found = frame.f_locals
    if "reqs" not in found or "p2p_op_list" not in found:
        return None
    operations, position = found["p2p_op_list"], len(found["reqs"])
    return MessageCaller(False, frame, operations, position, depth) if position < len(operations) else None
