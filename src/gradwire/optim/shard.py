"""Shard: one owner's part of an optimizer: its parameters, and a torch optimizer that steps them.

A step has two halves. `Prepare` computes the new values and the new state without changing the
parameters (step.py), and may fail. `Commit` puts them in place and cannot fail; `Abort` drops them.
So the steps of many shards are committed only when all of them are prepared. They are messages,
not methods that a peer may call, because OptimizerHost checks that the sender started the step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch

from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.current import current_worker
from gradwire.errors import BadMessage, ContextClosed, PeerLost, UsageError
from gradwire.ids import ContextId, StepId, WorkerId, first_of
from gradwire.optim.messages import Abort, Agreed, Commit, PlainOptions, Prepare, StepMessage
from gradwire.optim.parameter_locks import ParameterLocks
from gradwire.optim.step import Pairs, Prepared, Stepper, plain_mode
from gradwire.optim.weight_versions import WeightVersions
from gradwire.options import DEFAULT
from gradwire.rpc.calls.server import CallScope
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Worker

Options = dict[str, Any]
State = dict[int, Any]
Tensors = Iterable[torch.Tensor]
MaybeTensors = list[torch.Tensor | None]
GroupSpec = tuple[int, tuple[int, ...], list[RRef[torch.Tensor]], Options]
"""A group to make: its number, the numbers of its parameters, their references, its options."""


def check_class(cls: object) -> None:
    """Check that it is a subclass of torch.optim.Optimizer."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(
            f"{cls!r:.200} is no optimizer class", hint="pass a class such as torch.optim.Adam"
        )


