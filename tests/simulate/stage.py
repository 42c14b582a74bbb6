"""Plays scripts in a world and checks each step as it ends: values, gradients, errors, times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

import gradwire
from gradwire.autograd.graph.context import Context
from gradwire.errors import GradwireError
from tests.simulate import programs
from tests.simulate.faults import Nemesis
from tests.simulate.programs import TO_GRAD, TO_MAP, Script, Step
from tests.simulate.world import Incarnation, World

Outs = list[torch.Tensor]  # what the calls of a step gave
Gradient = torch.Tensor | None
Gradients = dict[str, Gradient]  # what a step gives in one process, by the names of the parts

_SLACK_SECONDS = 0.5
_UNDO_SECONDS = 10.0
"""How long the others may take to undo a failed pass; see autograd/backward/coordinator.py."""


@dataclass(slots=True)
class MadeParameter:
    """A part that was made, where, and what its `.grad` must be."""

    p: torch.Tensor  # and not the part itself, which ends with the last reference to it
    incarnation: Incarnation
    grad: Gradient = None
    root: Incarnation | None = None  # who differentiates into it
    possible: Sequence[Gradient] = (None,)
    """what `.grad` was before the last step, and is after each pass of it: its root may crash"""
    is_in_doubt: bool = False
    """a pass failed whose root lives there: `.grad` is as a failed local backward leaves it"""


@final
class StepRun:
    """Plays the scripts of one history."""

    def __init__(self, world: World, nemesis: Nemesis) -> None:
        self._world, self._nemesis = world, nemesis
        self.parts: dict[str, MadeParameter] = {}
        self.executed: Counter[int] = Counter()
        self.errors: list[str] = []  # of the steps that failed
        self.violations: list[str] = []

    # -- what parts say

    def made(self, name: str, p: torch.Tensor) -> None:
        """A part with this parameter was made where the thread that asks runs."""
        incarnation = self._world.scheduler.me().process
        assert isinstance(incarnation, Incarnation)
        if name in self.parts:
            self.violate("I8", f"{name} was made twice")
        self.parts[name] = MadeParameter(p, incarnation)

    def ran(self, ticket: int) -> None:
        """A call was executed."""
        self.executed[ticket] += 1
        if self.executed[ticket] > 1:
            self.violate("I8", f"call {ticket} was executed {self.executed[ticket]} times")

    def violate(self, invariant: str, text: str) -> None:
        """A promise was broken, unless this is a thread whose worker is gone."""
        if self._world.scheduler.is_closed:
            return
        self.violations.append(f"{invariant}: {text}")
        self._world.note(f"!!! {invariant}", "", text)

    # -- playing

    def play(self, script: Script, name: str) -> None:
        """All steps; after an error the parts are made anew, as their worker may be."""
        scheduler = self._world.scheduler
        parts: list[Any] | None = None
        tag = name
        last: Outs | None = None
        for n, step in enumerate(script.steps):
            error: str | None = None
            try:
                if parts is None:
                    tag = f"{name}.{n}"
                    seconds = len(script.places) * self._world.options.timeouts.call
                    with self._within("remote()", seconds):
                        parts = programs.make_parts(script, tag)
                last = self._step(script, n, parts, tag, last if step.uses_last else None)
            except GradwireError as raised:
                error = f"{type(raised).__name__}: {raised}"
                self._check_error(error)
                self.errors.append(error)
                parts = last = None
            self._world.counts["good steps" if error is None else "failed steps"] += 1
            first_line = (error or "good").partition("\n")[0]
            self._world.note("step", script.root, f"{n} of {name}: {first_line}")
            scheduler.block([], scheduler.now + scheduler.random.choice((0.0, 0.05, 1.0)))

    def _step(self, script: Script, n: int, parts: list[Any], tag: str, last: Outs | None) -> Outs:
        """One step, whose loss depends on what the `last` one gave, if that is given.

        Returns what its calls gave whose graph stays when its context ends.
        """
        step, timeouts = script.steps[n], self._world.options.timeouts
        expected = programs.alone(script, step, None if last is None else script.steps[n - 1])
        x = torch.tensor(step.x, dtype=torch.float64, requires_grad=True)
        h, calls = x * 2, programs.plan(step.calls, parts)
        before = step.calls_before_context()
        # remote() and to_here() of each call have a deadline each
        with self._within("forward", 2 * before * timeouts.call):
            stays = programs.called(h, calls[:before])
        with ExitStack() as scope:
            context = None
            if step.scope != programs.NOWHERE:
                context = scope.enter_context(gradwire.context())
            with self._within("forward in a context", 2 * (len(calls) - before) * timeouts.call):
                loss = programs.loss_of(
                    x, [*stays, *programs.called(h, calls[before:]), *(last or ())]
                )
            if not torch.equal(loss.detach(), expected.loss):
                self.violate("I1", f"loss {loss.item()} and not {expected.loss.item()}")
            gradients = {f"{tag}.{i}": gradient for i, gradient in enumerate(expected.parts)}
            self._begins(script, step, gradients)
            is_needed = n + 1 < len(script.steps) and script.steps[n + 1].uses_last
            try:
                with self._within("backward", step.times * timeouts.backward + _UNDO_SECONDS):
                    got = _differentiate(step, context, loss, x, keep=is_needed)
            except GradwireError:
                self._failed(script, step, context, gradients)
                raise
            self._same("I1", "the gradient of the input", got, expected.x)
            self._succeeded(step, context, gradients)
        return stays

    # -- checking

    def _alive(self, names: Iterable[str]) -> list[tuple[str, MadeParameter]]:
        made = [(name, self.parts[name]) for name in names if name in self.parts]
        return [(name, part) for name, part in made if not part.incarnation.is_dead]

    def _begins(self, script: Script, step: Step, gradients: Gradients) -> None:
        for name, made in self._alive(gradients):
            made.root = self._world.incarnations[script.root]
            gradient = gradients[name]
            if step.way == TO_GRAD and gradient is not None:
                each, times = gradient / step.times, range(1, step.times + 1)
                made.possible = [made.grad, *(_plus(made.grad, each * n) for n in times)]

    def _succeeded(self, step: Step, context: int | None, gradients: Gradients) -> None:
        for name, made in self._alive(gradients):
            gradient = gradients[name]
            if step.way == TO_MAP:
                known = _maybe_context(made.incarnation, context)
                if known is not None:
                    found = known.gradients.get(made.p)
                    self._same("I1", f"the map's gradient of {name}", found, gradient)
            if step.way == TO_GRAD and gradient is not None:
                made.grad = _plus(made.grad, gradient)
            if not made.is_in_doubt:
                self._same("I1", f".grad of {name}", made.p.grad, made.grad)

    def _failed(
        self, script: Script, step: Step, context: int | None, names: Iterable[str]
    ) -> None:
        """Nothing was committed, on the workers that could hear of the failure."""
        for name, made in self._alive(names):
            place = made.incarnation.name
            if step.way == TO_GRAD and (place == script.root or step.times > 1):
                made.is_in_doubt = True  # as after a failed local backward; or half of two passes
            if place in self._nemesis.victims or script.root in self._nemesis.victims:
                continue  # it may hear of it later; looked at in the end
            self.check_part(name)
            known = _maybe_context(made.incarnation, context)
            if known is not None and known.gradients.get(made.p) is not None:
                self.violate("I5", f"the map keeps a gradient of {name} from a failed pass")

    def check_part(self, name: str) -> None:
        """Its `.grad` is what the good passes gave.

        If its root was lost in a pass nobody knows how that ended, but it has ended one way.
        """
        made = self.parts[name]
        if made.is_in_doubt or made.incarnation.is_dead:
            return
        if made.root is not None:
            link = self._world.network.link(made.root.name, made.incarnation.name)
            if link.is_cut or link.is_stalled:
                return  # how the last pass ended may not have been heard
            if made.root.is_dead and _values(made.p.grad) in map(_values, made.possible):
                return
        self._same("I5", f".grad of {name}", made.p.grad, made.grad)

    def _check_error(self, error: str) -> None:
        victims = self._nemesis.victims
        if not victims:
            self.violate("I2", f"an error without a fault: {error}")
        elif "Timeout" in error.partition(":")[0]:
            self._world.counts["timeouts"] += 1  # it names whom it waited for, who waited too
            if not self._nemesis.may_be_silent:
                self.violate("I3", f"a crash was noticed by a deadline only: {error}")
        elif not any(re.search(rf"(?<![\w/]){name}(?![\w#])", error) for name in victims):
            self.violate("I2", f"names none of {', '.join(sorted(victims))}: {error}")

    def _same(self, invariant: str, what: str, got: Gradient, expected: Gradient) -> None:
        if _values(got) != _values(expected):
            self.violate(invariant, f"{what} is {_values(got)} and not {_values(expected)}")

    @contextmanager
    def _within(self, what: str, seconds: float) -> Iterator[None]:
        began = self._world.scheduler.now
        try:
            yield
        finally:
            took = self._world.scheduler.now - began
            if took > seconds + _SLACK_SECONDS:
                self.violate("I3", f"{what} took {took:.3f} s, at most {seconds:g} were allowed")


def _differentiate(
    step: Step, context: int | None, loss: torch.Tensor, x: torch.Tensor, *, keep: bool
) -> Gradient:
    """The gradient of the input; `keep` the graph."""
    if step.way == TO_MAP:
        assert context is not None
        gradwire.backward(context, [loss], retain_graph=keep)
        return gradwire.get_gradients(context).get(x)
    if step.way == programs.OF_INPUT:
        return torch.autograd.grad(loss, [x], retain_graph=keep)[0]
    for n in range(step.times):
        loss.backward(retain_graph=keep or n + 1 < step.times)  # type: ignore[no-untyped-call]
    return x.grad


def _maybe_context(incarnation: Incarnation, id: int | None) -> Context | None:
    """The context there; a worker may serve calls before it has joined."""
    if id is None or incarnation.worker is None:
        return None
    return incarnation.worker.engine.contexts.maybe(id)


def _plus(old: Gradient, more: torch.Tensor) -> torch.Tensor:
    return more if old is None else old + more


def _values(gradient: Gradient) -> list[float] | None:
    return None if gradient is None else gradient.tolist()
