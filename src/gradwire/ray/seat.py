"""The actor of one worker. Its driver calls `prepare`, `work` and `leave`, in this order.

They report with a word and some bytes, and never raise: Ray would log it. The secret and the keys
are an argument of `work`, which goes from process to process. What a constructor is given, and
`runtime_env`, would be kept by Ray and shown by its tools. They are never in a file.
"""

from __future__ import annotations

import gc
import importlib.util
import linecache
import logging
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any, cast, final

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from gradwire import threads
from gradwire.agent.peers.secret import in_memory
from gradwire.agent.remote_errors import describe
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, JoinTimeout, UsageError
from gradwire.launch.child import BEGUN, FAILED, LEFT, RETURNED, pickled, unpickled
from gradwire.launch.supervise_state import CALLER
from gradwire.options import FOREVER, Options, Tls
from gradwire.rpc.api import shutdown
from gradwire.rpc.expose.registry import exception_name
from gradwire.rpc.join import join, set_default_worker
from gradwire.rpc.worker import Worker

SERVED = "served"
Report = tuple[str, bytes]
"""A word, and the value of the function (RETURNED) or an error (FAILED)."""

_LOOK_AGAIN_SECONDS = 1.0
_MAIN = "__mp_main__"  # as in the processes that multiprocessing spawns
_IMPORT_HINT = (
    "what it imports must be there on every node: install it, or let Ray bring it with "
    'ray.init(runtime_env={"working_dir": "."})'
)

_log = logging.getLogger("gradwire")


@dataclass(frozen=True, slots=True)
class Script:
    """The program of the driver, which nodes need not have."""

    path: str
    package: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Keys:
    """What only this worker may know, as the contents of files; no repr shows it."""

    secret: bytes | None = field(repr=False)
    tls: tuple[bytes, bytes, bytes] | None = field(repr=False)
    """certificate, key, authority"""


@dataclass(frozen=True, slots=True)
class Orders:
    """What one worker is told, apart from its keys."""

    name: str
    rank: int
    world_size: int
    options: Options
    store: tuple[str, int]
    """host and port of the store where the workers meet"""
    script: Script | None
    over: str | None = None
    """the value in the store that says that the function has returned, if workers may restart"""


@final
class Seat:
    """The process of one worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: Orders | None = None
        self._given: tuple[Callable[..., object], tuple[object, ...], Any]
        self._has_failed = False

    def __repr__(self) -> str:  # Ray shows it before each line of output
        return self._name

    def prepare(self, orders: Orders, given: bytes) -> Report:
        """Import the driver's script and what `run` was given."""
        return self._reported(partial(self._prepare, orders, given))

    def work(self, keys: Keys) -> Report:
        """Join; call the function or serve it."""
        return self._reported(partial(self._work, keys))

    def leave(self) -> Report:
        """Leave, together with the others."""
        return self._reported(self._leave)

    def _reported(self, step: Callable[[], Report]) -> Report:
        if self._has_failed:  # the report of an earlier step says why
            return FAILED, b""
        try:
            report = step()
        except BaseException as error:  # reported to the driver, whatever it is
            self._has_failed = True
            failure = describe(error, self._name, exception_name)
            report = FAILED, msgspec.msgpack.encode(failure)
        threads.flush_output()
        return report

    def _prepare(self, orders: Orders, given: bytes) -> Report:
        self._orders = orders
        if orders.script is not None:
            _become(orders.script, self._name)
        hint = f"fn, args and expose must come from the script or from modules; {_IMPORT_HINT}"
        self._given = unpickled(given, "what run() was given", hint=hint)
        return BEGUN, b""

    def _work(self, keys: Keys) -> Report:
        assert self._orders is not None, "prepare() comes first"
        fn, args, expose = self._given
        worker = joined(self._orders, keys, expose)
        gc.freeze()  # see launch/child.py
        if self._orders.rank != CALLER:
            self._serve(worker, self._orders.over)
            return SERVED, b""
        value = fn(*args)
        what = f"what the function returned (a {type(value).__name__})"
        hint = "return plain values and tensors; references end with their workers"
        return RETURNED, pickled(value, what, hint=hint)

    def _serve(self, worker: Worker, over: str | None) -> None:
        """Serve until the function has returned, even if its worker dies and is restarted."""
        store = cast(Store, worker.store)
        while not worker.serve_until_over(CALLER, _LOOK_AGAIN_SECONDS):
            if over is not None and store.check([over]):
                return  # it was restarted when the others had left

    def _leave(self) -> Report:
        assert self._orders is not None, "prepare() comes first"
        if current_worker.maybe_default() is None:  # the function called shutdown()
            return LEFT, b""
        if self._orders.rank != CALLER:
            shutdown(timeout=FOREVER)  # the driver gives up sooner
            return LEFT, b""
        try:
            shutdown()
        except DeadlinePassed as error:  # the driver judges the worker that does not leave
            _log.warning("%s", error.message)
        return LEFT, b""


def joined(orders: Orders, keys: Keys, expose: Any) -> Worker:  # noqa: ANN401
    """Join as the default worker. The keys are read once, from memory that is then closed."""
    (host, port), options = orders.store, orders.options
    patience = timedelta(seconds=options.timeouts.join)
    try:
        store = TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        raise JoinTimeout(
            f"{orders.name} cannot reach the driver at {host}:{port}: {error}",
            hint="nodes must reach each other at all ports, and the address that Ray knows",
        ) from error
    with ExitStack() as stack:

        def path(data: bytes) -> str:
            return stack.enter_context(in_memory("gradwire-keys", data))

        if keys.secret is not None:
            options = replace(options, secret=path(keys.secret))
        if keys.tls is not None:
            certificate, key, authority = map(path, keys.tls)
            tls = Tls(certificate=certificate, key=key, authority=authority)
            options = replace(options, tls=tls)
        worker = join(
            orders.name, orders.rank, orders.world_size, options, expose=expose, store=store
        )
    set_default_worker(worker)
    return worker


def _become(script: Script, name: str) -> None:
    """Run the driver's script as `__main__` of this process, as a spawned process would.

    Its functions and classes have the same names here as there, so peers can call them by name.
    """
    module = ModuleType(_MAIN)
    module.__file__, module.__package__ = script.path, script.package
    sys.modules["__main__"] = sys.modules[_MAIN] = module
    lines = script.source.splitlines(keepends=True)
    linecache.cache[script.path] = (len(script.source), None, lines, script.path)
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # run() in the script would recur
    try:
        code = compile(script.source, script.path, "exec", dont_inherit=True)
        exec(code, vars(module))
    except UsageError:
        raise
    except BaseException as error:
        raise UsageError(
            f"{name} could not import the script: {type(error).__name__}: {error}",
            hint=_IMPORT_HINT,
        ) from error
    finally:
        del process._inheriting  # type: ignore[attr-defined]


def script_of_driver() -> Script | None:
    """The program of this process; None at a prompt, where `check_program` has refused it."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None:
        return None
    with open(path, "rb") as file:
        source = importlib.util.decode_source(file.read())
    return Script(path, main.__package__, source)
