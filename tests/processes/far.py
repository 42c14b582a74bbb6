"""What the tests of this folder run on other workers. Imported by every process, exposed on all."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.compat import autograd as dist_autograd
from gradwire.current import current_worker
from tests.hearing import hearing
from tests.injection.processes import freeze

# What a process keeps between calls; `forget` empties it.
_kept: dict[str, object] = {}


class Refused(ValueError):
    """An exception of the test's own."""


class Layer(torch.nn.Module):
    """y = w x, where w lives on the worker that made it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x

    def gradient(self):
        return self.weight.grad

    def reference(self):
        return gradwire.RRef(self.weight)

    def value(self):
        return self.weight.item()

    def mapped_gradient(self, context):
        return gradwire.get_gradients(context)[self.weight]

    def has_mapped_gradient(self, context):
        return self.weight in gradwire.get_gradients(context)


def trains(layer, value):
    """One pass of a trainer of its own, over a layer that it shares with others."""
    with gradwire.context():
        layer.rpc_sync().forward(torch.tensor(value, dtype=torch.float64)).backward()


def recomputed(first, second, x):
    """A checkpoint that runs a backward of its own, over a layer here and a call."""

    def block(x):
        return second.rpc_sync().forward(first.local_value()(x))

    return checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)


class Kept:
    """Something whose end can be seen."""

    def __init__(self) -> None:
        _kept["last"] = weakref.ref(self)

    def where(self):
        return here()


def warm_up():
    """The first backward of a process imports half of sympy."""
    torch.autograd.backward(torch.ones(2, requires_grad=True) * 1, torch.ones(2))


def forget():
    _kept.clear()


def here() -> str:
    return gradwire.get_worker_info().name


def refused() -> dict[str, int]:
    return current_worker.find().refusals.seen()


def pid() -> int:
    return os.getpid()


def introspected(context):
    """How many sends and receives this worker has in a context, and whom it knows."""
    found = dist_autograd._retrieve_context(context)
    sends, recvs = found._send_functions(), found._recv_functions()
    return [len(sends), len(recvs), sorted(found._known_worker_ids())]


def is_alive() -> bool:
    return _kept["last"]() is not None


def keep(value):
    _kept["value"] = value


def kept():
    return _kept["value"]


def shared_blocks() -> int:
    """How many blocks of shared memory this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:gradwire" in line for line in maps)


def where_of_kept():
    return where_of(_kept["value"])


def meet(group):
    gradwire.barrier(group)
    return gradwire.all_gather(os.getpid(), group)


def add(a, b=1):
    return a + b


def same(*values):
    return values


def through(route, x):
    """Walks along the route, and back: doubles at each worker, and says where it was."""
    if not route:
        return [here()], x * 2
    names, y = gradwire.rpc_sync(route[0], through, args=(route[1:], x))
    return [here(), *names], y * 2


def refuse(text):
    raise Refused(text)


def warn(text):
    warnings.warn(text, stacklevel=1)


def unpicklable():
    return lambda: None


def fail_with_key(key):
    return {}[key]


def cubed(x):
    return x**3


def after(seconds):
    """A function that is slow: what is measured is how long it takes."""
    time.sleep(seconds)


def where_of(reference):
    return reference.rpc_sync().where()


def owner_of(reference):
    return reference.owner_name()


def in_a_thread(to):
    """Calls from a thread of the served function's own."""
    result = []

    def call():
        try:
            result.append(gradwire.rpc_sync(to, here))
        except gradwire.GradwireError as error:
            result.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    return result


def block():
    threading.Event().wait(60)


_calls = threading.Event()


def block_on(worker):
    call = gradwire.rpc_async(worker, block)
    _calls.set()
    return call.wait()


def wait_until_it_blocks():
    assert _calls.wait(30)
    _calls.clear()


def block_here():
    """Lets `wait_until_it_blocks` know, and waits for `open_gate`, or until it is called off."""
    _gate.clear()
    _calls.set()
    while not _gate.wait(0.05):
        gradwire.rpc_sync(here(), pid)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _calls.set()
        _gate.wait(60)
        return grad


_gate = threading.Event()


def open_gate():
    _gate.set()


