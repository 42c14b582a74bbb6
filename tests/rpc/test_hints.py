"""Hints can be followed: each mistake is made, its text is read, and what it advises works."""

from __future__ import annotations

import concurrent.futures
import functools
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils.rnn import PackedSequence
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradwire as gw
from gradwire.errors import NotExposed, NotSerializable, RemoteError
from gradwire.options import Options
from gradwire.rpc.expose.names import type_name
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
X = torch.tensor([1.0, 2.0])


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE, PackedSequence]) as made, made[0].worker.scope():
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


def echoed(x):
    return x


def refusal(function, *args, kind=NotSerializable):
    with pytest.raises(kind) as raised:
        gw.rpc_sync("w1", function, args)
    return raised.value


# -- functions that return what cannot be serialized


async def answers(x):
    return x


def coroutine(x):
    return answers(x)


def generator(x):
    yield x


async def async_generator(x):
    yield x


def promised(x):
    future = torch.futures.Future()
    future.set_result(x)
    return future


@gw.async_execution
def answered_later(x):
    return promised(x)


def called_further(x):
    return gw.rpc_async("w0", echoed, (x,))


def of_a_pool(x):
    return concurrent.futures.Future()


def an_iterator(x):
    return iter([x])


def a_map(x):
    return map(echoed, [x])


def items(x):
    return {1: x}.items()


ASYNC = "@gradwire.async_execution"


@pytest.mark.parametrize("pickle", [False, True])
@pytest.mark.parametrize(
    ("function", "text", "advice"),
    [
        (generator, "a generator cannot be serialized", "a list of what it yields"),
        (async_generator, "a generator cannot be serialized", "a list of what it yields"),
        (promised, "a future cannot be serialized", ASYNC),
        (called_further, "a future cannot be serialized", ASYNC),
        (of_a_pool, "a future cannot be serialized", "send what it brings"),
        (an_iterator, "a list_iterator cannot be serialized", "list(...)"),
        (a_map, "a map cannot be serialized", "list(...)"),
        (items, "a dict_items cannot be serialized", "list(...)"),
    ],
)
def test_a_function_that_returns_what_does_not_travel(workers, function, text, advice, pickle):
    if not pickle:
        error = refusal(function, 1)
    else:
        with cluster(2, options=Options(pickle=True), expose=[HERE]) as others:
            error = others[0].run(refusal, function, 1)

    assert isinstance(error, RemoteError)
    assert error.message == f"result: {text}"
    assert advice in error.hint
    assert "register_codec" not in error.hint


def test_a_function_may_return_the_coroutine_of_another(workers):
    assert gw.rpc_sync("w1", coroutine, (1,)) == 1


def test_a_function_that_answers_later_may_return_a_future(workers):
    assert gw.rpc_sync("w1", answered_later, (1,)) == 1


def test_a_future_as_an_argument(workers):
    future = gw.rpc_async("w1", echoed, (1,))

    error = refusal(echoed, [future])

    assert str(error).startswith(
        "args[0][0]: a future cannot be serialized\nhint: send what it brings"
    )
    assert gw.rpc_sync("w1", echoed, ([future.wait()],)) == [1]


# -- functions that have no name to be called by


def doubled(x):
    return 2 * x


compiled = torch.compile(doubled, backend="eager")


def noted(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)

    return wrapper


wrapped = noted(doubled)


@functools.partial(torch.compile, backend="eager")
def compiled_in_place(x):
    return 2 * x


def test_a_compiled_function_under_another_name(workers):
    error = refusal(compiled, X, kind=NotExposed)

    said = f"{__name__}:doubled is the original function here, not the one that torch.compile made"
    assert error.message.startswith(said)
    assert "`doubled = torch.compile(doubled)`" in error.hint
    assert torch.equal(gw.rpc_sync("w1", compiled_in_place, (X,)), 2 * X)


