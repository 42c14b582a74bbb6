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
from tests.oracle.programs import EARLIER, FAILING, INTO_MAP, LATER, ONE_CONTEXT, Act, Program
from tests.oracle.state import DEVICE, State, detached

Gradient = torch.Tensor | None


@dataclass
class Outcome:
    """Everything of an act that must be equal. `gradients` are of x, then of each parameter."""

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


def begin(mapped: bool) -> None:
    """An act begins; its gradients go to a context's map, or stand in `.grad` for it."""
    state = STATES[interpreter.here()]
    state.before = set_aside(state.parameter, mapped)


def harvest(context: int | None, mapped: bool) -> tuple[Gradient, dict]:
    """The gradient of this worker's parameter, from `.grad` or from the context's map, and what
    was counted in this act.
    """
    state = STATES[interpreter.here()]
    gradient, wrong = gathered(state.parameter, state.before, context, mapped)
    counts = dict(state.take_counts())
    if wrong:
        counts[wrong] = 1
    if state.draws:
        counts[f"next draw: {torch.randint(1 << 30, ()).item()}"] = 1
    return gradient, counts


def set_aside(leaf: torch.Tensor, mapped: bool) -> Gradient:
    """The gradient of a leaf now. In one process, `.grad` stands for a map, which is empty."""
    before = leaf.grad
    if mapped and is_local():
        leaf.grad = None
    return before if before is None else before.clone()


def gathered(
    leaf: torch.Tensor, before: Gradient, context: int | None, mapped: bool
) -> tuple[Gradient, str]:
    """The gradient of a leaf after an act, and what is wrong with its `.grad`."""
    if not mapped:
        return leaf.grad if leaf.grad is None else leaf.grad.detach().clone(), ""
    if is_local():
        gradient, leaf.grad = leaf.grad, before
        return gradient, ""
    same = (leaf.grad is None) == (before is None)
    same = same and (before is None or torch.equal(leaf.grad, before))
    wrong = "" if same else f"added beside the map: {leaf.grad}"
    # In an act without a pass, or one that failed at once, this worker may not know the context.
    there = gradwire.get_gradients(context) if context is not None else {}
    return there.get(leaf), wrong


def act_over(picked: list[int] | None, zeroed: bool) -> None:
    """Cut off some of what is kept, or all; drop the gradients, or not."""
    state = STATES[interpreter.here()]
    state.kept = detached(state.kept[-4:], picked)
    if zeroed:
        state.parameter.grad = None


def forget() -> None:
    """The program is over."""
    state = STATES.pop(interpreter.here())
    for opened in state.contexts:
        opened.__exit__(None, None, None)
    # Its leaf's accumulator holds the hooks, which hold the state: a cycle through C++, which no
    # collector sees. What hangs on it would stay.
    state.kept.clear()
    state.alive.clear()


def backward_there(weights: list[int], parts: list[torch.Tensor], retain: bool) -> None:
    """Make the loss on this worker, and differentiate it here, within a served function."""
    sum((part * part).sum() * weight for weight, part in zip(weights, parts, strict=True)).backward(
        retain_graph=retain
    )


def loss_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return sum((part * part).sum() for part in parts)


# -- one world or the other


def run_local(program: Program, together: bool = False) -> list[Outcome]:
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
        return _run(program)


def run_remote(program: Program) -> list[Outcome]:
    """On the worker w0 of a cluster that has as many workers, or more."""
    with finalizers.collecting(program.thresholds):
        return _run(program)


def _run(program: Program) -> list[Outcome]:
    # A reentrant checkpoint adds to a leaf by itself: whether before the rest or after it is the
    # engine's choice between independent nodes, which nobody promises.
    inner_backward = program.adds_by_itself
    for worker in range(program.workers):
        watched = worker in program.leaf_hooks
        call(worker, reset, program.seed, worker, program.draws, watched, not inner_backward)()
    root = Root()
    outcomes: list[Outcome] = []
    try:
        for act in program.acts:
            outcomes.append(_run_act(program, act, root))
            if outcomes[-1].error is not None:
                break  # how far a failed backward came is not promised
    finally:
        root.over()
        for worker in range(program.workers):
            call(worker, forget)()
    return outcomes


class Root:
    """What the root of a program keeps from act to act."""

    def __init__(self) -> None:
        values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        self.x = values.to(DEVICE).requires_grad_()
        self.carried: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.retaining: list[torch.Tensor] = []
        """values that were inputs of a backward, and keep the gradients of later ones too"""

    def over(self) -> None:
        """The program is over."""
        # In a later second order the `.grad` of such a value has a graph that leads to the value:
        # a cycle through C++ that torch never frees, in one process either.
        for value in self.retaining:
            value.grad = None

    def act_over(self, picked: list[int] | None, zeroed: bool) -> None:
        self.carried = detached(self.carried, picked)
        if picked is None:
            self.losses.clear()
        if zeroed:
            self.x.grad = None


