"""What a peer may name, and every way around it that we could think of."""

from __future__ import annotations

import functools
import os
import sys
import threading
from os.path import join
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional

from gradwire import errors
from gradwire.errors import NotExposed, UsageError
from gradwire.rpc.expose import torch_allowlist
from gradwire.rpc.expose.registry import (
    _BUILTIN_METHODS,
    DUNDERS,
    Registry,
    exception_name,
    expose,
    name_of,
)
from tests.case_names import case_name

HERE = sys.modules[__name__]
HINT = (
    "hint: decorate it with @gradwire.expose, or pass expose=[module] to init_rpc/run/cluster"
    " on the callee"
)
CLASS_HINT = (
    "hint: decorate the class with @gradwire.expose, or pass expose=[module] to"
    " init_rpc/run/cluster on the owner"
)
DEFINE_HINT = "hint: define it with def at module level and expose it"
WRAP_HINT = "hint: use it inside a function or method of yours that is exposed on the owner"


def here(qualname: str) -> str:
    return f"{__name__}:{qualname}"


# --- what this module defines, for the registries below -------------------------------------------


def double(x):
    return 2 * x


def _private(x):
    return x


alias = _private
an_import = join
a_partial = functools.partial(double, 1)
a_lambda = lambda x: x  # noqa: E731
a_value = 3


@functools.lru_cache
def remembered(x):
    return x


@functools.lru_cache
@expose
def declared_and_wrapped(x):
    return x


@expose
def declared(x):
    return x


@expose
def _declared_private(x):
    return x


def shadowed():
    return "first"


first_shadowed = shadowed


def shadowed():
    return "second"


class Base:
    def inherited(self):
        return "inherited"

    @classmethod
    def make(cls):
        return cls()

    @staticmethod
    def add(a, b):
        return a + b


class Counter(Base):
    limit = 10
    other = SimpleNamespace
    thread = threading.Thread
    run = os.system

    def __init__(self):
        self.n = 0
        self.stored = double

    def up(self):
        self.n += 1
        return self.n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(())

    def _hidden(self):
        return "hidden"

    @property
    def size(self):
        raise AssertionError("a property must not be read for a peer")

    @functools.cached_property
    def late(self):
        raise AssertionError("a property must not be read for a peer")

    @staticmethod
    def _inner():
        return "inner"

    class Nested:
        def go(self):
            return "nested"


class SubCounter(Counter):
    def down(self):
        return -1


@expose
class Declared:
    def go(self):
        return "gone"

    @classmethod
    def named(cls):
        return cls.__name__

    @staticmethod
    def twice(x):
        return 2 * x


class SubDeclared(Declared):
    def more(self):
        return "more"


class PartlyExposed:
    @expose
    def open(self):
        return "open"

    def closed(self):
        return "closed"

    @staticmethod
    @expose
    def free(x):
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Fallback(ValueError):
    pass


class Leave(BaseException):
    pass


@pytest.fixture
def bare():
    return Registry()


@pytest.fixture
def registry():
    return Registry(expose=[HERE])


@pytest.fixture
def script(monkeypatch):
    """A `__main__` script, run under the name given, as a spawned worker runs it or its parent."""

    def run(name: str) -> ModuleType:
        module = ModuleType(name)
        source = (
            "import os\n"
            "from math import sqrt\n"
            "def step(x): return x + 1\n"
            "def _mine(x): return x\n"
            "other = step\n"
            "class Model:\n"
            "    @classmethod\n"
            "    def make(cls): return cls()\n"
            "    def go(self): return 'gone'\n"
            "    class Inner: pass\n"
            "class Wrong(ValueError): pass\n"
        )
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, "__main__", module)
        if name == "__mp_main__":
            monkeypatch.setitem(sys.modules, name, module)
        return module

    return run


# --- refused by every registry --------------------------------------------------------------------