def test_a_wrapped_function_under_another_name(workers):
    error = refusal(wrapped, X, kind=NotExposed)

    assert "not the one that your decorator made of it" in error.message
    assert "give both one name" in error.hint


@pytest.mark.parametrize("how", [gw.rpc_sync, gw.rpc_async, gw.remote])
@pytest.mark.parametrize("wrap", [echoed, lambda m: torch.compile(m, backend="eager")])
def test_a_module_in_the_place_of_the_function(workers, how, wrap):
    with pytest.raises(NotExposed, match="has no name to be called by") as raised:
        how("w1", wrap(nn.Linear(2, 2)), (X,))

    assert "gradwire.RemoteModule" in raised.value.hint
    assert "rref.rpc_sync().forward(...)" in raised.value.hint
    module, kept = gw.RemoteModule("w1", nn.ReLU), gw.remote("w1", nn.ReLU)
    assert torch.equal(module(X), X)
    assert torch.equal(kept.rpc_sync().forward(X), X)


def test_a_partial(workers):
    error = refusal(functools.partial(doubled, X), kind=NotExposed)

    assert error.hint == "pass the function itself, and all of its arguments in args and kwargs"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function(workers):
    error = refusal(torch.jit.trace(doubled, (X,)), X, kind=NotExposed)

    assert error.hint.startswith("call it inside a function of yours")


def test_a_module_as_an_argument(workers):
    error = refusal(echoed, nn.Linear(2, 2))

    assert error.place == "args[0]"
    assert "gradwire.RemoteModule" in error.hint
    assert "state_dict()" in error.hint
    state = gw.rpc_sync("w1", echoed, (nn.Linear(2, 2).state_dict(),), timeout=30)
    assert state.keys() == {"weight", "bias"}


def test_what_is_torchs_own_cannot_be_decorated(workers):
    error = refusal(torch.nn.utils.parametrizations.weight_norm, 1, kind=NotExposed)

    assert "@gradwire.expose" not in error.hint
    assert "pass expose=[it]" in error.hint
    sequence = PackedSequence(X, torch.ones(2, dtype=torch.int64))  # which the fixture exposes
    assert torch.equal(gw.rpc_sync("w1", echoed, (sequence,)).data, X)


# -- tensors


def sine_through_a_call(x):
    return gw.rpc_sync("w1", torch.sin, (x,))


