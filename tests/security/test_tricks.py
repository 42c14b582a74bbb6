"""Ways to reach what is not exposed. Each is tried by a peer that sends what it likes.

The attacker is a worker of the same world, past every authentication: it names any function and
packs any skeleton, without the checks of its own library. None of the tricks may run a command, and
each is answered by an error that is ours.
"""

from __future__ import annotations

import builtins
import os
import threading

import msgspec
import pytest
import torch

import gradwire
from gradwire.agent.agent import Answer
from gradwire.errors import GradwireError, NotExposed
from gradwire.rpc.calls.client import Target
from gradwire.rpc.codec.walk import Tag
from gradwire.rpc.messages import Body, Call, Result
from gradwire.testing import cluster
from tests.security import shop

SHOP = "tests.security.shop"
_RAN: list[str] = []


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[shop]) as made:
        yield made


@pytest.fixture(autouse=True)
def marker(tmp_path, monkeypatch):
    """A file that no trick may make; nor may one start a process, or evaluate text."""
    path = tmp_path / "marker"
    monkeypatch.chdir(tmp_path)
    yield path
    assert not list(tmp_path.iterdir())
    assert not _RAN


def ran():
    _RAN.append(threading.current_thread().name)


builtins.gradwire_trick = ran  # what text that is evaluated would call


def call(workers, name, *args, **kwargs):
    """Call a function by any name at all."""
    worker = workers[0].worker
    deadline = worker.agent.clock.now() + 10
    return worker.calls.call(1, Target(name, args, kwargs), deadline)


def fetch(workers, name, *args):
    """Have a function of any name make a value, and fetch it."""
    worker = workers[0].worker
    deadline = worker.agent.clock.now() + 10
    created = worker.calls.remote(1, Target(name, args, {}), deadline)
    try:
        return worker.calls.fetch(created.handle, deadline)
    finally:
        worker.refs.ended(created.handle)


def send(workers, name, skeleton):
    """Call a function with a packed value of our own making; the value that comes back."""
    worker = workers[0].worker
    data = msgspec.msgpack.encode(skeleton)
    message = Call(name, Body(data, [], [], []), None, True, False, 10.0)
    deadline = worker.agent.clock.now() + 10
    _, promise = worker.agent.request(1, message, deadline=deadline, description=name)
    outcome = promise.wait(10)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Answer)
    assert isinstance(outcome.message, Result)
    return outcome.message


def arguments(*skeletons):
    """The skeleton of (args, kwargs)."""
    return [Tag.TUPLE, [Tag.TUPLE, *skeletons], [Tag.DICT]]


TOUCH = "touch marker"
CODE = "__builtins__['gradwire_trick']() if isinstance(__builtins__, dict) else gradwire_trick()"

