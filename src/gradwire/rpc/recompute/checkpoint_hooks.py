"""Learns from torch when a checkpoint runs its function, and when it runs it again.

torch does not tell: so its two kinds of checkpoint are wrapped, here and nowhere else, where
each has the function in its hands. A worker that runs in this process takes over what
preserve_rng_state asks for; see Note [Random numbers under a checkpoint], session.py. Without a
worker, or with preserve_rng_state=False, torch does as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils import checkpoint as _checkpoint

from gradwire.rpc.recompute.random_streams import Stream
from gradwire.rpc.recompute.session import Session
from gradwire.rpc.recompute.tape_state import Tape

_GENERATOR = "_checkpoint_without_reentrant_generator"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
"""the one other module of torch that uses it, by a name of its own"""

_find_stream: Callable[[], Stream | None] = lambda: None  # noqa: E731  # until there is a worker


def watch_checkpoints(find_stream: Callable[[], Stream | None]) -> None:
    """From now on, ask this for the generators of the worker that a checkpoint is run on."""
    global _find_stream
    _find_stream = find_stream


@final
class _Again:
    """The function of a reentrant checkpoint: run first by its forward, then by its backward."""

    def __init__(self, function: Callable[..., Any], stream: Stream) -> None:
        self._function, self._stream = function, stream
        self._tape: Tape | None = None

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        again = self._tape is not None
        tape = self._tape = self._tape or Tape()
        with Session(self._stream, tape, again=again):
            return self._function(*args)


def _wrapped_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    def watched(
        ctx: object, run_function: Callable[..., Any], preserve_rng_state: bool, *args: object
    ) -> Any:  # noqa: ANN401
        stream = _find_stream() if preserve_rng_state else None
        if stream is None:
            return forward(ctx, run_function, preserve_rng_state, *args)
        return forward(ctx, _Again(run_function, stream), False, *args)

    return watched


def _wrapped_generator(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def watched(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        *options_and_args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Iterator[None]:
        # Without a graph nothing is computed again.
        stream = _find_stream() if preserve_rng_state and torch.is_grad_enabled() else None
        if stream is None:
            yield from generator(fn, preserve_rng_state, *options_and_args, **kwargs)
            return
        tape = Tape()

        def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with Session(stream, tape, again=True):
                return fn(*args, **kwargs)

        with Session(stream, tape, again=False):
            yield from generator(again, False, *options_and_args, **kwargs)
        if len(stream.state()) != len(tape.state):
            raise RuntimeError(
                "PyTorch's device state was initialized in the forward pass of a Checkpoint, "
                "which is not allowed."
            )

    return watched


def _wrap() -> None:
    """Once for each process, when this file is imported."""
    function = _checkpoint.CheckpointFunction
    lacking = [name for name in (_GENERATOR,) if not hasattr(_checkpoint, name)]
    if lacking:
        raise ImportError(
            f"torch {torch.__version__} lacks torch.utils.checkpoint.{lacking[0]}; gradwire needs "
            "torch 2.11 or newer"
        )
    original = getattr(_checkpoint, _GENERATOR)
    watched = _wrapped_generator(original)
    for module in (_checkpoint, sys.modules.get(_COMPOSABLE)):
        if module is not None and getattr(module, _GENERATOR, None) is original:
            setattr(module, _GENERATOR, watched)
    function.forward = staticmethod(_wrapped_forward(function.forward))  # type: ignore[method-assign]


_wrap()
