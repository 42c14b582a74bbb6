"""Private names of torch that several layers use, and a check of all that gradwire uses.

They were tried on torch 2.11 to 2.13. A torch that lacks one is refused at import, by name, before
a backward can fail because of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import repeat, starmap
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.autograd import Variable, forward_ad, profiler, profiler_legacy
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.checkpoint import CheckpointFunction

Node = torch.autograd.graph.Node

_NEEDED = (
    "torch._C._current_graph_task_id",
    "torch._C._will_engine_execute_node",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._functions.AccumulateGrad",
    "torch._C._functions.AccumulateGrad._set_sequence_nr",
    "torch._C._functions.UndefinedGrad",
    "torch._C._FunctionBase._set_sequence_nr",
    "torch._C._FunctionBase.dirty_tensors",
    "torch._C._FunctionBase.materialize_grads",
    "torch._C._are_functorch_transforms_active",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    "torch.ops.aten.dropout.default._op_dk",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._functorch.unwrap_if_dead",
    "torch._C._is_any_autocast_enabled",
    "torch._C._is_multithreading_enabled",
    "torch._C._set_multithreading_enabled",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.autograd.Variable._execution_engine.is_checkpoint_valid",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch.autograd.graph.Node._input_metadata",
    "torch.autograd.graph.Node._sequence_nr",
    "torch.autograd.Function._backward_cls",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd._profiler_enabled",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch._C._profiler._ExperimentalConfig",
    "torch.autograd.profiler_legacy._disable_profiler_legacy",
    "torch.autograd.profiler_legacy._enable_profiler_legacy",
    "torch.autograd.profiler_legacy._parse_legacy_records",
    "torch.autograd.profiler_util.EventList._build_tree",
    "torch.Tensor._use_count",
    "torch.Tensor._version",
    # used by rpc, optim and compat
    "torch.UntypedStorage._cdata",
    "torch._C.CompilationUnit",
    "torch._C.Future",
    "torch._C.ScriptFunction",
    "torch._C.ScriptModule",
    "torch._C._storage_Use_Count",
    "torch._C.import_ir_module_from_buffer",
    "torch._foreach_add",
    "torch._foreach_neg",
    "torch._neg_view",
    "torch.jit._builtins._find_builtin",
    "torch.jit._recursive.wrap_cpp_module",
    "torch.jit._state._enabled",
    "torch.jit._state._python_cu",
)


def missing_names() -> list[str]:
    """The private names that this torch does not have."""
    lacking = []
    for path in _NEEDED:
        try:
            attrgetter(path.removeprefix("torch."))(torch)
        except AttributeError:
            lacking.append(path)
    return lacking


if lacking := missing_names():
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(lacking)}; gradwire needs torch 2.11 or newer"
    )

_C: Any = torch._C
_execution_engine: Any = cast(Any, Variable)._execution_engine
_run_backward = partial(_execution_engine.run_backward, allow_unreachable=True)
_profiler_enabled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled

AccumulateGrad: type[Node] = _C._functions.AccumulateGrad
current_run: Callable[[], int] = _C._current_graph_task_id
"""The number of the engine run that executes the calling node; NO_RUN outside of one."""
NO_RUN = -1
will_execute: Callable[[Node], bool] = _C._will_engine_execute_node
"""Whether the current run executes a node, or captures a gradient at it."""
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
"""Whether the current run was started with retain_graph."""
is_inside_transform: Callable[[], bool] = _C._are_functorch_transforms_active
"""Whether this code runs inside vmap, grad or another transform of torch.func."""
when_run_ends: Callable[[Callable[[], None]], None] = _execution_engine.queue_callback
"""Call back after the current run has succeeded, before its `backward()` returns; if it fails, the
engine drops the callback at once.
"""
is_checkpoint_valid: Callable[[], bool] = _execution_engine.is_checkpoint_valid
"""Whether torch lets a reentrant checkpoint run in the current run: not in grad() or
backward(inputs=…), nor in a backward inside these, as it would add to other leaves.
"""


def is_profiled() -> bool:
    """Whether a profiler of torch may see what this thread does. hot: both ends of each call"""
    # One that watches all threads says so to the process, an older one to its own thread only.
    return profiler._is_profiler_enabled or _profiler_enabled()


is_thread_profiled = _profiler_enabled
"""Whether this thread has a profile that is not one of all threads."""
NOTHING: AbstractContextManager[Any] = nullcontext()


def span(form: str, *parts: object) -> AbstractContextManager[Any]:
    """A range with this name in a profile; without one it costs next to nothing."""
    return profiler.record_function(form % parts) if is_profiled() else NOTHING


_legacy: Any = profiler_legacy
_LegacyProfile = profiler_legacy.profile  # compat puts its own in the place of this name
start_legacy_profiler: Callable[[Any], None] = _legacy._enable_profiler_legacy
"""Begin to record this thread, as a config says. A thread has one profile at most."""


def legacy_profiler_config(shapes: bool, memory: bool, flops: bool) -> object:
    """What the legacy profiler of torch records besides times, as it takes it."""
    profile: Any = _LegacyProfile
    return profile(record_shapes=shapes, profile_memory=memory, with_flops=flops).config()


def legacy_events() -> list[FunctionEvent]:
    """End the legacy profile of this thread; what it has recorded."""
    return _legacy._parse_legacy_records(_legacy._disable_profiler_legacy())  # type: ignore[no-any-return]


def set_threaded(enabled: bool) -> bool:
    """Set whether engine runs of this thread use the device threads; returns what it was before."""
    before: bool = _C._is_multithreading_enabled()
    _C._set_multithreading_enabled(enabled)
    return before


def run_engine(
    roots: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...] | None,
    retain_graph: bool,
    create_graph: bool,
) -> None:
    """`torch.autograd.backward`, or with inputs `grad`. hot: their checks exceed a small run"""
    if is_inside_transform():
        torch.autograd.backward(roots)  # raises that it cannot be used there
    _run_backward(
        roots, gradients, retain_graph, create_graph, inputs or (), accumulate_grad=inputs is None
    )


def wrap_runs(
    run: Callable[[Callable[..., Any], Any, Any, Any], Any], callback_queued: Callable[[], None]
) -> None:
    """From now on call `run` for each engine run that Python code starts.

    Its arguments are a function that starts the run, the roots, and the other arguments.
    `callback_queued` is called before Python code queues a callback. This works because all of
    torch's Python code looks up the engine object anew each time. `run_engine` and `when_run_ends`
    do not go through it.
    """
    start = cast(Any, Variable)._execution_engine.run_backward

    class Engine(type(_execution_engine)):  # type: ignore[misc]
        def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return run(start, tensors, args, kwargs)

        def queue_callback(self, callback: Callable[[], None]) -> None:
            callback_queued()
            when_run_ends(callback)

    cast(Any, Variable)._execution_engine = Engine()


raw_stream: Callable[[int], int]
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # if built with CUDA
"""The handle of this thread's current stream on a CUDA device; 0 is the default stream."""


