"""Runs a whole program in one world, and says what came of it."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

import gradwire
from tests.oracle import dice, finalizers, interpreter, unusual
from tests.oracle.interpreter import STATES, as_local, call, crossing_together, is_local, name
from tests.oracle.programs import FAILING, INTO_MAP, Program
from tests.oracle.state import State

Gradient = torch.Tensor | None


@dataclass
class Outcome:
    """Everything that must be equal. `gradients` are of x, then of each worker's parameter."""

    error: str | None
    values: list[torch.Tensor]
    gradients: list[Gradient]
    counts: list[Counter]

    def largest(self) -> float:
        there = [
            g.abs().max().item()
            for g in [*self.values, *self.gradients]
            if g is not None and g.numel()
        ]
        return max(there, default=0.0)


# -- what the root asks of each worker before and after


def reset(seed: int, worker: int, draws: bool, watched: bool, sums: bool) -> None:
    state = STATES[interpreter.here()] = State(seed, worker, draws=draws)
    if draws:
        dice.seed(interpreter.here(), seed * 16 + worker)
    if watched:
        state.watch_leaf(sums=sums)


def fail(whether: bool) -> None:
    STATES[interpreter.here()].fails = whether


def settle() -> None:
    """Wait until all finalizers of this worker have ended."""
    finalizers.settle(STATES[interpreter.here()])


def harvest(context: int | None) -> tuple[Gradient, dict]:
    """The gradient of this worker's parameter, from `.grad` or from the context's map, and the
    counts.
    """
    state = STATES.pop(interpreter.here())
    gradient = state.parameter.grad
    if context is not None and not interpreter.is_local():
        if gradient is not None:
            state.count(f"added beside the map: {gradient}")
        gradient = gradwire.get_gradients(context).get(state.parameter)
    counts = dict(state.counts)
    if state.draws:
        counts[f"next draw: {torch.randint(1 << 30, ()).item()}"] = 1
    return None if gradient is None else gradient.detach(), counts


def backward_there(weights: list[int], parts: list[torch.Tensor]) -> None:
    """Make the loss on this worker, and differentiate it here, within a served function."""
    sum(
        (part * part).sum() * weight for weight, part in zip(weights, parts, strict=True)
    ).backward()


def loss_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return sum((part * part).sum() for part in parts)


# -- one world or the other


def run_local(program: Program, together: bool = False) -> Outcome:
    one_thread = torch.autograd.set_multithreading_enabled(False)
    workers = [f"local{worker}" for worker in range(program.workers)]
    generators = dice.cast(workers) if program.draws else contextlib.nullcontext()
    with (
        finalizers.not_collecting(),
        generators,
        as_local("local0"),
        crossing_together(together),
        one_thread,
    ):
        return _run(program, None)


def run_remote(program: Program) -> Outcome:
    """On the worker w0 of a cluster that has as many workers, or more."""
    with finalizers.collecting(program.thresholds), gradwire.context() as context:
        return _run(program, context)


def _run(program: Program, context: int | None) -> Outcome:
    # A reentrant checkpoint adds to a leaf by itself: whether before the rest or after it is the
    # engine's choice between independent nodes, which nobody promises.
    inner_backward = program.adds_by_itself
    for worker in range(program.workers):
        watched = worker in program.leaf_hooks
        call(worker, reset, program.seed, worker, program.draws, watched, not inner_backward)()
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    values: list[torch.Tensor] = []
    slopes: list[Gradient] = []
    error = None
    try:
        values = interpreter.run_steps(program.body, [x * 1, STATES[name(0)].parameter * x])
        chosen = [[values[n % len(values)] for n in loss] for loss in program.losses]
        slopes = _differentiate(program, context, x, values, chosen) or []
    except RuntimeError as raised:
        error = _kind(raised)
    for worker in range(program.workers):
        call(worker, settle)()
    mapped = program.mode in INTO_MAP
    gradients: list[Gradient] = [x.grad]
    if mapped and context is not None:
        gradients = [gradwire.get_gradients(context).get(x)]
    counts = []
    for worker in range(program.workers):
        gradient, count = call(worker, harvest, context if mapped else None)()
        gradients.append(gradient)
        # How far a pass that failed had come is not promised.
        counts.append(Counter() if program.mode in FAILING else Counter(count))
    kept = [value.detach() for value in values] + [g.detach() for g in slopes if g is not None]
    return Outcome(error, kept, [g if g is None else g.detach() for g in gradients], counts)


