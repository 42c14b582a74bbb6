"""Wraps torch's checkpoints, to learn when one runs its function and when it recomputes it.

torch has no hook for this, so both kinds of checkpoint (reentrant and not) are wrapped where each
has the function at hand. In a process with a worker, gradwire does what preserve_rng_state asks for
(see Note [Random numbers under a checkpoint], checkpoint_run.py); else torch's own code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils import checkpoint as _checkpoint

from gradwire.current import current_worker
from gradwire.rpc.recompute.checkpoint_run import CheckpointRun, Generators
from gradwire.rpc.recompute.recording import Recording

_GENERATOR = "_checkpoint_without_reentrant_generator"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
"""the one other module of torch that imports the generator function by name"""


def _find_generators() -> Generators | None:
    """The random generators of the current worker, if there is one."""
    worker = current_worker.maybe_find()
    return None if worker is None else cast(Generators, worker.generators)


def _wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(
        ctx: object, run_function: Callable[..., Any], preserve_rng_state: bool, *args: object
    ) -> Any:  # noqa: ANN401
        generators = _find_generators() if preserve_rng_state else None
        if generators is None:
            return forward(ctx, run_function, preserve_rng_state, *args)
        recording = Recording()

        def recorded(*args: object) -> Any:  # noqa: ANN401
            again = bool(recording.start)  # the first call is the forward
            with CheckpointRun(generators, recording, is_recomputation=again):
                return run_function(*args)

        return forward(ctx, recorded, False, *args)

    return watched


def _wrapped_generator(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def watched(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        *options_and_args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[None]:
        # Without a graph nothing is recomputed.
        generators = _find_generators() if preserve_rng_state and torch.is_grad_enabled() else None
        if generators is None:
            yield from generator(fn, preserve_rng_state, *options_and_args, **kwargs)
            return
        recording = Recording()

        def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with CheckpointRun(generators, recording, is_recomputation=True):
                return fn(*args, **kwargs)

        with CheckpointRun(generators, recording, is_recomputation=False):
            yield from generator(again, False, *options_and_args, **kwargs)
        if len(generators.get_state()) != len(recording.start):
            raise RuntimeError(
                "PyTorch's device state was initialized in the forward pass of a Checkpoint, "
                "which is not allowed."
            )

    return watched


def wrap_checkpoints() -> None:
    """Replace torch's two functions. Called once per process, when rpc/worker.py is imported."""
    function = _checkpoint.CheckpointFunction
    original = getattr(_checkpoint, _GENERATOR, None)
    if original is None:
        raise ImportError(
            f"torch {torch.__version__} lacks torch.utils.checkpoint.{_GENERATOR}; gradwire needs "
            "torch 2.11 or newer"
        )
    watched = _wrapped_generator(original)
    for module in (_checkpoint, sys.modules.get(_COMPOSABLE)):
        if module is not None and getattr(module, _GENERATOR, None) is original:
            setattr(module, _GENERATOR, watched)
    function.forward = staticmethod(_wrapped_forward(function.forward))  # type: ignore[method-assign]