@expose
@final
class Shard:
    """The parameters of one owner, and the torch optimizer that steps them."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        groups: list[GroupSpec],
        args: tuple[object, ...],
        kwargs: Options,
    ) -> None:
        check_class(cls)  # here too: any peer can call this constructor
        self._here = optimizer_host()
        self._groups: dict[int, dict[int, torch.Tensor]] = {}
        """the parameters here of each group, by the numbers of both"""
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        """parameter -> proxy Parameter that torch's optimizer updates; see step.py"""
        self._prepared: dict[StepId, Prepared] = {}
        made = [self._make_group(group) for group in groups]
        self._optimizer = cast(Any, cls)(made, *args, **kwargs)
        self._prepare_stepping()

    # -- groups

    def _make_group(self, group: GroupSpec) -> dict[str, Any]:
        number, indices, refs, options = group
        parameters = [parameter_of(ref) for ref in refs]
        if not self._stand_ins.keys().isdisjoint(parameters) or len({*parameters}) < len(refs):
            raise UsageError(
                f"some parameters on {self._here.worker.name} appear in more than one place",
                hint="give each parameter once, by one reference",
            )
        stand_ins = [torch.nn.Parameter(p.data, requires_grad=p.requires_grad) for p in parameters]
        self._stand_ins |= zip(parameters, stand_ins, strict=True)
        self._groups[number] = dict(zip(indices, parameters, strict=True))
        return {**options, "params": stand_ins}

    def add_group(self, group: GroupSpec) -> dict[int, Options]:
        """Add a group; returns the options of all groups."""
        try:
            with self._all_locked():
                self._optimizer.add_param_group(self._make_group(group))
                self._prepare_stepping()
        except BaseException:
            self.drop_group(group[0])
            raise
        return self.options()

    def drop_group(self, number: int) -> None:
        """Roll back `add_group` after it failed, here or on another owner."""
        dropped = self._groups.pop(number, {})
        del self._optimizer.param_groups[len(self._groups) :]  # it was the last one
        for parameter in dropped.values():
            self._optimizer.state.pop(self._stand_ins.pop(parameter), None)
        self._prepare_stepping()

    def _prepare_stepping(self) -> None:
        """Compute once what every step needs."""
        self._lock_keys = frozenset(map(id, self._stand_ins))
        self._pairs: Pairs = list(self._stand_ins.items())
        self._stepper = Stepper(self._optimizer, self._stand_ins)
        self._registration = self._here.versions.register(self._stand_ins)

    def defaults(self) -> Options:
        """The default options of a group."""
        return dict(self._optimizer.defaults)

    def options(self) -> dict[int, Options]:
        """The options of each group, by its number."""
        both = zip(self._groups, self._optimizer.param_groups, strict=True)
        return {number: options_in(group) for number, group in both}

    def set_options(self, options: dict[int, Options]) -> None:
        """Set options that are not plain data, and so are not part of a Prepare message."""
        with self._all_locked():
            self._set(options)

    def _set(self, options: Mapping[int, Mapping[str, object]]) -> None:
        for number, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(options[number], params=params)

    # -- a step

    def _prepare(self, message: Prepare, deadline: float) -> bool:
        """Compute the step. False if another holds a parameter lock and `message.wait` is false."""
        step, alone = message.step, message.alone
        locks = self._here.locks
        lock = locks.acquire(step, self._lock_keys, deadline, wait=message.wait)
        if lock is None:
            return False
        try:
            with plain_mode():
                prepared = self._computed(message.context, message.options)
                if alone:
                    self._put_in_place(prepared)
                else:
                    self._prepared[step] = prepared
        except BaseException:
            locks.release(lock)
            raise
        if alone:
            locks.release(lock)
        elif not locks.ready(lock, lambda: self._undo(step)):
            self._undo(step)
            locks.release(lock)
        return True

    def _computed(self, context: ContextId | None, options: PlainOptions | None) -> Prepared:
        pairs = self._pairs
        found = self._here.gradients(self._stand_ins, context)
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            pairs = [pair for pair, each in zip(pairs, found, strict=True) if each is not None]
        if options is not None:
            self._set(options)
        return self._stepper.step(pairs, gradients, is_plain=options is not None)

    def _commit(self, step: StepId) -> bool:
        """Put the prepared step in place. False if it was given up before."""
        lock = self._here.locks.claim(step)
        if lock is None:
            return False
        try:
            with plain_mode():
                self._put_in_place(self._prepared.pop(step))
        finally:
            self._here.locks.release(lock)
        return True

    def _put_in_place(self, prepared: Prepared) -> None:
        apart = self._here.versions.replace(prepared.pairs, self._registration)
        for parameter, stand_in in apart:
            stand_in.data = parameter.data

    def _undo(self, step: StepId) -> None:
        with plain_mode():
            self._stepper.put_back(self._prepared.pop(step))

    # -- what it knows

    def zero_grad(self, set_to_none: bool) -> None:
        """Like torch's zero_grad, for the parameters here."""
        for parameter in self._stand_ins:
            old = parameter.grad
            parameter.grad = None if set_to_none or old is None else torch.zeros_like(old)

    def norms(self, norm_type: float, context: ContextId | None) -> State:
        """The norm of each gradient, by the number of its parameter."""
        norms = self._here.norms(self._stand_ins, norm_type, context)
        return dict(zip(self._numbered(), norms, strict=True))

    def scale(self, coefficient: torch.Tensor, context: ContextId | None) -> None:
        """Scale the gradients in place."""
        self._here.scale(self._stand_ins, coefficient, context)

    def state(self, indices: list[int] | None = None) -> State:
        """A copy of the state of all or some parameters, by number; those without are left out."""
        state = self._optimizer.state
        wanted = {i: s for i, s in self._numbered().items() if indices is None or i in indices}
        with self._all_locked():  # a step may still be dropped, with its changes
            return {i: copy.deepcopy(state[s]) for i, s in wanted.items() if s in state}

    def known(self) -> list[int]:
        """The numbers of the parameters that have a state."""
        return [i for i, s in self._numbered().items() if s in self._optimizer.state]

    def load(self, state: State, options: dict[int, Options]) -> None:
        """Load this state; torch casts it to the parameters' dtypes."""
        numbered = self._numbered()
        mine = {i: value for i, value in state.items() if i in numbered}
        groups = [{**options[n], "params": [*group]} for n, group in self._groups.items()]
        with self._all_locked():
            self._optimizer.load_state_dict({"state": mine, "param_groups": groups})

    def _numbered(self) -> dict[int, torch.Tensor]:
        """The stand-ins by the numbers of their parameters, in the order of `_stand_ins`."""
        return {i: self._stand_ins[p] for each in self._groups.values() for i, p in each.items()}

    @contextmanager
    def _all_locked(self) -> Iterator[None]:
        """A block with all parameters locked, so that no step changes them."""
        here = self._here
        step, deadline = here.next_step(), here.worker.deadline(DEFAULT)
        lock = here.locks.acquire(step, self._lock_keys, deadline, wait=True)
        assert lock is not None
        try:
            yield
        finally:
            here.locks.release(lock)