NAMES = {
    "eval": "builtins:eval",
    "exec": "builtins:exec",
    "compile": "builtins:compile",
    "import": "builtins:__import__",
    "open": "builtins:open",
    "getattr": "builtins:getattr",
    "os.system": "os:system",
    "posix.system": "posix:system",
    "subprocess": "subprocess:getoutput",
    "code in a module that would be imported": "this:s",
    "importlib": "importlib:import_module",
    "pickle": "pickle:loads",
    "the unpickler of our own": "gradwire.rpc.codec.pickle_codec:loads",
    "its class": "gradwire.rpc.codec.pickle_codec:PickleCodec.unpack",
    "what unpacks for children": "gradwire.launch.child:unpickled",
    "expose itself": "gradwire:expose",
    "the registry": "gradwire.rpc.expose.registry:Registry",
    "a helper of rref": "gradwire.rpc.rref:current_worker",
    "torch.load": "torch:load",
    "torch.save": "torch:save",
    "torch.serialization": "torch.serialization:load",
    "torch.hub": "torch.hub:load",
    "torch.jit.load": "torch.jit:load",
    "torch.jit.script": "torch.jit:script",
    "torch.compile": "torch:compile",
    "torch.package": "torch.package:PackageImporter",
    "torch.ops.load_library": "torch.ops:load_library",
    "torch.classes": "torch.classes:load_library",
    "from_file": "torch:from_file",
    "aten from_file": "torch.ops.aten:from_file",
    "aten save": "torch.ops.aten:save",
    "an overload of it": "torch.ops.aten:from_file.default",
    "cpp_extension": "torch.utils.cpp_extension:load_inline",
    "a walk over torch's dots": "torch:hub.load",
    "a walk to its imports": "torch.nn.functional:torch.load",
    "a walk from a listed function": "torch:sin.__self__.load",
    "a walk from a listed class": "torch.nn:Linear.__init__.__globals__",
    "the constructor of a listed class": "torch.nn:Linear.__init__",
    "a class body": "builtins:type",
    "__build_class__": "builtins:__build_class__",
    "a name the module imported": f"{SHOP}:system",
    "a module it imported": f"{SHOP}:os",
    "a walk into that": f"{SHOP}:os.system",
    "an import under another name": f"{SHOP}:launch",
    "an alias": f"{SHOP}:shell",
    "a partial": f"{SHOP}:buy_later",
    "functools.partial": "functools:partial",
    "a lambda": f"{SHOP}:by_lambda",
    "a private function": f"{SHOP}:_steal",
    "what a decorator wraps": f"{SHOP}:careful.__wrapped__",
    "its globals": f"{SHOP}:buy.__globals__",
    "its code": f"{SHOP}:buy.__code__",
    "its call": f"{SHOP}:buy.__call__",
    "a static method from elsewhere": f"{SHOP}:Basket.runner",
    "a class method from elsewhere": f"{SHOP}:Basket.at_class",
    "what it calls": f"{SHOP}:Basket.runner.__call__",
    "a private static method": f"{SHOP}:Basket._open",
    "a module in a class": f"{SHOP}:Basket.os.system",
    "a nested class": f"{SHOP}:Basket.Inner",
    "its static method": f"{SHOP}:Basket.Inner.go",
    "a private class": f"{SHOP}:_Till",
    "its static method too": f"{SHOP}:_Till.open",
    "__reduce__": f"{SHOP}:Basket.__reduce__",
    "a method without its object": f"{SHOP}:Basket.add",
    "a property": f"{SHOP}:Basket.total.fget",
    "subclasses": f"{SHOP}:Basket.__subclasses__",
    "the module itself": SHOP,
    "its builtins": f"{SHOP}:__builtins__",
    "its loader": f"{SHOP}:__loader__.exec_module",
    "another spelling of the module": f"tests.security:shop.{'system'}",
    "a name with a NUL": f"{SHOP}:buy\0",
    "a name with a line end": f"{SHOP}:buy\n",
    "letters that look alike": f"{SHOP}:b\u0443y",
    "full width letters": f"{SHOP}:\uff42uy",
    "dots in the module": "tests..security.shop:buy",
    "a path": "/bin/sh:main",
    "nothing": "",
    "main's imports": "__main__:os.system",
    "mp_main": "__mp_main__:system",
    "this very test": f"{__name__}:ran",
}


@pytest.mark.parametrize("how", NAMES)
def test_no_name_leads_to(workers, how):
    for argument in (TOUCH, CODE):
        with pytest.raises(NotExposed, match="is not exposed on this worker") as refused:
            call(workers, NAMES[how], argument)
        assert refused.value.hint.startswith(("decorate it with @gradwire.expose", "use it inside"))
        with pytest.raises(NotExposed):
            fetch(workers, NAMES[how], argument)


SKELETONS = {
    "a function by name as an argument": [Tag.NAMED, "os:system"],
    "eval as an argument": [Tag.NAMED, "builtins:eval"],
    "an enum that is a function": [Tag.ENUM, "builtins:eval", CODE],
    "an enum that is a class of torch": [Tag.ENUM, "torch.nn:Linear", "weight"],
    "a named tuple of something else": [Tag.NAMED_TUPLE, "os:system", "command", TOUCH],
    "a dataclass of something else": [Tag.DATACLASS, "subprocess:Popen", "args", TOUCH],
    "a dataclass of an exposed class that is none": [Tag.DATACLASS, f"{SHOP}:Basket", "", TOUCH],
    "parts of an exposed class that has none": [Tag.PARTS, f"{SHOP}:Basket", TOUCH],
    "parts of a function": [Tag.PARTS, f"{SHOP}:buy", TOUCH],
    "a codec that nobody registered": [Tag.REGISTERED, "builtins:eval", CODE],
    "a return type of torch's": [Tag.RETURN_TYPE, "system", TOUCH],
    "a dunder for a return type": [Tag.RETURN_TYPE, "__class__", TOUCH],
    "a pickle": [Tag.PICKLED, b"cos\nsystem\n(S'touch marker'\ntR.", 0, 0],
    "a word of torch that is a module": [Tag.TORCH_CONSTANT, "torch.hub"],
    "a device that is a path": [Tag.DEVICE, "/etc/passwd"],
    "an array of objects": [Tag.ARRAY, 0, "|O8", False, 1],
    "a scalar that is an object": [Tag.NUMPY_SCALAR, "|O8", b"01234567"],
    "a dtype that is text to evaluate": [Tag.NUMPY_SCALAR, "(1,)i4,f8", b""],
    "a tag that is text": ["__reduce__", "os:system", TOUCH],
    "a tag beyond all": [1000, "os:system"],
    "a map": {"__reduce__": ["os.system", TOUCH]},
    "an extension of msgpack": msgspec.msgpack.Ext(1, b"os.system"),
    "a reference that did not come": [64, 0],
    "a reference by another number": [64, "os:system"],
}