TRICKS = [
    # code, files, processes, state
    "os:system",
    "posix:system",
    "subprocess:run",
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "builtins:getattr",
    "builtins:open",
    "builtins:type",
    "importlib:import_module",
    "pickle:loads",
    "operator:attrgetter",
    "functools:partial",
    "types:FunctionType",
    # torch, where it reads files, loads code or sets state
    "torch:load",
    "torch.serialization:load",
    "torch:save",
    "torch:from_file",
    "torch:frombuffer",
    "torch:from_dlpack",
    "torch:compile",
    "torch:set_default_device",
    "torch:set_num_threads",
    "torch:manual_seed",
    "torch:set_rng_state",
    "torch:vmap",
    "torch:cond",
    "torch.hub:load",
    "torch.jit:load",
    "torch.ops:load_library",
    "torch.classes:load_library",
    "torch.utils.cpp_extension:load",
    "torch.multiprocessing:spawn",
    "torch.ops.aten:from_file",
    "torch.ops.aten:save",
    "torch.ops.aten:sin.default",
    "torch.ops.aten:__class__",
    "torch:sparse_coo_tensor",
    "torch:segment_reduce",
    "torch:ctc_loss",
    "torch:Tensor",
    "torch:Tensor.numpy",
    "torch:Tensor.data_ptr",
    "torch:Tensor.set_",
    "torch:Tensor.register_hook",
    "torch:Tensor.__reduce_ex__",
    "torch:Tensor.add.__call__",
    "torch.nn:Module.compile",
    "torch.nn:Linear.forward",
    # walks
    "torch:nn.Module",
    "torch:nn.functional.relu",
    "torch.nn:functional",
    "torch.nn:functional.relu",
    "torch:os.system",
    "torch:hub.load",
    "torch.nn.functional:torch.load",
    "torch.nn.functional:__builtins__",
    "torch.nn.functional:warnings",
    "torch.nn:Linear.__init__",
    "torch.nn:Linear.__init__.__globals__",
    "torch.nn:modules.linear.Linear",
    "gradwire.errors:NotExposed.__init__.__globals__",
    # the registry itself
    "gradwire.rpc.expose.registry:expose",
    "gradwire.rpc.expose.registry:_DECLARED",
    "gradwire.rpc.expose.torch_allowlist:maybe_find",
    # what is not a name
    "",
    ":",
    "torch",
    "torch:",
    ":sin",
    "torch::sin",
    "torch.sin",
    "torch:sin ",
    " torch:sin",
    "torch:sin\0",
    "torch:sin\n",
    "torch:SIN",
    "torch:.sin",
    "torch:sin.",
    "torch.:sin",
    "__main__:",
    "__main__:.",
    ".",
    "# torch functions a peer may name: pure functions of tensors, one module:name a line, sorted.",
    # letters that look alike: a long s, a Cyrillic o, full width, a combining mark
    "torch:\u017fin",
    "t\u043erch:sin",
    "torch:\uff53\uff49\uff4e",
    "torch:sin\u0301",
    "\uff54orch:load",
]


@pytest.mark.parametrize("name", TRICKS)
def test_no_registry_finds(name, registry):
    with pytest.raises(NotExposed, match="is not exposed on this worker"):
        registry.lookup(name)


OURS = [
    "_private",
    "alias",
    "os",
    "join",
    "an_import",
    "threading",
    "pytest",
    "expose",
    "a_partial",
    "a_lambda",
    "<lambda>",
    "a_value",
    "first_shadowed",
    "HERE",
    "__name__",
    "__builtins__",
    "__dict__",
    "double.__globals__",
    "double.__call__",
    "double.__code__",
    "remembered.cache_clear",
    "Counter.__init__",
    "Counter.__init__.__globals__",
    "Counter.__dict__",
    "Counter.__subclasses__",
    "Counter.mro",
    "Counter.up",
    "Counter.up.__globals__",
    "Counter.make.__func__",
    "Counter.add.__globals__",
    "Counter._hidden",
    "Counter._inner",
    "Counter.size",
    "Counter.late",
    "Counter.limit",
    "Counter.other",
    "Counter.thread",
    "Counter.run",
    "Counter.Nested",
    "Counter.Nested.go",
    "Net.layer",
    "Net.forward",
    "PartlyExposed.open",
    "torch.load",
]


@pytest.mark.parametrize("qualname", OURS)
def test_an_exposed_module_does_not_give(qualname, registry):
    with pytest.raises(NotExposed, match="is not exposed on this worker"):
        registry.lookup(here(qualname))


def test_a_refusal_names_the_function_and_the_way_out(bare):
    with pytest.raises(NotExposed) as refused:
        bare.lookup("shop:sell")
    assert str(refused.value) == f"shop:sell is not exposed on this worker\n{HINT}"


