"""Random numbers of its own for each worker of an in-process cluster.

torch has one default generator for the CPU in each process. Workers in one process share it, so
that what one draws moves the others; workers in processes of their own do not. Here each worker has
a generator, and all random operators that run as that worker draw from it:

    >>> with cluster(2, generators=generators(2, seed=7)) as workers:
    ...     workers[0].run(gradwire.rpc_sync, "w1", dropout, args=(x,))

The same program in one process, for comparison, takes generators made of the same seed and runs
what belongs to worker 1 inside a block:

    >>> own = generators(2, seed=7)
    >>> with drawing_from(own[1]):
    ...     dropout(x)

There a `torch.utils.checkpoint` would put back the default generator of the process only: call the
function without a checkpoint, which is what it has to equal.

The generator is chosen for a thread. Threads that a program starts itself, and callbacks of
futures, draw from the default generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.errors import UsageError
from gradwire.torch_private import has_composite_kernel, run_composite_kernel

_DISTANCE = 1_000_003
"""between the seeds of two workers: tests count their own seeds in steps of one"""


def generators(n: int, *, seed: int) -> list[torch.Generator]:
    """One for each of n workers; the same seed gives the same numbers."""
    return [torch.Generator().manual_seed(seed + i * _DISTANCE) for i in range(n)]


@final
class drawing_from(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators on the CPU in the block draw from this generator, in this thread.

    Those that were given a generator draw from that one.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, with the generator if it draws random numbers."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_cpu(args, kwargs):
            # One that only calls others, as `dropout` does, which inference mode shows.
            if "generator" not in _arguments(func) and has_composite_kernel(func):
                with self:
                    return run_composite_kernel(func, *args, **kwargs)
            func, position = _with_generator(func)
            given = args[position] if position < len(args) else kwargs.get("generator")
            if given is None:
                args = args[:position]
                kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def _is_on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    devices = {tensor.device for tensor in tensors} or {torch.device(kwargs.get("device") or "cpu")}
    return all(device.type == "cpu" for device in devices)


@cache
def _with_generator(func: Any) -> tuple[Callable[..., Any], int]:  # noqa: ANN401
    """The overload that takes a generator, and at which place; beyond the last if by name only."""
    names = _arguments(func)
    if "generator" in names:
        argument = func._schema.arguments[names.index("generator")]
        return func, len(names) if argument.kwarg_only else names.index("generator")
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if sorted(_arguments(other)) == sorted([*names, "generator"]):
            return other, len(names)
    raise UsageError(
        f"{func} draws from the default generator of the process and takes no other",
        hint="an in-process cluster cannot give each worker numbers of its own there: use "
        "processes, or cluster() without generators=",
    )


def _arguments(func: Any) -> list[str]:  # noqa: ANN401
    return [argument.name for argument in func._schema.arguments]