@final
class OptimizerHost:
    """What the optimizers share that step parameters of one worker; serves the steps of shards."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.versions = WeightVersions()
        self.locks = ParameterLocks(worker.agent.clock)
        self.lost: dict[WorkerId, PeerLost] = {}
        self.stepped = self.failed = 0
        """how many steps that began here have succeeded, and how many have not"""
        self._steps = itertools.count(first_of(worker.directory.myself.incarnation))
        worker.engine.saving = self.versions.hooks
        agent = worker.agent
        agent.kinds.add(Agreed)
        agent.on_peer_lost(self._peer_lost)
        agent.handle(Prepare, self._serve, Lane.USER, lambda message: message.shard)
        agent.handle(Commit, self._serve, Lane.USER)
        agent.handle(Abort, self._serve, Lane.USER)

    def _peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        self.lost[worker] = error
        self.worker.agent.dispatch.service.submit(lambda: self.locks.worker_lost(worker))

    def gradients(self, parameters: Tensors, context: ContextId | None) -> MaybeTensors:
        """The gradient of each, in a context or in `.grad`; None for those without one."""
        if context is None:
            return [parameter.grad for parameter in parameters]
        try:
            find = self.worker.engine.contexts.find(context).gradients.get
        except ContextClosed:
            raise
        except UsageError:  # the context is open, but no call of it came to this worker
            return [None for _ in parameters]
        return [find(parameter) for parameter in parameters]

    def norms(
        self, parameters: Tensors, norm_type: float, context: ContextId | None
    ) -> MaybeTensors:
        """The norm of each gradient; None for those without one."""
        found = self.gradients(parameters, context)
        return [None if g is None else torch.linalg.vector_norm(g, norm_type) for g in found]

    def scale(
        self, parameters: Tensors, coefficient: torch.Tensor, context: ContextId | None
    ) -> None:
        """Scale the gradients in place."""
        for gradient in self.gradients(parameters, context):
            if gradient is not None:
                gradient.mul_(coefficient.to(gradient.device))

    def next_step(self) -> StepId:
        """A new number for a step that this worker asks for."""
        return StepId(self.worker.directory.me.id, next(self._steps))

    def _serve(self, message: StepMessage, _: Payload, source: Source) -> None:
        worker, done = self.worker, True
        # At most the step timeout of this worker, because others wait for the same parameters.
        deadline = min(worker.agent.clock.now() + message.seconds, worker.step_deadline(DEFAULT))
        shard = self._shard(message, source, deadline)
        match message:
            case Prepare():
                with CallScope(worker, None, deadline, makes_graphs=False):
                    done = shard._prepare(message, deadline)
            case Commit():
                done = shard._commit(message.step)
            case Abort():
                self.locks.give_up(message.step)
        worker.agent.answer(source, Agreed(done), deadline=deadline)

    def _shard(self, message: StepMessage, source: Source, deadline: float) -> Shard:
        """The shard of a step; the peer must hold a reference to it, and have started the step."""
        ref, step, asker = message.shard, message.step, source.worker
        if step.worker != asker:
            raise BadMessage(f"w{asker} sent a message for {step}, which is another worker's")
        shard = self.worker.refs.value_for(asker, ref, deadline)
        if not isinstance(shard, Shard):
            raise UsageError(f"{ref} is a {type(shard).__name__}, not a shard of an optimizer")
        return shard


def optimizer_host() -> OptimizerHost:
    """The host of the current worker."""
    return cast(Worker, current_worker.find()).part(OptimizerHost)


def options_in(group: dict[str, Any]) -> Options:
    """The options of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def parameter_of(ref: RRef[torch.Tensor]) -> torch.Tensor:
    """The parameter that a reference stands for, on its owner."""
    value = ref.local_value()
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"{ref} holds a {type(value).__name__}, not a parameter",
            hint="refer to parameters, as in [RRef(p) for p in module.parameters()]",
        )
    if not value.is_leaf:
        raise UsageError(f"{ref} holds a tensor of shape {tuple(value.shape)} that is not a leaf")
    return value
