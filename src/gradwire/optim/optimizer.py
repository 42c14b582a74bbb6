"""DistributedOptimizer: a torch optimizer over parameters that live on many workers.

A shard on each owner of parameters does the arithmetic (shard.py). This file knows which parameter
is where and the parameter groups. All shards step or none, by a two-phase commit:

    prepare   all owners at once compute the step, without changing the parameters
    commit    one message to each, once all are prepared; abort, if one has failed

A single owner does both at once. A saved state is gathered, which is torch's form, or by owner.

Note [Locks on many workers]: a prepared step locks its parameters on each owner until it ends. Two
steps over the same owners could each hold a lock that the other waits for. So first all owners are
asked at once, and none waits. If one of them is busy, the step is aborted everywhere, and then the
owners are asked again one by one, in the order of their ids, and wait. A step that waits then holds
locks only on owners with lower ids, so there is no deadlock.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from gradwire.errors import ArgumentTypeError, UsageError
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.clip import ask_owners, by_owner, check_references, norm_and_scale
from gradwire.optim.shard import GroupSpec, Options, Shard, check_class, optimizer_host, options_in
from gradwire.optim.step import seen_by_hooks
from gradwire.optim.two_phase_commit import Answers, TwoPhaseCommit, ask
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.api import remote
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.rref import RRef

Ref = RRef[torch.Tensor]
StateDict = dict[str, Any]
Groups = list[dict[str, Any]]


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps parameters that live on any workers with one `torch.optim` class.

    `DistributedOptimizer(cls, params_rref, *args, **kwargs)` takes references to parameters, or
    groups of them, and the arguments of the class. `step()` uses the gradients in `.grad`,
    `step(context_id)` those of `backward(context_id, …)`. A step is all or nothing (StepFailed).

    Schedulers take it, and `param_groups` may be changed at any time: what is in it counts at the
    next step, on all workers.

    >>> optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=1e-3)
    >>> loss_of(batch).backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[Ref] | Iterable[dict[str, Any]],
        *args: object,
        **kwargs: object,
    ) -> None:
        check_class(optimizer_class)
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{optimizer_class.__name__} needs a closure, which cannot be called from many "
                "workers",
                hint="use a class whose step() needs gradients only",
            )
        if isinstance(params_rref, RRef):
            raise ArgumentTypeError(
                "params_rref is one reference, not a list of them", hint="pass [rref]"
            )
        self._here = optimizer_host()
        self._cls, self._args, self._kwargs = optimizer_class, args, dict(kwargs)
        self._shards: dict[WorkerId, RRef[Shard]] = {}
        self._is_made = False
        super().__init__(cast(Any, params_rref), {})
        owners = sorted({ref.owner().id for ref in _refs_in(self.param_groups)})
        self._shards = {owner: self._new_shard(owner, self.param_groups) for owner in owners}
        self._add_defaults(self._ask_all("options").values())
        self.defaults = self._shards[owners[0]].rpc_sync().defaults()
        self.state = cast(Any, _State(self._shards, self.param_groups))
        self._is_made = True

    # -- a step

    @seen_by_hooks
    def step(  # type: ignore[override]
        self,
        context_id: ContextId | None = None,
        closure: Callable[[], object] | None = None,
        *,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """Step all parameters that have a gradient in `.grad`, or in the context; or none of them.

        The gradients stay as they are: `zero_grad` clears `.grad`, as in torch, and those of a
        context end with it. A step ends within `timeout` seconds, by default `Timeouts(step=…)`.
        """
        if closure is not None or callable(context_id):
            raise UsageError(
                "DistributedOptimizer.step() takes no closure",
                hint="compute the loss and its gradients first, then call step()",
            )
        if context_id is not None:
            self._here.worker.engine.contexts.find(context_id)
        elif self._here.worker.engine.only_in_contexts:
            raise ArgumentTypeError(
                "DistributedOptimizer.step() missing 1 required positional argument: 'context_id'",
                hint="with torch's API gradients are in contexts: pass the id of one",
            )
        events = self._here.worker.events
        began = 0.0 if (record := events.record) is None else events.now()
        TwoPhaseCommit(self._here, self._shards, context_id, self._options(), timeout).run()
        if record is not None:
            record("step", began, "", None, f"{len(self._shards)} workers")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `.grad` on all workers. The gradients of a context end with the context."""
        self._ask_all("zero_grad", set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        context_id: ContextId | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all parameters together; see `gradwire.clip_grad_norm_`."""
        parts = self._ask_all("norms", norm_type, context_id).values()
        norms = {n: norm for part in parts for n, norm in part.items()}
        in_order = [norms[n] for n in sorted(norms)]
        total, coefficient = norm_and_scale(in_order, max_norm, norm_type, error_if_nonfinite)
        if coefficient is not None:
            self._ask_all("scale", coefficient, context_id)
        return total

    # -- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of references; it may have new owners."""
        group = dict(param_group)
        if isinstance(group["params"], set | frozenset):
            raise UsageError("the order of a set is not the same in each run", hint="pass a list")
        is_one = isinstance(group["params"], RRef)
        refs = group["params"] = [group["params"]] if is_one else list(group["params"])
        check_references(refs)
        if set(refs) & set(_refs_in(self.param_groups)) or len(set(refs)) < len(refs):
            raise UsageError("a reference appears in more than one place", hint="give it once")
        self.param_groups.append(group)
        if self._is_made:
            try:
                self._add_defaults(self._extend(group).values())
            except BaseException:
                self.param_groups.pop()
                raise

    def _extend(self, group: dict[str, Any]) -> dict[WorkerId, dict[int, Options]]:
        """Add the last group on its owners; returns the options that each of them has then."""
        number = len(self.param_groups) - 1
        owners = by_owner(group["params"])
        old = {owner: self._shards[owner] for owner in owners if owner in self._shards}
        new = {o: self._new_shard(o, [group], number) for o in owners if o not in self._shards}
        try:
            fresh = {owner: shard.rpc_sync().options() for owner, shard in new.items()}
            learned = _checked(ask(old, "add_group", lambda o: (self._share(o, group, number),)))
        except Exception:
            ask(old, "drop_group", lambda _: (number,))
            raise
        self._shards.update(new)
        return learned | fresh

    def _new_shard(self, owner: WorkerId, groups: Groups, first: int = 0) -> RRef[Shard]:
        shares = [self._share(owner, group, first + n) for n, group in enumerate(groups)]
        mine = [share for share in shares if share[1]]
        with torch.no_grad():
            return remote(owner, Shard, args=(self._cls, mine, self._args, self._kwargs))

    def _share(self, owner: WorkerId, group: dict[str, Any], number: int) -> GroupSpec:
        """One owner's part of a group, with the numbers of its parameters over all groups."""
        before = sum(len(each["params"]) for each in self.param_groups[:number])
        places = by_owner(group["params"]).get(owner, [])
        indices = tuple(before + n for n in places)
        return number, indices, [group["params"][n] for n in places], options_in(group)

    def _add_defaults(self, answers: Iterable[dict[int, Options]]) -> None:
        """Add to the groups the default options that the class has set on the owners."""
        for options in answers:
            for number, learned in options.items():
                for key, value in learned.items():
                    self.param_groups[number].setdefault(key, value)

    def _options(self) -> dict[int, Options]:
        return {n: options_in(group) for n, group in enumerate(self.param_groups)}

    # -- state

    def state_dict(self, *, sharded_by_owner: bool = False) -> StateDict:
        """The state to save, in torch's form: parameters by their number over all workers.

        With `sharded_by_owner` the state of each owner stays apart, under the owner's name.
        """
        parts, numbers = self._ask_all("state"), itertools.count()
        groups = [
            copy.deepcopy({**group, "params": [next(numbers) for _ in group["params"]]})
            for group in self.param_groups
        ]
        if sharded_by_owner:
            directory = self._here.worker.directory
            shards = {directory.name(owner): part for owner, part in parts.items()}
            return {"shards": shards, "param_groups": groups}
        state = {n: value for part in parts.values() for n, value in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a saved state of either form, even if parameters are on other workers now."""
        groups, theirs = self.param_groups, state_dict["param_groups"]
        if len(theirs) != len(groups):
            raise ValueError(
                f"loaded state dict has {len(theirs)} parameter groups, this optimizer "
                f"{len(groups)}"
            )
        for n, (their, mine) in enumerate(zip(theirs, groups, strict=True)):
            if len(their["params"]) != len(mine["params"]):
                raise ValueError(
                    f"parameter group {n} of the loaded state dict has {len(their['params'])} "
                    f"parameters, that of this optimizer {len(mine['params'])}"
                )
        parts = state_dict["shards"].values() if "shards" in state_dict else [state_dict["state"]]
        place = {number: n for n, number in enumerate(_refs_in(theirs))}
        state = {place[number]: value for part in parts for number, value in part.items()}
        for mine, saved in zip(groups, copy.deepcopy(theirs), strict=True):
            refs = mine["params"]
            mine.clear()
            mine.update({**self.defaults, **saved}, params=refs)  # an old one may lack some
        owned, options = by_owner(_refs_in(groups)), self._options()

        def share(owner: WorkerId) -> tuple[dict[int, Any], dict[int, Options]]:
            return {n: state[n] for n in owned.get(owner, ()) if n in state}, options

        _checked(ask(self._shards, "load", share))

    def checkpoint(self) -> StateDict:
        """All that is needed to resume: the values of the parameters, and `state_dict()`."""
        values = ask_owners(_refs_in(self.param_groups), values_of)
        return {"parameters": values, **self.state_dict()}

    def restore(self, checkpoint: StateDict) -> None:
        """Load what `checkpoint()` saved, even into new parameters on other workers.

        Not all or nothing: if a worker is lost during it, restore again.
        """
        refs, saved = _refs_in(self.param_groups), checkpoint.get("parameters")
        if saved is None:
            raise UsageError(
                "this is not a checkpoint: it has no values of parameters",
                hint="checkpoint() makes one; load_state_dict() loads what state_dict() returns",
            )
        if len(saved) != len(refs):
            raise ValueError(
                f"the checkpoint has {len(saved)} parameters, this optimizer {len(refs)}"
            )
        ask_owners(refs, set_values, values=saved)
        self.load_state_dict(checkpoint)

    def _ask_all(self, method: str, *args: object) -> Answers:
        return _checked(ask(self._shards, method, lambda _: args))


class _State(Mapping[Ref, dict[str, Any]]):
    """The state of each parameter, by its reference; each lookup asks its owner."""

    def __init__(self, shards: dict[WorkerId, RRef[Shard]], groups: Groups) -> None:
        self._shards, self._groups = shards, groups

    def __getitem__(self, ref: Ref) -> dict[str, Any]:
        n = _refs_in(self._groups).index(ref)
        shard = self._shards[ref.owner().id]
        return cast(dict[str, Any], shard.rpc_sync().state([n]).get(n, {}))

    def __iter__(self) -> Iterator[Ref]:
        answers = _checked(ask(self._shards, "known", lambda _: ()))
        known = {n for part in answers.values() for n in part}
        return iter([ref for n, ref in enumerate(_refs_in(self._groups)) if n in known])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _refs_in(groups: Groups) -> list[Ref]:
    return [ref for group in groups for ref in group["params"]]


def _checked(answers: Answers) -> Answers:
    """The answers; raises the first one that is an exception."""
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return answers


@expose
def values_of(refs: list[Ref]) -> list[torch.Tensor]:
    """Copies of the values of parameters of this worker."""
    return [ref.local_value().detach().clone() for ref in refs]


@expose
def set_values(refs: list[Ref], values: list[torch.Tensor]) -> None:
    """Set the values of parameters of this worker."""
    with torch.no_grad():
        for ref, value in zip(refs, values, strict=True):
            ref.local_value().copy_(value)
