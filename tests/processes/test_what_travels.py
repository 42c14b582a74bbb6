"""What of the caller's circumstances holds for the function it calls: the table of the guide.

Over processes, since most of these settings belong to a process, and workers in one share them.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import re
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import gradwire
from gradwire import Options
from gradwire.autograd.scope import current_context
from gradwire.compat import rpc as world
from gradwire.compat.rpc import api
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.current import current_worker
from tests.process_cluster import process_cluster
from tests.processes.conftest import TIMEOUTS

HERE = sys.modules[__name__]
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "getting-started.md"
SECONDS = 11.0
SEED = 20260716
VARIABLE = contextvars.ContextVar("a variable of the user's", default="unset")
LOCAL = threading.local()


# -- the circumstances, set here


@contextlib.contextmanager
def global_setting(put, before, after):
    put(before)
    try:
        yield
    finally:
        put(after)


@contextlib.contextmanager
def variable_and_local():
    token, LOCAL.value = VARIABLE.set("set"), "set"
    try:
        yield
    finally:
        VARIABLE.reset(token)
        del LOCAL.value


@contextlib.contextmanager
def filters():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ImportWarning)
        yield


@contextlib.contextmanager
def seeds():
    state = torch.random.get_rng_state()
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


class Overriding(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def modes():
    with Overriding(), Dispatching():
        yield


AROUND = {
    "grad mode": torch.no_grad,
    "`inference_mode`": torch.inference_mode,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "the open context": gradwire.context,
    "the deadline": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu"),
    "default dtype": lambda: global_setting(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: global_setting(torch.set_default_device, "meta", None),
    "random generators": seeds,
    "`use_deterministic_algorithms`": lambda: global_setting(
        torch.use_deterministic_algorithms, True, False
    ),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs),
    "modes": modes,
    "context variables": variable_and_local,
    "warning filters": filters,
}


# -- and seen there


def drawn():
    """The numbers that come next, from a copy of the generators."""
    generator = torch.Generator()
    generator.set_state(torch.random.get_rng_state())
    python = random.Random()
    python.setstate(random.getstate())
    return torch.rand(3, generator=generator).tolist(), python.random()


def seen(row, given):
    """Whether the function runs in that circumstance; `given` is what came with the call."""
    home = current_worker.find()
    looks = {
        "grad mode": lambda: not torch.is_grad_enabled(),
        "`inference_mode`": lambda: torch.is_inference_mode_enabled() or given.is_inference(),
        "anomaly mode": torch.is_anomaly_enabled,
        "the open context": lambda: current_context() is not None,
        "the deadline": lambda: home.deadline(None) - home.agent.clock.now() <= SECONDS,
        "autocast": lambda: torch.is_autocast_enabled("cpu"),
        "default dtype": lambda: torch.get_default_dtype() is torch.float64,
        "default device": lambda: torch.get_default_device().type == "meta",
        "random generators": lambda: any(a == b for a, b in zip(drawn(), given, strict=True)),
        "`use_deterministic_algorithms`": torch.are_deterministic_algorithms_enabled,
        "saved-tensor hooks": lambda: bool(
            torch._C._autograd._top_saved_tensors_default_hooks(True)
        ),
        "modes": lambda: bool(
            torch.overrides._get_current_function_mode() or _get_current_dispatch_mode()
        ),
        "context variables": lambda: VARIABLE.get() == "set" or hasattr(LOCAL, "value"),
        "warning filters": lambda: any(f[2] is ImportWarning for f in warnings.filters[:1]),
    }
    return bool(looks[row]())


def whether_it_travels(call, row):
    with AROUND[row]():
        given = drawn() if row == "random generators" else torch.ones(1)
        assert row == "the deadline" or seen(row, given), "the probe does not see what is here"
        timeout = {"timeout": SECONDS} if row == "the deadline" else {}
        return call("w1", seen, args=(row, given), **timeout)


# -- the table


def table():
    text = GUIDE.read_text().split("| around the call |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (travels|stays) \| (travels|stays) \|$", text, re.M)
    return {re.split(r", | \(|: | and | of ", name)[0]: tuple(said) for name, *said in rows}


def test_every_row_of_the_table_has_its_probe():
    assert list(table()) == list(AROUND)


def test_natively_what_travels_is_what_the_guide_says(hosts):
    options = Options(listen="unix", timeouts=TIMEOUTS)
    with process_cluster(2, expose=[HERE], options=options, hosts=hosts):
        got = {row: whether_it_travels(gradwire.rpc_sync, row) for row in AROUND}

    assert got == {row: said == "travels" for row, (said, _) in table().items()}


def test_under_compat_what_travels_is_what_the_guide_says(hosts, tmp_path):
    (host,) = hosts.take(1)
    host.begin(_serve, 1, f"file://{tmp_path}/meeting")
    _join(0, f"file://{tmp_path}/meeting")
    try:
        got = {row: whether_it_travels(api.rpc_sync, row) for row in AROUND}
    finally:
        world.shutdown()
        host.finish()

    assert got == {row: said == "travels" for row, (_, said) in table().items()}


def _join(rank, url):
    options = TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=30)
    world.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def _serve(rank, url):
    """Be a worker until the others are over."""
    _join(rank, url)
    world.shutdown()