def root_nodes(roots: object) -> list[Node]:
    """The nodes that an engine run from these tensors, or edges of a graph, begins with."""
    if not isinstance(roots, tuple):
        return []  # the engine raises
    nodes = []
    with _C.DisableTorchFunctionSubclass():
        for root in roots:
            is_tensor = isinstance(root, torch.Tensor)
            node = root.grad_fn if is_tensor else getattr(root, "node", None)
            if node is not None:
                nodes.append(node)
    return nodes


sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""A node's place in the engine's queue: of the ready nodes, the highest runs first."""


_make_node: Callable[[], Node] = _C._functions.UndefinedGrad


def advance_sequence_number(least: int) -> int:
    """Advance this thread's counter of nodes to `least`, if it is below; returns where it is.

    It cannot be set: each node that is made takes the next number. This loop runs in C, on nodes
    that belong to no graph. Views of a tensor cost twenty times as much: for a thousand, 5 ms.
    """
    number = sequence_number(_make_node()) + 1
    deque(starmap(_make_node, repeat((), least - number)), maxlen=0)
    return max(number, least)


def set_sequence_number(node: Node, number: int) -> None:
    """Move a node in the engine's queue."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def lift(node: Node, depth: int) -> bool:
    """Move a node above a depth, if it is not; see Note [The order of waiting], graph/walk.py."""
    if node._sequence_nr() > depth:
        return False
    node._set_sequence_nr(depth + 1)  # type: ignore[attr-defined]
    return True


