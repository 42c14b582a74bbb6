"""Suspended: the scope and the modes of a function that is left and continued, as a generator is.

Torch keeps grad mode, autocast and saved-tensor hooks per thread. A function that is left in the
middle leaves its own modes on its thread, and does not find them on the thread that continues it.
So they are entered for each step of it, and what the step has changed is kept for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

import torch

from gradwire.autograd.modes import current_modes, in_modes
from gradwire.autograd.scope import current_context
from gradwire.current import set_current
from gradwire.rpc.calls.server import CallScope
from gradwire.torch_private import NOTHING, has_modes

if TYPE_CHECKING:
    from gradwire.agent.serving.dispatch import Source
    from gradwire.rpc.worker import Worker

T = TypeVar("T")


@final
class Suspended:
    """Made inside of the call that begins the function, whose context and modes it keeps."""

    def __init__(self, worker: Worker) -> None:
        self.variables = copy_context()
        """the context variables of the function: `variables.run` calls what enters a scope"""
        self.variables.run(set_current, (worker, math.inf, None, None, None))
        self.context = current_context()
        self._scope_for = partial(CallScope, worker, self.context)
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._modes = current_modes() if has_modes() else None

    def scope(self, deadline: float, source: Source) -> CallScope:
        """The scope of one or more steps, on this thread."""
        return self._scope_for(deadline, source)

    def step(self, go_on: Callable[[], T]) -> T:
        """Continue the function in its modes, up to where it is left again. hot: each item"""
        modes = NOTHING if self._modes is None else in_modes(self._modes)
        inference = torch.inference_mode() if self._inference else NOTHING
        with modes, inference:
            outside, grad = torch.is_grad_enabled(), self._grad
            if grad is not outside:
                torch.set_grad_enabled(grad)
            try:
                return go_on()
            finally:
                grad = self._grad = torch.is_grad_enabled()
                if grad is not outside:
                    torch.set_grad_enabled(outside)