TRANSFORMS = {
    "vmap": lambda: torch.func.vmap(sine_through_a_call)(X),
    "grad": lambda: torch.func.grad(lambda x: sine_through_a_call(x).sum())(X),
    "jvp": lambda: torch.func.jvp(sine_through_a_call, (X,), (X,)),
    "functionalize": lambda: torch.func.functionalize(sine_through_a_call)(X),
    "jacrev": lambda: torch.func.jacrev(sine_through_a_call)(X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's, which jvp scripts
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_around_a_call(workers, transform):
    """Functionalize used to send garbage, in silence."""
    with pytest.raises(NotSerializable) as raised:
        transform()

    text = "args[0]: a tensor inside a torch.func transform (vmap, grad, …) cannot be serialized"
    assert str(raised.value).startswith(text)
    assert raised.value.hint.startswith("use the transform inside the function that is called")


def derivative(x):
    return torch.func.vmap(torch.func.grad(torch.sin))(x)


def test_batched_gradients_through_a_call(workers):
    x = torch.ones(2, requires_grad=True)

    def gradients_of_rows():
        y = gw.rpc_sync("w1", torch.sin, args=(x,))
        rows = torch.eye(2)
        torch.autograd.grad(y, x, rows, is_grads_batched=True)

    with pytest.raises(NotSerializable) as raised:
        workers[0].run(gradients_of_rows)

    assert "are batched by vmap, which does not cross workers" in str(raised.value)
    assert raised.value.hint.startswith("differentiate row by row")


def test_a_transform_inside_the_function_that_is_called(workers):
    assert torch.equal(gw.rpc_sync("w1", derivative, (X,)), X.cos())


def test_a_call_in_a_transform_that_sends_none_of_its_tensors(workers):
    def scaled(x):
        return x * gw.rpc_sync("w1", echoed, (X,))

    assert torch.equal(torch.func.vmap(scaled)(X), torch.outer(X, X))


@pytest.fixture
def spread():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # it opens no sockets
    yield DTensor.from_local(X, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
    dist.destroy_process_group()


def test_a_dtensor(workers, spread):
    error = refusal(echoed, [1, spread])

    assert error.place == "args[0][1]"
    assert (
        error.hint == "a DTensor is spread over a mesh: send its full_tensor(), or its to_local()"
    )
    assert torch.equal(gw.rpc_sync("w1", echoed, (spread.full_tensor(),)), X)
    assert torch.equal(gw.rpc_sync("w1", echoed, (spread.to_local(),)), X)


def of_mkldnn(_):
    return {"a": [X, torch.ones(2, 2).to_mkldnn()]}


def test_the_place_of_a_tensor_is_that_of_the_argument(workers):
    odd = torch.ones(2, 2).to_mkldnn()
    rref = gw.RRef(1)
    for args, kwargs, place in [
        ((X, odd), {}, "args[1]"),
        ((1, [X, {"k": odd}]), {}, 'args[1][1]["k"]'),
        ((rref, X), {"w": (X, odd)}, 'kwargs["w"][1]'),
    ]:
        for how in (gw.rpc_sync, gw.rpc_async, gw.remote):
            with pytest.raises(NotSerializable) as raised:
                how("w1", echoed, args, kwargs)
            assert raised.value.place == place
            assert raised.value.hint == "send it as to_dense()"
    del rref


def test_the_place_of_a_tensor_in_a_result(workers):
    assert refusal(of_mkldnn, 1).message.startswith('result["a"][1]: a tensor of layout')


# -- programs


def test_a_class_of_the_script_is_of_main_in_a_spawned_process_too():
    kind = type("Box", (), {"__module__": "__mp_main__"})

    assert type_name(kind) == "__main__.Box"


PROGRAM = textwrap.dedent(
    """
    import gradwire

    def f(x):
        return x + 1

    def main():
        return gradwire.rpc_sync("w1", f, (1,))

    if __name__ == "__main__":
        print(gradwire.run(main, 2))
    """
)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "given", "where"),
    [
        (["-"], PROGRAM, "in <stdin>, which is not a file"),
        (["-c", PROGRAM], "", "at a prompt, in a notebook or after `python -c`"),
    ],
)
def test_a_program_without_a_file_is_told_to_have_one(arguments, given, where):
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    *_, text, hint = done.stderr.splitlines()
    assert text == (
        f"gradwire.errors.UsageError: run() was called for a program {where}: its "
        "workers cannot import it"
    )
    assert hint == (
        "hint: write it to a file, and run that: python program.py; or start workers that are "
        "sent what is defined here: with gradwire.workers(2) as names"
    )


class Far(torch.utils.data.Dataset):
    """Each item is a call, which a DataLoader makes in another process."""

    def __len__(self):
        return 1

    def __getitem__(self, n):
        try:
            return gw.rpc_sync("w1", echoed, (n,))
        except gw.UsageError as error:
            return f"{error.message}: {error.hint}"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "text"),
    [("fork", "forked from a worker"), ("spawn", "no worker is running here")],
)
def test_a_call_in_a_worker_of_a_data_loader(workers, method, text):
    loader = torch.utils.data.DataLoader(
        Far(), batch_size=None, num_workers=1, multiprocessing_context=method
    )

    (said,) = loader

    assert text in said
    assert "make the calls in the process that iterates over it, as with num_workers=0" in said
    assert list(torch.utils.data.DataLoader(Far(), batch_size=None)) == [0]