def test_a_refusal_shows_a_strange_name_short_and_escaped(bare):
    with pytest.raises(NotExposed) as refused:
        bare.lookup("evil\n" * 1000)
    assert refused.value.message == repr(("evil\n" * 1000)[:200]) + " is not exposed on this worker"
    with pytest.raises(NotExposed, match=r"^'' is not exposed on this worker"):
        bare.lookup("")


def test_a_lookup_imports_nothing(bare, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(NotExposed):
        bare.lookup("this:s")
    assert "this" not in sys.modules


# --- found ----------------------------------------------------------------------------------------


def test_a_module_gives_the_public_functions_and_classes_it_defines(registry, bare):
    for target in (double, remembered, Counter, Counter.add, Fallback):
        assert registry.lookup(name_of(target)) is target
        with pytest.raises(NotExposed, match="is not exposed on this worker"):
            bare.lookup(name_of(target))


def test_a_class_may_be_called_and_so_may_its_class_methods_inherited_ones_too(registry):
    assert type(registry.lookup(name_of(Counter))()) is Counter
    assert name_of(Counter.make) == here("Counter.make")
    assert type(registry.lookup(name_of(Counter.make))()) is Counter


def test_an_autograd_function_is_applied_by_name(registry):
    apply = registry.lookup(name_of(Squared.apply))
    x = torch.tensor(3.0, requires_grad=True)
    apply(x).backward()
    assert x.grad == 6


def test_single_functions_and_classes_are_exposed_alone_private_ones_too():
    registry = Registry(expose=[_private, Counter, Counter.Nested])
    assert registry.lookup(here("_private")) is _private
    assert registry.lookup(here("Counter")) is Counter
    assert registry.lookup(here("Counter.Nested")) is Counter.Nested
    with pytest.raises(NotExposed, match="double is not exposed"):
        registry.lookup(here("double"))


def test_a_torch_function_outside_the_lists_can_be_exposed_singly(bare):
    name = name_of(torch.hub.list)
    assert Registry(expose=[torch.hub.list]).lookup(name) is torch.hub.list
    with pytest.raises(NotExposed, match=r"torch\.hub:list is not exposed"):
        bare.lookup(name)


def test_declared_functions_and_classes_are_found_in_any_registry(bare):
    assert bare.lookup(here("declared")) is declared
    assert bare.lookup(here("_declared_private")) is _declared_private
    assert bare.lookup(here("Declared")) is Declared
    assert bare.lookup(here("Declared.twice")) is Declared.twice
    assert bare.lookup(name_of(Declared.named))() == "Declared"
    assert bare.lookup(name_of(PartlyExposed.free)) is PartlyExposed.free


def test_a_decorator_above_expose_takes_effect(bare):
    assert bare.lookup(name_of(declared_and_wrapped)) is declared_and_wrapped


def test_a_declaration_is_not_inherited_and_ends_with_the_name(bare, monkeypatch):
    with pytest.raises(NotExposed, match="SubDeclared is not exposed"):
        bare.lookup(here("SubDeclared"))
    monkeypatch.setattr(HERE, "declared", double)
    with pytest.raises(NotExposed, match="declared is not exposed"):
        bare.lookup(here("declared"))


def test_what_was_looked_up_before_is_looked_up_again_once_another_stands_there(monkeypatch):
    registry = Registry(expose=[HERE.double])
    for _ in range(2):
        assert registry.lookup(here("declared")) is declared
        assert registry.lookup(here("double")) is double
        assert registry.lookup("torch:sin") is torch.sin
    monkeypatch.setattr(HERE, "declared", double)
    monkeypatch.setattr(HERE, "double", declared)
    monkeypatch.setattr(torch, "sin", torch.cos)
    with pytest.raises(NotExposed, match="declared is not exposed"):
        registry.lookup(here("declared"))
    assert registry.lookup(here("double")) is double  # it was given, whatever stands there now
    assert str(registry.lookup("torch:sin")).startswith("<built-in method sin ")
    monkeypatch.undo()
    assert registry.lookup(here("declared")) is declared


def test_expose_returns_what_it_is_given():
    assert expose(declared) is declared
    assert expose(Declared) is Declared


def test_expose_refuses_what_has_no_name_of_its_own():
    def inside():
        """Not at module level."""

    with pytest.raises(NotExposed, match="inside is local: no other worker could find it"):
        expose(inside)
    with pytest.raises(UsageError) as refused:
        expose(classmethod(double))
    assert str(refused.value) == (
        "@expose was put on a classmethod object\n"
        "hint: it goes on functions and classes, below @staticmethod and @classmethod"
    )


def test_a_registry_takes_modules_functions_and_classes_only():
    with pytest.raises(UsageError) as refused:
        Registry(expose=["torch"])
    assert str(refused.value) == ("expose takes modules, functions and classes, not a str object")


# --- the main script ------------------------------------------------------------------------------


@pytest.mark.parametrize("run_as", ["__main__", "__mp_main__"])
def test_the_script_is_one_module_under_both_of_its_names(run_as, script, bare):
    main = script(run_as)
    assert name_of(main.step) == "__main__:step"
    assert name_of(main.Model) == "__main__:Model"
    assert name_of(main.Model.make) == "__main__:Model.make"
    assert bare.lookup("__main__:step") is main.step
    assert bare.lookup("__main__:Model") is main.Model
    assert bare.lookup("__main__:Model.make") == main.Model.make
    assert bare.method(main.Model(), "go")() == "gone"
    assert bare.exception_type(exception_name(main.Wrong)) is main.Wrong
    assert Registry(expose=[main]).lookup("__main__:step") is main.step


def test_the_script_may_define_a_function_anew(script, bare):
    main = script("__main__")
    before = bare.lookup("__main__:step")
    assert bare.lookup("__main__:step") is before
    exec("def step(): pass", vars(main))
    assert bare.lookup("__main__:step") is main.step is not before
    del main.step
    with pytest.raises(NotExposed, match="__main__:step is not exposed"):
        bare.lookup("__main__:step")


@pytest.mark.parametrize(
    "qualname",
    ["_mine", "other", "os", "os.system", "sqrt", "Model.go", "Model.Inner", "Model.__init__"],
)
def test_the_script_does_not_give(qualname, script, bare):
    script("__main__")
    with pytest.raises(NotExposed, match="is not exposed on this worker"):
        bare.lookup(f"__main__:{qualname}")


def test_a_process_may_have_no_script(monkeypatch, bare):
    monkeypatch.delitem(sys.modules, "__main__")
    with pytest.raises(NotExposed, match="__main__:step is not exposed"):
        bare.lookup("__main__:step")


# --- names at the caller --------------------------------------------------------------------------

TORCH_NAMES = [
    (torch.sin, "torch:sin"),
    (torch.add, "torch:add"),
    (torch.tensor, "torch:tensor"),
    (torch.einsum, "torch:einsum"),
    (torch.linalg.det, "torch.linalg:det"),
    (torch.fft.rfft, "torch.fft:rfft"),
    (torch.special.expit, "torch.special:expit"),
    (torch.nn.functional.relu, "torch.nn.functional:relu"),
    (torch.nn.functional.max_pool2d, "torch.nn.functional:max_pool2d"),
    (torch.nn.functional.conv2d, "torch:conv2d"),
    (torch.Tensor.add, "torch:Tensor.add"),
    (torch.Tensor.backward, "torch:Tensor.backward"),
    (torch.nn.Linear, "torch.nn:Linear"),
    (torch.nn.Parameter, "torch.nn:Parameter"),
    (torch.nn.Embedding.from_pretrained, "torch.nn:Embedding.from_pretrained"),
    (torch.optim.SGD, "torch.optim:SGD"),
    (torch.ops.aten.sin, "torch.ops.aten:sin"),
]


@pytest.mark.parametrize(("target", "name"), TORCH_NAMES, ids=[name for _, name in TORCH_NAMES])
def test_torch_travels_by_its_public_name(target, name, bare):
    assert name_of(target) == name
    assert bare.lookup(name) == target


def test_unlisted_torch_functions_have_names_too_and_the_callee_refuses_them(bare):
    for target in (torch.load, torch.hub.load, torch.ops.aten.from_file, eval):
        with pytest.raises(NotExposed, match="is not exposed on this worker"):
            bare.lookup(name_of(target))


@pytest.mark.parametrize(
    "target",
    [torch.from_file, torch.Tensor.numpy, torch.set_num_threads, torch.ops.aten.sin.default],
)
def test_unlisted_compiled_functions_of_torch_are_refused_at_the_caller(target):
    with pytest.raises(NotExposed) as refused:
        name_of(target)
    assert str(refused.value) == (
        f"torch's {target.__name__} is not on the list of torch functions that peers may call\n"
        "hint: call it inside a function of yours, and expose that one"
    )


def local_function():
    def inner():
        """Not at module level."""

    return inner


def local_class():
    class Inner:
        """Not at module level."""

    return Inner


UNNAMED = [
    (a_lambda, f"{__name__}:<lambda> is a lambda, which has no name to be called by"),
    (
        local_function(),
        f"{__name__}:local_function.<locals>.inner is local: no other worker could find it",
    ),
    (
        local_class(),
        f"{__name__}:local_class.<locals>.Inner is local: no other worker could find it",
    ),
    ([].append, "a builtin_function_or_method object has no name to be called by"),
    (str.upper, "a method_descriptor object has no name to be called by"),
]


@pytest.mark.parametrize(("target", "message"), UNNAMED, ids=[text for _, text in UNNAMED])
def test_what_has_no_module_level_name_is_refused(target, message):
    with pytest.raises(NotExposed) as refused:
        name_of(target)
    assert str(refused.value) == f"{message}\n{DEFINE_HINT}"


def test_methods_are_referred_to_references():
    with pytest.raises(NotExposed) as bound:
        name_of(Counter().up)
    assert str(bound.value) == (
        f"{__name__}:Counter.up is bound to an object, which cannot be serialized\n"
        "hint: use rref.rpc_sync().up(...) on a reference to the object"
    )
    with pytest.raises(NotExposed) as unbound:
        name_of(Counter.up)
    assert str(unbound.value) == (
        f"{__name__}:Counter.up is a method of objects\n"
        "hint: use rref.rpc_sync().up(...) on a reference to the object"
    )


def test_a_name_that_leads_elsewhere_is_refused(monkeypatch):
    with pytest.raises(NotExposed) as refused:
        name_of(first_shadowed)
    assert str(refused.value) == (
        f"{__name__}:shadowed leads to a function object here, not to the function given\n"
        "hint: give it a module-level name of its own"
    )
    monkeypatch.delattr(HERE, "shadowed")
    with pytest.raises(NotExposed, match="shadowed leads to nothing here"):
        name_of(first_shadowed)


# --- methods of referred objects ------------------------------------------------------------------


def test_public_methods_of_exposed_classes_are_bound(registry):
    counter = Counter()
    assert registry.method(counter, "up")() == 1
    assert registry.method(counter, "__len__")() == 1
    assert registry.method(counter, "add")(1, 2) == 3
    assert type(registry.method(counter, "make")()) is Counter
    assert counter.n == 1


def test_inherited_methods_come_with_the_class_but_overrides_need_their_own_exposure():
    registry = Registry(expose=[Counter])
    assert registry.method(Counter(), "inherited")() == "inherited"
    assert registry.method(SubCounter(), "inherited")() == "inherited"
    assert registry.method(SubCounter(), "up")() == 1
    with pytest.raises(NotExposed) as refused:
        registry.method(SubCounter(), "down")
    assert str(refused.value) == (
        f"{__name__}:SubCounter.down is not exposed on this worker\n{CLASS_HINT}"
    )


def test_a_declared_class_opens_its_methods_and_a_declared_method_itself(bare):
    assert bare.method(Declared(), "go")() == "gone"
    assert bare.method(SubDeclared(), "go")() == "gone"
    with pytest.raises(NotExposed, match=r"SubDeclared\.more is not exposed"):
        bare.method(SubDeclared(), "more")
    assert bare.method(PartlyExposed(), "open")() == "open"
    with pytest.raises(NotExposed, match=r"PartlyExposed\.closed is not exposed"):
        bare.method(PartlyExposed(), "closed")


@pytest.mark.parametrize(
    "name",
    ["_hidden", "__init__", "__class__", "__dict__", "__reduce__", "__iter__", "__getattribute__"],
)
def test_private_methods_are_refused(name, registry):
    with pytest.raises(NotExposed) as refused:
        registry.method(Counter(), name)
    assert str(refused.value) == (
        f"{__name__}:Counter.{name} is private: a reference offers public methods only"
    )


@pytest.mark.parametrize(
    "name", ["n", "stored", "limit", "size", "late", "other", "thread", "run", "Nested"]
)
def test_attributes_that_are_not_methods_are_refused_unread(name, registry):
    with pytest.raises(NotExposed) as refused:
        registry.method(Counter(), name)
    assert str(refused.value) == f"{__name__}:Counter.{name} is not a method\n{WRAP_HINT}"


@pytest.mark.parametrize("name", ["absent", "", "up.__globals__", "up ", "u\uff50"])
def test_missing_attributes_are_missing_as_in_python(name, registry):
    with pytest.raises(AttributeError) as missing:
        registry.method(Counter(), name)
    assert str(missing.value) == f"'Counter' object has no attribute {name!r}"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Base(), "inherited"),
        (Counter, "make"),
        (Counter, "mro"),
        (double, "__call__"),
        (Counter().up, "__call__"),
        (os, "system"),
        (threading.Thread(), "start"),
        (SimpleNamespace(go=double), "go"),
        ((x for x in ()), "send"),
        (ValueError(), "with_traceback"),
        (torch.Generator(), "manual_seed"),
        (torch.Size([1]), "numel"),
    ],
    ids=case_name,
)
def test_values_of_classes_that_are_not_exposed_answer_nothing(value, name, bare):
    with pytest.raises((NotExposed, AttributeError)):
        bare.method(value, name)