def _run_act(program: Program, act: Act, root: Root) -> Outcome:
    mapped = act.mode in INTO_MAP
    for worker in range(program.workers):
        call(worker, begin, mapped)()
    before = set_aside(root.x, mapped)
    values: list[torch.Tensor] = []
    slopes: list[Gradient] = []
    error = None
    with contextlib.ExitStack() as opened:
        context = None
        if program.scope == ONE_CONTEXT and not is_local():
            context = opened.enter_context(gradwire.context())
        try:
            begun_with = [root.x * 1, STATES[name(0)].parameter * root.x, *root.carried]
            values = interpreter.run_steps(act.body, begun_with)
            chosen = [[values[n % len(values)] for n in loss] for loss in act.losses]
            if mapped and context is None and not is_local():
                context = opened.enter_context(gradwire.context())
            slopes = _differentiate(program, act, context, root, values, chosen) or []
        except RuntimeError as raised:
            error = _kind(raised)
        for worker in range(program.workers):
            call(worker, settle)()
        gradients, counts = _harvested(program, act, context, root, before)
        root.carried = [values[n % len(values)].clamp(-9, 9) for n in act.carried if values]
        picked = None if program.scope == ONE_CONTEXT else act.detached
        root.act_over(picked, act.zeroed)
        for worker in range(program.workers):
            call(worker, act_over, picked, act.zeroed)()
    seen = [*values, *(slope for slope in slopes if slope is not None)]
    kept = [tensor.detach().clone() for tensor in seen]  # later acts may add to a gradient
    return Outcome(error, kept, gradients, counts)


def _harvested(
    program: Program, act: Act, context: int | None, root: Root, before: Gradient
) -> tuple[list[Gradient], list[Counter]]:
    mapped = act.mode in INTO_MAP
    gradient, wrong = gathered(root.x, before, context, mapped)
    gradients, counts = [gradient], []
    for worker in range(program.workers):
        gradient, count = call(worker, harvest, context, mapped)()
        gradients.append(gradient)
        # How far a pass that failed had come is not promised.
        counts.append(Counter() if act.mode in FAILING else Counter(count))
    counts[0].update([wrong] if wrong else [])
    return gradients, counts


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


def _differentiate(
    program: Program, act: Act, context: int | None, root: Root, values: list, chosen: list
) -> list[Gradient] | None:
    mode, x, retain = act.mode, root.x, act.retain
    first, second = (loss_of(parts) for parts in chosen)
    if mode == LATER:
        root.losses.append(first)
    if mode == EARLIER and root.losses:
        first = root.losses.pop(act.losses[0][0] % len(root.losses))
    if mode == LATER or not first.requires_grad:
        return None
    if mode in FAILING:
        return _failing(program, context if mode in INTO_MAP else None, x, first, retain)
    if mode in INTO_MAP:
        return _into_map(mode, context, first, retain)
    match mode:
        case "grad" | "grad of a received value":
            received = [] if mode == "grad" else chosen[1]
            wanted = [v for v in {id(v): v for v in received}.values() if v.grad_fn is not None]
            inputs = [x, *wanted]
            return list(torch.autograd.grad(first, inputs, allow_unused=True, retain_graph=retain))
        case "second order":
            return _second_order(first, x, retain)
        case "served backward":
            weights = list(range(1, len(chosen[0]) + 1))
            call(1, backward_there, weights, chosen[0], retain)()
        case "backward into inputs":
            leaves = [x, STATES[name(0)].parameter]
            root.retaining += [value for value in chosen[1] if value.grad_fn is not None]
            return _into_inputs(first, [leaves[n % 2] for n in act.leaves], chosen[1], retain)
        case _:
            _into_grad(mode, first, second, retain)
    return None


def _into_grad(mode: str, first: torch.Tensor, second: torch.Tensor, retain: bool) -> None:
    match mode:
        case "backward" | "loss of an earlier act":
            first.backward(retain_graph=retain)
        case "retain twice":
            first.backward(retain_graph=True)
            first.backward(retain_graph=retain)
        case "twice without retain":
            first.backward()
            first.backward()
        case "two losses":
            first.backward(retain_graph=True)
            if second.requires_grad:
                second.backward(retain_graph=retain)
        case "one of two losses":
            if second.requires_grad:
                second.backward(retain_graph=retain)
        case _:
            raise AssertionError(mode)


def _second_order(loss: torch.Tensor, x: torch.Tensor, retain: bool) -> list[Gradient]:
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True, allow_unused=True)
    if slope is not None and slope.requires_grad:
        (slope * slope).sum().backward(retain_graph=retain)
    return [slope]


def _into_inputs(
    loss: torch.Tensor, leaves: list[torch.Tensor], values: list[torch.Tensor], retain: bool
) -> list[Gradient]:
    """The gradients of some leaves and of received tensors, and of nothing else."""
    inputs = {id(v): v for v in [*leaves, *values] if v.requires_grad}
    if not inputs:
        return []
    loss.backward(inputs=list(inputs.values()), retain_graph=retain)
    with warnings.catch_warnings():  # that some of them are no leaves
        warnings.simplefilter("ignore", UserWarning)
        return [v.grad for v in inputs.values()]


def _failing(
    program: Program, context: int | None, x: torch.Tensor, loss: torch.Tensor, retain: bool
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
    differentiate(retain)
    return [torch.tensor(float(failed))]


def _into_map(mode: str, context: int | None, loss: torch.Tensor, retain: bool) -> None:
    twice = mode == "context map twice"
    if is_local():
        loss.backward(retain_graph=twice or retain)
        if twice:
            loss.backward(retain_graph=retain)
    elif mode == "reference backward":
        gradwire.RRef(loss).backward(context, retain_graph=retain)
    else:
        gradwire.backward(context, [loss], retain_graph=twice or retain)
        if twice:
            gradwire.backward(context, [loss], retain_graph=retain)