def blocking_backward(x):
    """The identity; its backward waits until `open_gate`."""
    _calls.clear()
    _gate.clear()
    return _Blocks.apply(x)


def relayed(to, x):
    return gradwire.rpc_sync(to, blocking_backward, args=(x * 2,)) * 2


class Blocking(torch.optim.SGD):
    """Its step never ends on w1."""

    def step(self, closure=None):
        if here() == "w1":
            block_here()
        super().step(closure)


def hold_interpreter(seconds):
    """No other thread of the process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return here()


def doze(seconds):
    """Busy, but other threads run."""
    time.sleep(seconds)
    return here()


def leftovers():
    """What this worker remembers of calls, contexts and passes; the call that asks is one."""
    worker = current_worker.find()
    return [len(worker.engine.contexts), len(worker.engine.passes), worker.agent.in_flight]


def mark_when_told(path):
    """Writes a file once gradwire can be used after the gate was opened."""
    _gate.clear()
    _calls.set()
    _gate.wait(60)
    gradwire.rpc_sync("w2", here)
    Path(path).write_text("it went on")


def keep_context(x, to):
    """Opens a context over several workers, and never ends."""
    with gradwire.context():
        y = gradwire.rpc_sync(to[0], passed_on, args=(x, to[1:]))
        _kept["y"] = y
        block_here()


def passed_on(x, to):
    x = x * 2
    return gradwire.rpc_sync(to[0], passed_on, args=(x, to[1:])) if to else x


def crash(status):
    os._exit(status)


class _RefusesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Refused("no gradient for you")


def refusing_backward(x):
    return _RefusesBackward.apply(x)


# What tests of gradwire.run have w0 do.


def train(weight):
    """A small program: its gradient, and which processes took part."""
    print("training on", here())
    with gradwire.context():
        y = gradwire.rpc_sync("w1", cubed, args=(weight,))
        y.backward()
    return weight.grad, [gradwire.rpc_sync(n, pid) for n in range(2)]


def fail_after_telling(path):
    """Writes down the processes of the run, and raises."""
    path.write_text(" ".join(str(gradwire.rpc_sync(n, pid)) for n in range(2)))
    raise Refused("enough")


def lose_w1():
    gradwire.rpc_sync("w1", crash, args=(3,))


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_by_itself():
    gradwire.shutdown()
    return here


def return_reference():
    return gradwire.RRef(1)


def close_output(error):
    """Leaves nothing to flush when it returns, or raises."""
    sys.stdout.close()
    if error:
        raise Refused(error)
    return "returned"


def gradients_of(module, context=None):
    """Of a module here that is referred to: what is in `.grad`, or in a context's map."""
    found = {} if context is None else gradwire.get_gradients(context)
    parameters = module.local_value().parameters()
    return [p.grad if context is None else found.get(p) for p in parameters]


def used(module, x):
    """A remote module that came here in a call, called from here."""
    return here(), module(x)


def profile_yourself() -> None:
    """From now on, until `profiled`, whatever thread it is on."""
    config = _ExperimentalConfig(profile_all_threads=True)
    kept = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
    _kept["profile"] = kept
    kept.start()


def profiled() -> list[str]:
    """The names in it."""
    kept = _kept.pop("profile")
    kept.stop()
    return [event.name for event in kept.events()]


class Fatal(torch.optim.SGD):
    """Its first step is the last thing its process does."""

    def step(self, closure=None):
        kill_itself()


def die_prepared(layers):
    """A trainer that is gone between prepare and commit."""
    refs = [layer.rpc_sync().reference() for layer in layers]
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=0.5)

    def die(event):
        if event.what == "prepared":
            kill_itself()

    with gradwire.context() as context:
        x = torch.ones(()).double()
        gradwire.backward(context, [sum(layer.rpc_sync().forward(x) for layer in layers)])
        with hearing(current_worker.find(), die):
            optimizer.step(context)


