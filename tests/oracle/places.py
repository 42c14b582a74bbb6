"""Where a single operator may run: a thread counts its autograd nodes from 0, each on its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_POOL = ThreadPoolExecutor(64, thread_name_prefix="oracle")
"""Kept: its threads have made nodes before, so it hides what fresh threads show. As many as there
may be calls inside each other, on all workers of this process."""


def run_in(place: str | None, function: Callable[[], T]) -> T:
    """Run a function in another thread, with the grad mode of this one; wait for its result."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run() -> T:
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            return function()

    match place:
        case None:
            return function()
        case "a pool":
            return _POOL.submit(run).result()
        case "a fresh thread":
            return _in_a_fresh_thread(run)
        case "a fresh thread with the context":
            copied = contextvars.copy_context()
            return _in_a_fresh_thread(lambda: copied.run(run))
        case "asyncio.to_thread":
            return asyncio.run(asyncio.to_thread(run))
        case _:
            raise AssertionError(place)


def _in_a_fresh_thread(run: Callable[[], T]) -> T:
    outcome: list[T] = []
    errors: list[BaseException] = []

    def main() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=main, name="oracle fresh", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return outcome[0]
