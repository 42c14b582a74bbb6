"""Other libraries, if they are installed: the smallest call, and echoes.

All of them can do these two; only hivemind also differentiates through its calls. Each is used as
in its own introduction, between two processes of one machine, the caller on the first core. Its
rounds come after those of the two sides, not between them. Tensors are sent as the users of each
library send them. pyzmq and gRPC send only bytes, so there the tensor is a view of the bytes, which
is the cheapest way.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Run, Samples, timed
from benchmarks.sides import SECONDS, BlockFailed, apart, end_with_parent, pin

MODULES = {
    "ray": "ray",
    "monarch": "monarch.actor",
    "hivemind": "hivemind",
    "pyzmq": "zmq",
    "grpcio": "grpc",
}
"""The module to import, by library."""


def installed() -> list[str]:
    """The libraries that can be imported here."""
    return [name for name, module in MODULES.items() if _is_there(module)]


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def calls(run: Run) -> Samples:
    """The smallest call of each installed library."""
    return _samples(run, 0)


def echoes(run: Run, size: int) -> Samples:
    """An echo of `size` bytes with each installed library."""
    return _samples(run, size)


def _samples(run: Run, size: int) -> Samples:
    found: Samples = {}
    for name in installed() if run.peers else ():
        try:
            found[name] = apart(_caller, name, size, run.rounds, run.seconds)
        except BlockFailed as failed:
            print(f"{name} is left out: {failed}", file=sys.stderr)
    return found


def _caller(name: str, size: int, rounds: int, seconds: float) -> list[list[float]]:
    pin(0)
    import torch

    torch.set_num_threads(1)
    x = torch.ones(max(size // 4, 1))
    call, end = _STARTS[name](None if size == 0 else x)
    timed(call, seconds)
    samples = [timed(call, seconds) for _ in range(rounds)]
    end()
    return samples


Started = tuple[Callable[[], object], Callable[[], object]]
"""A function that makes one call, and one that ends the callee."""


def _with_callee(target: Callable[..., None], address: str) -> Callable[[], None]:
    callee = multiprocessing.get_context("spawn").Process(target=target, args=(address,))
    callee.start()

    def end() -> None:
        callee.kill()
        callee.join(SECONDS)

    return end


def _pyzmq(x: Any) -> Started:
    import torch
    import zmq

    address = f"ipc://{tempfile.mkdtemp(prefix='bench-')}/zmq"
    end = _with_callee(_pyzmq_callee, address)
    socket = zmq.Context().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    payload = b"" if x is None else x.numpy()

    def call() -> object:
        socket.send(payload, copy=False)
        frame = socket.recv(copy=False)
        return None if x is None else torch.frombuffer(frame.buffer, dtype=x.dtype)

    return call, end


def _pyzmq_callee(address: str) -> None:
    end_with_parent()
    pin(1)
    import zmq

    socket = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    while True:
        socket.send(socket.recv(copy=False), copy=False)


_ANY_SIZE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _grpcio(x: Any) -> Started:
    import grpc
    import torch

    address = f"unix:{tempfile.mkdtemp(prefix='bench-')}/grpc"
    end = _with_callee(_grpcio_callee, address)
    channel = grpc.insecure_channel(address, options=_ANY_SIZE)
    same = channel.unary_unary("/bench/same")

    def call() -> object:
        sent = b"" if x is None else x.numpy().tobytes()
        heard = same(sent, timeout=SECONDS, wait_for_ready=True)
        return None if x is None else torch.frombuffer(bytearray(heard), dtype=x.dtype)

    return call, end


def _grpcio_callee(address: str) -> None:
    end_with_parent()
    pin(1)
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    same = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(ThreadPoolExecutor(16), options=_ANY_SIZE)
    handlers = grpc.method_handlers_generic_handler("bench", {"same": same})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


class _Echo:
    """The actor of Ray."""

    def __init__(self):
        pin(1)

    def same(self, x=None):
        return x


def _ray(x: Any) -> Started:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    echo = ray.remote(_Echo).remote()
    arguments = () if x is None else (x,)
    return lambda: ray.get(echo.same.remote(*arguments), timeout=SECONDS), ray.shutdown


def _monarch(x: Any) -> Started:
    from monarch.actor import Actor, endpoint, this_host

    class Echo(Actor):
        @endpoint
        def same(self, x=None):
            return x

    processes = this_host().spawn_procs(per_host={"gpus": 1})
    echo = processes.spawn("echo", Echo)
    arguments = () if x is None else (x,)
    return lambda: echo.same.call_one(*arguments).get(SECONDS), lambda: processes.stop().get()


def _hivemind(x: Any) -> Started:
    import torch
    from hivemind import DHT
    from hivemind.moe import ModuleBackend, RemoteExpert, Server, get_experts

    expert = ModuleBackend(
        "same.0",
        torch.nn.Identity(),
        args_schema=_hivemind_schema(x),
        max_batch_size=1 << 30,
    )
    dht = DHT(start=True)
    server = Server(dht, {"same.0": expert}, num_connection_handlers=1, start=True)
    caller = DHT(initial_peers=dht.get_visible_maddrs(), start=True)
    (remote,) = get_experts(caller, ["same.0"])
    assert isinstance(remote, RemoteExpert)
    given = torch.ones(1, 1) if x is None else x.unsqueeze(0)

    def end() -> None:
        server.shutdown()
        caller.shutdown()
        dht.shutdown()

    return lambda: remote(given), end


def _hivemind_schema(x: Any) -> tuple[Any, ...]:
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    return (BatchTensorDescriptor(1 if x is None else x.numel()),)


_STARTS: dict[str, Callable[[Any], Started]] = {
    "ray": _ray,
    "monarch": _monarch,
    "hivemind": _hivemind,
    "pyzmq": _pyzmq,
    "grpcio": _grpcio,
}