class Noisy(torch.nn.Module):
    """A layer whose results are random."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return torch.nn.functional.dropout(self.weight * x, 0.5)


def seed(number: int) -> None:
    torch.manual_seed(number)


def drawn() -> torch.Tensor:
    return torch.rand(3)


def noisy(x):
    return torch.nn.functional.dropout(x.sin(), 0.5)


def noisy_there(x, to):
    """Draws here, there, and here again."""
    return noisy(gradwire.rpc_sync(to, noisy, args=(noisy(x),)))


def noisy_kept(x, to):
    """Draws in a value that is kept; on its owner, `to_here` gives it without a message."""
    return noisy(gradwire.remote(to, noisy, args=(noisy(x),)).to_here())


def raises_what_it_drew(x, to):
    raise ValueError(noisy_there(x.detach(), to).sum().item())


def noisy_twice(x, to):
    first = gradwire.rpc_async(to, noisy, args=(x,))
    second = gradwire.rpc_async(to, noisy, args=(x.cos(),))
    return noisy(first.wait() * second.wait())


def recursive(levels: int, seconds: float = 0.0) -> str:
    """Calls the next worker, and so on; the innermost takes its time."""
    if levels == 0:
        time.sleep(seconds)
        return gradwire.get_worker_info().name
    return gradwire.rpc_sync(f"w{levels % 3}", recursive, args=(levels - 1, seconds))


def raises_below(levels: int) -> None:
    if levels == 0:
        raise Refused("the culprit")
    gradwire.rpc_sync(f"w{levels % 3}", raises_below, args=(levels - 1,))


def rooted(x):
    return torch.sqrt(x)  # its gradient at zero is no number


def spoilt(x):
    y = torch.exp(x)
    z = y * 1
    with torch.no_grad():
        y.add_(1)
    return z


def is_anomaly_enabled(further=None):
    """Whether it is on here, and on another worker."""
    here = torch.is_anomaly_enabled()
    return here and (further is None or gradwire.rpc_sync(further, is_anomaly_enabled))


def freeze_until_left(name) -> str:
    """A worker stands still until the process of this one is over."""
    frozen, worker = gradwire.rpc_sync(name, pid), current_worker.find()
    # Before it has said that its program is over, nobody would begin to count the seconds.
    assert worker.serve_until_over(worker.directory.number(name), 60)
    freeze(frozen)
    thaw = f"while kill -0 {os.getpid()}; do sleep 0.05; done; kill -CONT {frozen}"
    quiet = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", thaw], start_new_session=True, stdout=quiet, stderr=quiet)
    return "value"


def wait_at_gate():
    """Until `open_gate`, which the next one who waits closes."""
    assert _gate.wait(60)


def close_gate():
    _gate.clear()


# -- graphs without a context

_state: dict[str, torch.Tensor] = {}


def grown(weight: torch.Tensor, x: torch.Tensor, name: str = "state") -> torch.Tensor:
    """Add to a state that this process keeps, with its graph, from call to call."""
    _state[name] = _state.get(name, torch.zeros_like(x)) * 0.5 + weight * x
    return _state[name]


def forget_state() -> None:
    _state.clear()


def doubled_along(route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Each worker on the way doubles it."""
    y = x * 2
    return gradwire.rpc_sync(route[0], doubled_along, args=(route[1:], y)) if route else y


def edges_alive() -> dict[str, int]:
    """What this worker holds of the graph, once all that has died is told."""
    engine = current_worker.find().engine
    return {
        "sent": len(engine.edges.sent),
        "received": len(engine.edges.received),
        "passes": len(engine.passes),
        "remembered": sum(map(len, engine.passes._ended.values())),
    }


def peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


# -- streams


def powers(x, n):
    """x, x², …; says in `_kept` that it has ended."""
    try:
        y = x
        for _ in range(n):
            yield y
            y = y * x
    finally:
        _kept["powers"] = "ended"


def numbers(n):
    yield from range(n)


def powers_have_ended():
    return _kept.get("powers") == "ended"


async def awaited(x, to):
    return 2 * await gradwire.rpc_async(to, torch.sin, args=(x,))


class Weight:
    """An actor with a parameter."""

    def __init__(self, value):
        self.weight = torch.nn.Parameter(torch.tensor(value))
        self.calls = []

    def scale(self, x, n):
        self.calls.append(n)
        return self.weight * x

    def seen(self):
        return self.calls, self.weight.grad


def scale_by_name(x, n):
    return gradwire.lookup("weight", timeout=20).rpc_sync().scale(x, n)