@pytest.mark.parametrize("how", SKELETONS)
def test_no_packed_value_runs(workers, how):
    with pytest.raises(GradwireError) as refused:
        send(workers, f"{SHOP}:buy", arguments(SKELETONS[how]))
    assert refused.value.type_name.startswith("gradwire.errors:")


@pytest.mark.parametrize(
    "skeleton",
    [
        [Tag.LIST, 1],
        [Tag.TUPLE, [Tag.TUPLE]],
        [Tag.TUPLE, [Tag.LIST], [Tag.DICT]],
        [Tag.TUPLE, [Tag.TUPLE], [Tag.TUPLE]],
        None,
        [Tag.TUPLE, [Tag.TUPLE], [Tag.DICT, 1, 2]],
        [Tag.TUPLE, [Tag.TUPLE], [Tag.DICT, "__class__", [Tag.NAMED, "os:system"]]],
    ],
)
def test_arguments_that_are_none_are_refused(workers, skeleton):
    with pytest.raises((GradwireError, TypeError)):
        send(workers, f"{SHOP}:buy", skeleton)


def test_a_function_does_not_come_with_its_call(workers):
    for argument in ([Tag.PICKLED, b"cos\nsystem\n.", 0, 0], [Tag.NAMED, f"{SHOP}:buy"], TOUCH):
        with pytest.raises(GradwireError) as refused:
            send(workers, "!system", arguments(argument, TOUCH))
        assert refused.value.type_name in (
            "gradwire.errors:NotExposed",
            "gradwire.errors:BadMessage",
        )


def test_the_result_of_a_refused_call_is_not_kept(workers):
    with pytest.raises(NotExposed, match="os:system is not exposed"):
        fetch(workers, "os:system", TOUCH)


# --- methods --------------------------------------------------------------------------------------

METHODS = [
    "__init__", "__class__", "__reduce__", "__reduce_ex__", "__getattribute__", "__dict__",
    "__init_subclass__", "__subclasshook__", "__setattr__", "__format__", "__dir__", "_empty",
    "_open", "total", "runner", "hook", "os", "Inner", "Inner.go", "os.system", "items",
    "items.append", "add.__func__", "add.__globals__", "add ", "\uff41dd", "ADD", "", ".",
    "__call__", "runs_later", "borrowed", "at_class",
]  # fmt: skip


@pytest.fixture(scope="module")
def basket(workers):
    return workers[0].run(gradwire.remote, "w1", shop.Basket)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_of_a_reference_but_the_public_ones(workers, basket, name):
    with pytest.raises((NotExposed, AttributeError)) as refused:
        call(workers, f".{name}", basket, TOUCH)
    assert refused.value.worker == "w1"
    assert workers[0].run(basket.rpc_sync().weigh) == "heavy"


@pytest.mark.parametrize("maker", [shop.till, shop.launcher, shop.module_os])
@pytest.mark.parametrize("name", ["__call__", "system", "open", "popen", "go", "__getattribute__"])
def test_what_is_not_exposed_answers_nothing_though_somebody_refers_to_it(workers, maker, name):
    held = workers[0].run(gradwire.remote, "w1", maker)
    with pytest.raises((NotExposed, AttributeError)):
        call(workers, f".{name}", held, TOUCH)