def test_tensors_modules_and_optimizers_answer_by_the_lists(bare):
    tensor = torch.ones(2, 3)
    assert bare.method(tensor, "sum")() == 6
    assert bare.method(tensor, "__len__")() == 2
    assert bare.method(torch.nn.Parameter(tensor), "size")() == (2, 3)
    linear = torch.nn.Linear(3, 1)
    assert bare.method(linear, "__call__")(tensor).shape == (2, 1)
    assert bare.method(linear, "forward")(tensor).shape == (2, 1)
    assert len(list(bare.method(linear, "parameters")())) == 2
    assert bare.method(torch.nn.BatchNorm1d(3), "forward")(tensor).shape == (2, 3)
    optimizer = object.__new__(torch.optim.SGD)  # its constructor imports for over a second
    assert bare.method(optimizer, "zero_grad") == optimizer.zero_grad
    assert bare.method(optimizer, "step") == optimizer.step


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.ones(1), "numpy"),
        (torch.ones(1), "data_ptr"),
        (torch.ones(1), "untyped_storage"),
        (torch.ones(1), "share_memory_"),
        (torch.ones(1), "set_"),
        (torch.ones(1), "apply_"),
        (torch.ones(1), "register_hook"),
        (torch.ones(1).to_sparse(), "indices"),
        (torch.nn.Linear(1, 1), "compile"),
        (torch.nn.Linear(1, 1), "apply"),
        (torch.nn.Linear(1, 1), "share_memory"),
        (torch.nn.Linear(1, 1), "register_forward_hook"),
        (torch.nn.Linear(1, 1), "get_submodule"),
        (torch.nn.ParameterDict(), "__getitem__"),
        (Net(), "register_forward_hook"),
        (Net(), "get_submodule"),
        ("{0.__class__}", "format"),
        ("{0.__class__}", "format_map"),
        (1, "to_bytes"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_torch_and_python_define_beyond_the_lists_is_refused(value, name, registry):
    with pytest.raises(NotExposed, match=rf"{name} is not exposed on this worker\n{WRAP_HINT}"):
        registry.method(value, name)


def test_a_module_of_the_users_own_runs_through_call_even_if_only_its_maker_is_exposed(bare):
    net = Net()
    assert bare.method(net, "__call__")(torch.ones(1, 2)).shape == (1, 3)
    with pytest.raises(NotExposed, match=r"Net\.forward is not exposed"):
        bare.method(net, "forward")
    assert Registry(expose=[Net]).method(net, "forward")(torch.ones(1, 2)).shape == (1, 3)


def test_plain_containers_answer(bare):
    values: list[int] = []
    bare.method(values, "append")(3)
    assert bare.method(values, "__getitem__")(0) == 3
    assert bare.method({"a": 1}, "get")("a") == 1
    assert bare.method({1, 2}, "union")({3}) == {1, 2, 3}
    assert bare.method("abc", "upper")() == "ABC"
    assert bare.method(2.0, "is_integer")() is True
    assert bare.method(True, "bit_length")() == 1


def test_the_listed_methods_of_builtins_exist_and_no_other_dunder_is_open():
    for cls, methods in _BUILTIN_METHODS.items():
        assert all(callable(getattr(cls, method)) for method in methods)
        assert {method for method in methods if method.startswith("_")} <= DUNDERS


# --- exceptions -----------------------------------------------------------------------------------


def test_exceptions_are_found_again_if_they_are_builtin_ours_listed_or_exposed(registry, bare):
    known = [
        ValueError,
        KeyError,
        errors.PeerLost,
        torch.OutOfMemoryError,
        torch.linalg.LinAlgError,
    ]
    for kind in known:
        assert bare.exception_type(exception_name(kind)) is kind
    assert exception_name(ValueError) == "builtins:ValueError"
    assert exception_name(errors.PeerLost) == "gradwire.errors:PeerLost"
    assert exception_name(torch.OutOfMemoryError) == "torch:OutOfMemoryError"
    assert registry.exception_type(exception_name(Fallback)) is Fallback
    assert bare.exception_type(exception_name(Fallback)) is None
    assert Registry(expose=[Leave]).exception_type(exception_name(Leave)) is Leave


@pytest.mark.parametrize(
    "name",
    [
        "builtins:SystemExit",
        "builtins:KeyboardInterrupt",
        "builtins:eval",
        "builtins:object",
        "ValueError",
        "torch:sin",
        "torch.nn:Linear",
        "subprocess:CalledProcessError",
        "gradwire.errors:annotations",
        "",
    ],
)
def test_other_names_are_no_exceptions(name, registry):
    assert registry.exception_type(name) is None


def test_the_name_of_a_local_exception_is_only_a_label(bare):
    kind = type("Local", (ValueError,), {"__qualname__": "f.<locals>.Local"})
    assert exception_name(kind) == here("f.<locals>.Local")
    assert bare.exception_type(exception_name(kind)) is None


# --- the lists ------------------------------------------------------------------------------------

LISTS = ["torch_operators.txt", "torch_classes.txt"]
NEVER = """
    apply_ as_subclass asarray classes compile data_ptr default_generator fork from_dlpack
    from_file from_numpy frombuffer get_rng_state get_submodule hub import_ir_module
    initial_seed jit load load_library load_url manual_seed map2_ map_ module_load
    multiprocessing numpy ops parse_ir pickle pin_memory record_stream save script seed
    segment_reduce serialization share_memory share_memory_ sparse_coo_tensor sparse_csr_tensor
    storage to_dlpack trace_module typename untyped_storage vmap wait while_loop
"""
NEVER_STARTS = ("_", "set_", "get_rng", "get_num", "init_num", "is_autocast", "register_", "unsafe")


@pytest.mark.parametrize("file", LISTS)
def test_a_list_is_sorted_and_without_repetition(file):
    lines = torch_allowlist.lines_of(file)
    assert lines == sorted(set(lines))


@pytest.mark.parametrize("file", LISTS)
def test_every_listed_name_is_in_torch(file):
    missing = [
        line for line in torch_allowlist.lines_of(file) if not torch_allowlist._maybe_fetch(line)
    ]
    if missing:  # a name newer than this torch
        assert all(not torch_allowlist.maybe_find(line) for line in missing)
        pytest.skip(f"torch {torch.__version__} lacks {missing}")


@pytest.mark.parametrize("file", LISTS)
def test_no_list_holds_what_must_never_be_reached(file):
    last = {line.replace(":", ".").rpartition(".")[2] for line in torch_allowlist.lines_of(file)}
    open_names = last - DUNDERS
    assert not open_names & set(NEVER.split())
    assert not [name for name in open_names if name.startswith(NEVER_STARTS)]


def test_listed_aten_operators_take_no_path():
    texts = set()
    for line in torch_allowlist.operators():
        packet = torch_allowlist.maybe_find(line) if line.startswith("torch.ops.aten:") else None
        for overload in packet.overloads() if packet is not None else ():
            arguments = getattr(packet, overload)._schema.arguments
            texts |= {argument.name for argument in arguments if "str" in str(argument.type)}
    words = {"interpolation", "padding", "reduce", "rounding_mode", "side"}
    assert texts <= words | {"a", "b", "self"}  # the operands of TorchScript's aten::add, eq, ...


def test_only_listed_names_are_remembered(bare):
    before = torch_allowlist._maybe_function.cache_info().currsize
    for n in range(100):
        with pytest.raises(NotExposed):
            bare.lookup(f"torch:sin{n}")
    assert torch_allowlist._maybe_function.cache_info().currsize == before


def test_what_main_does_not_define_here_may_be_of_a_prompt():
    with pytest.raises(
        NotExposed, match="__main__:no_such is not exposed on this worker"
    ) as raised:
        Registry().lookup("__main__:no_such")

    assert "in a notebook, start the workers with gradwire.start()" in str(raised.value)