def replica_parameters(sink: Node) -> list[torch.Tensor]:
    """The parameters whose gradients DDP's reducer may write, in the graph or not."""
    replica = cast(Any, sink).ddp_weakref()
    return [] if replica is None else [p for p in replica.parameters() if p.requires_grad]


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these carries a forward-mode tangent."""
    if forward_ad._current_level < 0:
        return False
    dual = cast(Any, forward_ad)
    return any(dual.unpack_dual(tensor).tangent is not None for tensor in tensors)


is_batched: Callable[[torch.Tensor], bool] = _C._functorch.is_legacy_batchedtensor
"""Whether a tensor stands for a batch, as in a backward with `is_grads_batched=True`."""


def wrapped_by_transform(tensors: Sequence[torch.Tensor]) -> int | None:
    """The place of the first tensor that a transform of torch.func has wrapped, if any."""
    wrapped = map(_C._functorch.is_functorch_wrapped_tensor, tensors)
    return next((n for n, is_wrapped in enumerate(wrapped) if is_wrapped), None)


def with_accumulator(leaf: torch.Tensor) -> torch.Tensor:
    """A view of a leaf; while it lives, so does the leaf's accumulator.

    Note [Accumulators and the interpreter's lock]: torch makes a leaf's accumulator when it is
    first needed, under a lock of the leaf. While it holds that lock it takes the GIL, to count one
    more owner of the leaf (torch 2.11 to 2.13). An operator has released the GIL by then, but a
    Function has not: so a Function and an operator that use one leaf in two threads may dead-lock.
    Two operators do not, so an operator makes the accumulator here, before the Function runs.
    """
    return leaf.view_as(leaf) if leaf.layout is torch.strided else leaf.clone()


def accumulator_of(leaf: torch.Tensor) -> Node | None:
    """The node that adds to the gradient of a leaf; None if the leaf requires no gradient."""
    with torch.enable_grad(), _C.DisableTorchFunctionSubclass():
        node = with_accumulator(leaf).grad_fn
        return None if node is None else node.next_functions[0][0]


use_count: Callable[[torch.Tensor], int] = cast(Any, torch.Tensor)._use_count
"""How many references there are to a tensor, of its Python object, of nodes and of operators."""


def holders_of(storage: torch.UntypedStorage) -> int:
    """How many tensors use this storage, plus one for its own Python object."""
    return cast(int, _C._storage_Use_Count(storage._cdata))


def is_over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
    """Whether a tensor uses this storage."""
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def same_over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """A view of `storage` with the layout of `tensor`; for a subclass of Tensor, a clone of it."""
    if type(tensor) is not torch.Tensor:
        return tensor.clone()
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    same.set_(storage, offset, size, stride)
    if tensor.is_conj():
        same = same.conj()
    return torch._neg_view(same) if tensor.is_neg() else same


def backward_class(function: type[torch.autograd.Function]) -> type[Node]:
    """The class of the nodes that a Function makes."""
    return cast(type[Node], cast(Any, function)._backward_cls)


def applying(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its checks. hot: twice for each crossing

    Only for a Function whose inputs after the first are tensors.
    """
    unwrap_if_dead = _C._functorch.unwrap_if_dead
    at_once: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(first: object, *tensors: torch.Tensor) -> Any:  # noqa: ANN401
        if is_inside_transform():
            return cast(Any, function).apply(first, *tensors)
        return at_once(first, *map(unwrap_if_dead, tensors))

    return apply


def named_nodes(function: type[torch.autograd.Function], name: str) -> type[Node]:
    """The nodes of a Function, with this name in `node.name()`, profiles and drawn graphs.

    The engine calls `backward` directly, as torch looks `apply` up for each node: two calls less.
    """
    nodes = backward_class(function)
    nodes.__name__ = nodes.__qualname__ = name
    cast(Any, nodes).apply = function.backward
    return nodes


CHECKPOINT = backward_class(CheckpointFunction)
"""Nodes whose backward runs a backward of its own, over a graph that it makes then."""
DDP_SINK = backward_class(_DDPSink)
"""The node that DDP adds behind a module that may not use all of its parameters."""


def has_modes() -> bool:
    """Whether anomaly mode is on, or autocast for any kind of device. hot: each call and pass"""
    return _C._is_any_autocast_enabled() or torch.is_anomaly_enabled()


def is_recording() -> bool:
    """Whether operators of this thread make nodes now."""
    return is_grad_enabled() and not is_inference_mode_enabled()


@contextmanager
def recording() -> Iterator[None]:
    """A block in which operators make nodes, whatever the mode around it."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


# -- operators that only call other operators, for testing/generators.py

_COMPOSITE = _C.DispatchKey.CompositeImplicitAutograd


def has_composite_kernel(operator: Any) -> bool:  # noqa: ANN401
    """Whether an operator is written in C++ with others, such as `dropout`."""
    return cast(bool, _C._dispatch_has_kernel_for_dispatch_key(operator.name(), _COMPOSITE.name))


def run_composite_kernel(operator: Any, *args: object, **kwargs: object) -> object:  # noqa: ANN401
    """Run the operators that it calls. Not `decompose`, which may be in Python with other ones."""
    return operator._op_dk(_COMPOSITE, *args, **kwargs)


# -- what a node has saved, for pictures of a graph


@cache
def _names_of_saved(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_by(node: Node) -> list[tuple[object, Callable[[Any], torch.Tensor] | None]]:
    """What a node has saved for its backward, not unpacked: pairs of what is kept, and a hook.

    Without a hook that is the tensor itself, or None once the graph was freed. A torch that does
    not tell gives NOT_TOLD.
    """
    found: list[tuple[object, Callable[[Any], torch.Tensor] | None]] = []
    for name in _names_of_saved(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # the graph was freed
            continue
        for each in saved if isinstance(saved, tuple | list) else (saved,):
            kept = getattr(each, "data", NOT_TOLD)
            found.append((kept, getattr(each, "unpack_hook", None)))
    return found


NOT_TOLD = object()
"""Stands for a saved tensor that torch does not show without unpacking it."""


def new_profile() -> torch.profiler.profile:
    """A profile of all threads of this process, not begun."""
    activities = {torch.profiler.ProfilerActivity.CPU}
    if torch.cuda.is_available():
        activities.add(torch.profiler.ProfilerActivity.CUDA)
    config = _C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(
        activities=activities, record_shapes=True, experimental_config=config
    )
