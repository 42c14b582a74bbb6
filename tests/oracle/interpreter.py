"""Runs blocks. The same code runs them on real workers and in one process; only `call` differs.

In one process values cross by copy, as they do between workers: the oracle clones at each crossing.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

import torch
import torch._dynamo  # seconds, in the first checkpoint of a process otherwise
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.current import current_worker
from tests.oracle import dice
from tests.oracle.places import run_in
from tests.oracle.state import Accumulator, Doubled, State, Stopped

T = TypeVar("T")

STATES: dict[str, State] = {}
"""By worker name; the workers of a process share the dict, never an entry."""

_local: ContextVar[str | None] = ContextVar("the worker that runs, in one process", default=None)


_together: ContextVar[bool] = ContextVar("the tensors of a message cross together", default=False)


def here() -> str:
    return _local.get() or gradwire.get_worker_info().name


def is_local() -> bool:
    return _local.get() is not None


@contextlib.contextmanager
def as_local(worker: str):
    token = _local.set(worker)
    try:
        with dice.of(worker):
            yield
    finally:
        _local.reset(token)


@contextlib.contextmanager
def called(worker: str):
    """In one process, around what a call runs on a worker: saved-tensor hooks do not travel.

    Those of a checkpoint would take over what the callee saves, and nobody would compare versions.
    A program that changes in place what the callee has saved would then get a gradient of two
    different values; between workers that is an error, as it is outside of checkpoints.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with as_local(worker):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def crossing_together(together: bool):
    """In one process, copy what crosses as a worker with `edge_per_message` does."""
    token = _together.set(together)
    try:
        yield
    finally:
        _together.reset(token)


def name(worker: int) -> str:
    return f"local{worker}" if is_local() else f"w{worker}"


def copied(value):
    """What arrives when a value crosses: a tensor that is there twice arrives as one."""
    leaving: dict[int, torch.Tensor] = {}
    _mapped(value, lambda tensor: leaving.setdefault(id(tensor), tensor))
    together = {n: t for n, t in leaving.items() if _together.get() and t.requires_grad}
    alive = dict(zip(together, Together.of([*together.values()]), strict=True))
    arrived = {n: alive[n] if n in alive else _cloned(tensor) for n, tensor in leaving.items()}
    return _mapped(value, lambda tensor: arrived[id(tensor)])


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(tensor.is_inference()), torch.enable_grad():
        return tensor.clone()


def _mapped(value, of_tensor: Callable):
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(v, of_tensor) for v in value])
    if isinstance(value, dict):
        return {k: _mapped(v, of_tensor) for k, v in value.items()}
    return value