@pytest.mark.parametrize("argument", [None, 1, "w1", [1]])
def test_a_method_is_called_on_a_reference_only(workers, argument):
    with pytest.raises(GradwireError, match="was called without a reference"):
        call(workers, ".add", argument, TOUCH)


# --- others that run things for a peer ------------------------------------------------------------


def test_a_remote_module_is_made_of_what_is_exposed_only(workers):
    from gradwire.nn import remote_functions as owner

    for make in ([Tag.NAMED, "builtins:eval"], [Tag.NAMED, f"{SHOP}:_Till"], CODE, 7):
        with pytest.raises((GradwireError, TypeError)):
            send(
                workers,
                f"{owner.__name__}:create",
                arguments(make, [Tag.TUPLE, CODE], [Tag.DICT], "cpu"),
            )

    def program():
        gradwire.RemoteModule("w1", os.system, (TOUCH,)).forward()

    with pytest.raises(NotExposed):
        workers[0].run(program)


def test_a_remote_module_applies_what_is_exposed_only(workers):
    def program():
        module = gradwire.RemoteModule("w1", shop.Layer)
        with pytest.raises(NotExposed, match="builtins:exec is not exposed"):
            module.apply(exec)
        with pytest.raises(NotExposed):
            module.apply(os.system)

    workers[0].run(program)


@pytest.mark.parametrize(
    "name", ["module_of", "moved", "_at_rest", "nn", "torch", "tree_map_only", "reference_to"]
)
def test_its_helpers_are_not_exposed(workers, name):
    with pytest.raises(NotExposed):
        call(workers, f"gradwire.nn.remote_functions:{name}", torch.ones(1), "cpu")


def test_an_optimizer_is_of_a_class_that_is_exposed(workers):
    shard = "gradwire.optim.shard:Shard"
    for cls in ([Tag.NAMED, "subprocess:Popen"], [Tag.NAMED, f"{SHOP}:_Till"]):
        with pytest.raises(NotExposed):
            send(workers, shard, arguments(cls, [Tag.LIST], [Tag.TUPLE], [Tag.DICT]))
    for cls in ([Tag.NAMED, f"{SHOP}:buy"], [Tag.NAMED, f"{SHOP}:Basket"], CODE):
        with pytest.raises((GradwireError, TypeError), match="is no optimizer class"):
            send(workers, shard, arguments(cls, [Tag.LIST], [Tag.TUPLE], [Tag.DICT]))


@pytest.mark.parametrize(
    "name", ["_prepare", "_commit", "_undo", "_here", "_optimizer", "__init__", "_set"]
)
def test_a_shard_has_public_methods_only(workers, name):
    def program():
        parameter = gradwire.remote("w1", torch.nn.Parameter, (torch.ones(1),))
        optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
        return next(iter(optimizer._shards.values()))

    shard = workers[0].run(program)
    with pytest.raises(NotExposed, match="is private"):
        call(workers, f".{name}", shard, TOUCH)


def test_an_async_function_is_no_way_in(workers):
    with pytest.raises(NotExposed):
        call(workers, f"{SHOP}:slowly.__wrapped__", TOUCH)


def test_a_name_that_is_overwritten_is_what_the_user_exposed(workers, monkeypatch):
    monkeypatch.setattr(shop, "buy", os.system)
    assert call(workers, f"{SHOP}:buy", "ticket") == "a ticket"
    monkeypatch.setattr(shop, "declared", os.system)
    assert call(workers, f"{SHOP}:declared", TOUCH) == TOUCH


def test_an_exception_that_is_answered_makes_no_other_class(workers):
    from gradwire.agent.messages import Failure

    agent = workers[0].worker.agent
    for name in ("builtins:SystemExit", "subprocess:CalledProcessError", "os:system", "a", ""):
        revived = agent.revive(Failure(name, "text", None, "", "w1"))
        assert type(revived) is gradwire.RemoteError


def test_what_is_for_sale_is_sold(workers):
    """The shop does work: none of the refusals above is of something else."""
    assert call(workers, f"{SHOP}:buy", "ticket") == "a ticket"
    assert call(workers, f"{SHOP}:careful", TOUCH) == "logged"
    assert call(workers, f"{SHOP}:Basket.weigh", TOUCH) == "heavy"
    assert workers[0].run(gradwire.rpc_sync, "w1", torch.sin, (torch.zeros(1),)) == 0
    assert torch.equal(call(workers, "torch:neg", torch.ones(1)), -torch.ones(1))