_ERRORS = [
    "second time",
    "modified by an inplace operation",
    "torch.utils.checkpoint is incompatible with .grad()",
    "this checkpoint() is not necessary",
    "Inference tensors cannot be saved for backward",
]


def _kind(error: RuntimeError) -> str:
    """What went wrong, in words that both worlds share."""
    for part in _ERRORS:
        if part in str(error):
            return part
    raise error


def _differentiate(program: Program, context, x, values, chosen) -> list[Gradient] | None:
    mode = program.mode
    first, second = (loss_of(parts) for parts in chosen)
    if not first.requires_grad:
        return None
    match mode:
        case "grad":
            return list(torch.autograd.grad(first, [x], allow_unused=True))
        case "grad of a received value":
            wanted = [v for v in {id(v): v for v in chosen[1]}.values() if v.grad_fn is not None]
            return list(torch.autograd.grad(first, [x, *wanted], allow_unused=True))
        case "second order":
            return _second_order(first, x)
        case "served backward":
            weights = list(range(1, len(chosen[0]) + 1))
            call(1, backward_there, weights, chosen[0])()
        case "backward into inputs":
            leaves = [x, STATES[name(0)].parameter]
            return _into_inputs(first, [leaves[n % 2] for n in program.leaves], chosen[1])
        case _ if mode in FAILING:
            return _failing(program, context if mode in INTO_MAP else None, x, first)
        case _ if mode in INTO_MAP:
            _into_map(mode, context, first)
        case _:
            _into_grad(mode, first, second)
    return None


def _into_grad(mode: str, first: torch.Tensor, second: torch.Tensor) -> None:
    match mode:
        case "backward":
            first.backward()
        case "retain twice":
            first.backward(retain_graph=True)
            first.backward()
        case "twice without retain":
            first.backward()
            first.backward()
        case "two losses":
            first.backward(retain_graph=True)
            if second.requires_grad:
                second.backward()
        case "one of two losses":
            if second.requires_grad:
                second.backward()
        case _:
            raise AssertionError(mode)


def _second_order(loss: torch.Tensor, x: torch.Tensor) -> list[Gradient]:
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True, allow_unused=True)
    if slope is not None and slope.requires_grad:
        (slope * slope).sum().backward()
    return [slope]


def _into_inputs(
    loss: torch.Tensor, leaves: list[torch.Tensor], values: list[torch.Tensor]
) -> list[Gradient]:
    """The gradients of some leaves and of received tensors, and of nothing else."""
    inputs = {id(v): v for v in [*leaves, *values] if v.requires_grad}
    if not inputs:
        return []
    loss.backward(inputs=list(inputs.values()))
    with warnings.catch_warnings():  # that some of them are no leaves
        warnings.simplefilter("ignore", UserWarning)
        return [v.grad for v in inputs.values()]


def _failing(
    program: Program, context: int | None, x: torch.Tensor, loss: torch.Tensor
) -> list[Gradient]:
    """A pass, one that fails and leaves nothing, and one more."""
    # A loss that never left this worker is torch's own, which leaves how far it came.
    loss = loss + call(1, unusual.times_parameter, x)().sum()

    def differentiate(retain_graph: bool) -> None:
        if context is None:
            loss.backward(retain_graph=retain_graph)
        else:
            gradwire.backward(context, [loss], retain_graph=retain_graph)

    def tell(fails: bool) -> None:
        for worker in range(program.workers):
            call(worker, fail, fails)()

    differentiate(True)
    tell(True)
    failed = False
    # What a failed pass has added is put back on all workers but its root, which is as torch is.
    owners = range(program.workers if is_local() else 1)
    leaves = [x, *(STATES[name(n)].parameter for n in owners)]
    before = [leaf.grad if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    try:
        differentiate(True)
    except RuntimeError as error:
        if "a fuse has blown" not in str(error):
            raise
        failed = True
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
    tell(False)
    differentiate(False)
    return [torch.tensor(float(failed))]


def _into_map(mode: str, context: int | None, loss: torch.Tensor) -> None:
    twice = mode == "context map twice"
    if context is None:
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
    elif mode == "reference backward":
        gradwire.RRef(loss).backward(context)
    else:
        gradwire.backward(context, [loss], retain_graph=twice)
        if twice:
            gradwire.backward(context, [loss])