class Together(torch.autograd.Function):
    """One node for all the tensors of a message: what one of them needs is run for all."""

    @staticmethod
    def of(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not tensors:
            return ()
        with torch.inference_mode(False), torch.enable_grad():
            return Together.apply(*tensors)

    @staticmethod
    def forward(ctx, *tensors: torch.Tensor):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        wanting = [g for g in gradients if g is not None and g.requires_grad]
        alive = iter(Together.of(wanting) if torch.is_grad_enabled() else wanting)
        return tuple(next(alive) if g is not None and g.requires_grad else g for g in gradients)


# -- crossing: one of these in each world


def call(to: int, function: Callable, *args, how: str = "sync"):
    """Run a function on a worker; a thunk for its result, so that several may be under way."""
    if is_local():
        with called(f"local{to}"):
            result = function(*copied(args))
        # On its own worker a reference gives the value itself, not a copy.
        return lambda: result if how == "remote" and here() == f"local{to}" else copied(result)
    if how == "async":
        return gradwire.rpc_async(f"w{to}", function, args=args).wait
    if how == "remote":
        return gradwire.remote(f"w{to}", function, args=args).to_here
    result = gradwire.rpc_sync(f"w{to}", function, args=args)
    return lambda: result


def in_a_thread(to: int, function: Callable, *args, how: str):
    """Make a call from a thread that has never received anything; wait for it in this one."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run():
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            return gradwire.rpc_sync(f"w{to}", function, args=args)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(contextvars.copy_context().run, run)
    pool.shutdown(wait=False)
    return future.result


def as_this_worker(function: Callable[[], T]) -> Callable[[], T]:
    """Where workers share a process, a thread does not know its worker."""
    worker = current_worker.find()

    def run() -> T:
        with contextlib.nullcontext() if is_known(worker) else worker.scope():
            return function()

    return run


def is_known(worker: object) -> bool:
    return current_worker.maybe_find() is worker


def make_reference(to: int, function: Callable, *args):
    """A reference to what a function returns there."""
    if is_local():
        with called(f"local{to}"):
            return _LocalReference(f"local{to}", function(*copied(args)))
    return gradwire.remote(f"w{to}", function, args=args)


class _LocalReference:
    def __init__(self, worker: str, value) -> None:
        self.worker, self.value = worker, value

    def to_here(self):
        return self.value if here() == self.worker else copied(self.value)

    def call(self, method: str, *args):
        with called(self.worker):
            return copied(getattr(self.value, method)(*copied(args)))


def call_method(reference, method: str, *args):
    if is_local():
        return reference.call(method, *args)
    return getattr(reference.rpc_sync(), method)(*args)


# -- what travels


def run_block(block: list, returned: list[int], arguments):
    """Run a block over what came with it; the values asked for."""
    values = run_steps(block, _flat(arguments))
    return tuple(values[n % len(values)] for n in returned)


def _flat(arguments) -> list[torch.Tensor]:
    if isinstance(arguments, dict):
        return list(arguments.values())
    return list(arguments)


def run_steps(block: list, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    state = STATES[here()]
    values = list(arguments) or [state.parameter * 2]
    go_on(state, values, block)
    return values


def go_on(state: State, values: list, block: list) -> None:
    """Take these steps, with the values that are there."""
    for kind, *details in block:
        STEPS[kind](state, values, *details)


def fail_after(block: list, value: torch.Tensor) -> None:
    run_steps(block, [value])
    raise ValueError(f"raised on purpose with {tuple(value.shape)}")


def ping(times: int, back: int, x: torch.Tensor) -> torch.Tensor:
    """Calls itself on the other worker, in turns."""
    if times == 0:
        return x * STATES[here()].parameter
    return call(back, ping, times - 1, _number(here()), x + 1)() * 2


def _number(worker: str) -> int:
    return int(worker.removeprefix("local").removeprefix("w"))


def take_kept(pick: int) -> torch.Tensor:
    state = STATES[here()]
    return state.kept[pick % len(state.kept)] if state.kept else state.parameter * 1


def use_reference(reference) -> torch.Tensor:
    return reference.to_here() * STATES[here()].parameter


def unshape(kind: str, value: torch.Tensor) -> torch.Tensor:
    """Back to three elements, whatever came."""
    state = STATES[here()]
    match kind:
        case "0-dim":
            return value * state.parameter
        case "empty":
            return torch.cat([value * 2, state.parameter * 1])
        case "non-contiguous":
            return value[:, 0] + value[:, 1] * state.parameter
        case "expanded":
            return value.sum(0) * 2
        case _:
            return value.to_dense() * state.parameter


def shaped(kind: str, x: torch.Tensor) -> torch.Tensor:
    match kind:
        case "0-dim":
            return x.sum()
        case "empty":
            return x[:0]
        case "non-contiguous":
            return torch.stack([x, x * 2]).t()
        case "expanded":
            return x.expand(2, 3)
        case _:
            return x.to_sparse()


# -- the steps


def _operator(state: State, values: list, operator: str, i: int, j: int) -> None:
    values.append(operate(state, values, operator, i, j))


def operate(state: State, values: list, operator: str, i: int, j: int) -> torch.Tensor:
    a, b = values[i % len(values)], values[j % len(values)]
    match operator:
        case "add":
            return a + b
        case "scaled":
            return a * 2 - b
        case "gated":
            return a.clamp(-3, 3) * b
        case "relu":
            return (a - 2).relu() + b
        case "of parameter":
            return a * state.parameter
        case "negated":
            return -a
        case "indexed":
            return a[[2, 0, 1]]
        case _:
            return a.detach() + b


def _function(state: State, values: list, i: int, of_parameter: bool) -> None:
    x = values[i % len(values)]
    values.append(Doubled.apply(state, state.parameter * x if of_parameter else x))


def _stopped(state: State, values: list, i: int) -> None:
    values.append(Stopped.apply(state, values[i % len(values)]))


def _hook(state: State, values: list, kind: str, i: int, j: int) -> None:
    a, b = values[i % len(values)] * 1, values[j % len(values)] * 1
    values.append(a + b)
    if a.grad_fn is None or b.grad_fn is None:
        return
    match kind:
        case "tensor hook":
            a.register_hook(lambda _: state.count("tensor hook"))
        case "node pre hook":
            a.grad_fn.register_prehook(lambda _: state.count("node pre hook"))
        case "node post hook":
            a.grad_fn.register_hook(lambda *_: state.count("node post hook"))
        case _:
            counted = torch.autograd.graph.register_multi_grad_hook(
                [a, b], lambda _: state.count("multi-grad hook")
            )
            state.alive.append(counted)


def _keep(state: State, values: list, i: int) -> None:
    state.kept.append(values[i % len(values)])


def _modify_received(state: State, values: list) -> None:
    if values[0].grad_fn is not None and not values[0].is_inference():
        values[0].mul_(2)


def _call(state: State, values: list, details: dict) -> None:
    picked = [values[n % len(values)] for n in details["arguments"]]
    arguments: object = picked
    match details["shape"]:
        case "twice":
            arguments = picked + picked[:1]
        case "dict":
            arguments = {f"value {n}": v for n, v in enumerate(picked)}
        case "parameter":
            arguments = [*picked, state.parameter]
    modes = {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }

    def run() -> tuple:
        to, block, returned = details["to"], details["block"], details["returned"]
        return call(to, run_block, block, returned, arguments, how=details["how"])()

    with modes[details["mode"]]():
        result = run() if is_local() else run_in(details["place"], as_this_worker(run))
    used = [result[n % len(result)] for n in details["used"]]
    if details["mode"] == "inference_mode":
        used = [v.clone() if v.is_inference() else v for v in used]  # ordinary tensors again
    if not used:
        values.append(values[0] * 1)
        return
    if details["modify"] and used[0].grad_fn is not None:
        used[0].mul_(3)
    values.extend(used)


def _shaped(state: State, values: list, to: int, kind: str, i: int) -> None:
    values.append(call(to, unshape, kind, shaped(kind, values[i % len(values)]))())


def _failing(state: State, values: list, to: int, block: list, i: int) -> None:
    try:
        call(to, fail_after, block, values[i % len(values)])()
    except ValueError as error:
        if "raised on purpose with (3,)" not in str(error):
            raise
        values.append(values[i % len(values)] + 1)


def _recursion(state: State, values: list, to: int, times: int, i: int) -> None:
    values.append(call(to, ping, times, _number(here()), values[i % len(values)])())


def _checkpoint(state: State, values: list, reentrant: bool, block: list, i: int) -> None:
    # In one process the operators of a call inside a checkpoint save the caller's own tensors, so
    # a later change in place is an error; here the callee has copies. Nobody changes this one.
    x = values[i % len(values)].clone()
    worker = here()

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        with as_local(worker) if is_local() else contextlib.nullcontext():
            return run_steps(block, [x])[-1]

    # Without a graph there is nothing to compute again. That may be the forward of a reentrant
    # checkpoint around this one: it must take the same steps as its recomputation.
    if not x.requires_grad or not torch.is_grad_enabled():
        values.append(recomputed(x))
        return
    if state.draws and is_local():
        recomputed = dice.repeated(recomputed)
    preserve = state.draws and not is_local()
    values.append(checkpoint(recomputed, x, use_reentrant=reentrant, preserve_rng_state=preserve))


def _kept(state: State, values: list, to: int, pick: int) -> None:
    values.append(call(to, take_kept, pick)())


def _fan_out(state: State, values: list, branches: list, used: list[int], threads: bool) -> None:
    start = in_a_thread if threads and not is_local() else call
    under_way = [
        start(to, run_block, block, [0, 1], [values[i % len(values)]], how="async")
        for to, block, i in branches
    ]
    results = [value for wait in under_way for value in wait()]
    values.extend(results[n % len(results)] for n in used)


def _reference(state: State, values: list, owner: int, block: list, third: int, i: int) -> None:
    reference = make_reference(owner, last_of_block, block, values[i % len(values)])
    values.append(call(third, use_reference, reference)())


def last_of_block(block: list, value: torch.Tensor) -> torch.Tensor:
    return run_steps(block, [value])[-1]


def _method(state: State, values: list, owner: int, i: int, j: int) -> None:
    reference = make_reference(owner, Accumulator, values[i % len(values)])
    call_method(reference, "add", values[j % len(values)], 2)
    values.append(call_method(reference, "add", values[i % len(values)], 1))


STEPS = {
    "operator": _operator,
    "function": _function,
    "stopped": _stopped,
    "hook": _hook,
    "keep": _keep,
    "modify received": _modify_received,
    "call": _call,
    "shaped": _shaped,
    "failing": _failing,
    "recursion": _recursion,
    "checkpoint": _checkpoint,
    "kept": _kept,
    "fan out": _fan_out,
    "reference": _reference,
    "method": _method,
}
