"""Modules on other workers, used from here; the truth is the same module in one process."""

from __future__ import annotations

import copy
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import NotExposed, UnknownWorker, UsageError
from gradwire.rpc.codec.codec import to_msgpack
from gradwire.rpc.codec.walk import Tag
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left
from tests.nn import models

EIGHT = torch.arange(8, dtype=torch.float64)


@pytest.fixture
def workers():
    with cluster(3, expose=[models]) as made:
        with made[0].worker.scope():
            yield made
        assert_nothing_left(made)


def ask(module, func, *args):
    """Run a function on the worker of a module, with a reference to it."""
    return gw.rpc_sync(module.on, func, args=(module.get_module_rref(), *args))


# -- forward


def test_forward_runs_on_the_worker_that_is_named(workers):
    module = gw.RemoteModule("w1/cpu", models.Scaled, (2.0,), {"bias": 1.0})

    with torch.no_grad():
        assert torch.equal(module(EIGHT), 2 * EIGHT + 1)
        assert torch.equal(module.forward(EIGHT, times=3), 6 * EIGHT + 3)
        assert torch.equal(module.forward_async(EIGHT, times=3).wait(), 6 * EIGHT + 3)
    assert (module.on, module.device) == ("w1", "cpu")
    assert module.get_module_rref().owner_name() == "w1"


@pytest.mark.parametrize("place", ["w0", "rank:2", "w2/cpu"])
def test_a_module_lives_on_any_worker_this_one_too(workers, place):
    module = gw.RemoteModule(place, nn.Softmax, kwargs={"dim": 0})

    assert torch.equal(module(EIGHT), torch.softmax(EIGHT, 0))
    assert repr(module) == f"RemoteModule(on={module.on!r}, device='cpu')"


def test_a_function_that_makes_a_module_will_do(workers):
    module = gw.RemoteModule("w1", models.scaled_by_three)

    with torch.no_grad():
        assert torch.equal(module(EIGHT), 3 * EIGHT)


def test_arguments_are_brought_to_the_module_s_device(workers):
    layer = gw.RemoteModule("w1/meta", nn.Linear, (8, 3))
    several = gw.RemoteModule("w1/meta", models.Several)

    with torch.no_grad():
        made = layer(torch.ones(2, 8))
        found = several((EIGHT, EIGHT), named={"third": EIGHT})

    assert (made.device.type, made.shape) == ("meta", (2, 3))
    assert found["sum"].is_meta
    assert found["all"][0].is_meta
    assert found["all"][1][0].is_meta
    assert layer.state_dict()["weight"].is_meta


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, in a thread new to CUDA
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_comes_and_goes_is_on_the_cpu(workers):
    module = gw.RemoteModule("w1/cuda:0", nn.Linear, (3, 2))
    local = nn.Linear(3, 2)
    module.load_state_dict(local.state_dict())
    x = torch.ones(4, 3, requires_grad=True)

    with gw.context():
        y = module(x)
        y.square().sum().backward()
    state = module.state_dict()
    found = ask(module, models.gradients)

    assert ask(module, models.devices) == ["cuda:0"]
    assert (y.device.type, x.grad.device.type, state["weight"].device.type) == ("cpu",) * 3
    local(x.detach()).square().sum().backward()
    torch.testing.assert_close([g.cpu() for g in found], [p.grad for p in local.parameters()])


def test_gradients_flow_through_it_as_in_one_process(workers):
    torch.manual_seed(0)
    x = torch.randn(5, 3, requires_grad=True)
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    far_first, far_second = (
        gw.RemoteModule("w1", nn.Linear, (3, 4)),
        gw.RemoteModule("w2", nn.Linear, (4, 2)),
    )
    far_first.load_state_dict(first.state_dict())
    far_second.load_state_dict(second.state_dict())

    with gw.context():
        far_second(torch.tanh(far_first(x))).square().sum().backward()
    found = [x.grad, *ask(far_first, models.gradients), *ask(far_second, models.gradients)]

    local = x.detach().clone().requires_grad_()
    second(torch.tanh(first(local))).square().sum().backward()
    wanted = [local.grad, *(p.grad for p in (*first.parameters(), *second.parameters()))]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_go_into_the_context_s_map_if_asked_for(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    with gw.context() as context:
        gw.backward(context, [module.forward_async(EIGHT).wait().sum()])
        mapped = ask(module, models.gradients, context)

    assert mapped == [28, 8]
    assert ask(module, models.gradients) == [None, None]


# -- parts


def test_its_parameters_are_references_to_those_on_its_worker(workers):
    module = gw.RemoteModule("w1", nn.Sequential, (), {})
    assert list(module.parameters()) == []
    scaled = gw.RemoteModule("w1", models.Scaled, (2.0,), {"bias": 5.0})

    weight, bias = scaled.remote_parameters()
    with torch.no_grad():
        assert (weight.to_here(), bias.to_here()) == (2, 5)
        assert [p.to_here().item() for p in scaled.parameters()] == [2, 5]
    assert weight.owner_name() == "w1"
    assert [name for name, _ in scaled.named_parameters("far")] == ["far.weight", "far.bias"]
    assert [name for name, _ in scaled.named_buffers()] == ["calls"]
    assert [b.to_here().item() for b in scaled.buffers()] == [0]


def test_an_optimizer_of_this_worker_refuses_them(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    with pytest.raises(TypeError, match="can only optimize Tensors"):
        torch.optim.SGD(module.parameters(), lr=0.1)


def test_train_and_eval_set_the_mode_there(workers):
    module = gw.RemoteModule("w1", nn.Dropout)

    for mode in (False, True):
        assert module.train(mode) is module
        assert ask(module, models.is_training) is module.training is mode
    assert module.eval() is module
    assert ask(module, models.is_training) is module.training is False
    assert torch.equal(module(EIGHT), EIGHT)


def test_requires_grad_and_zero_grad_act_there(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))
    with gw.context():
        module(EIGHT).sum().backward()
    assert ask(module, models.gradients) == [28, 8]

    module.zero_grad(set_to_none=False)
    assert ask(module, models.gradients) == [0, 0]
    module.zero_grad()
    assert ask(module, models.gradients) == [None, None]

    assert module.requires_grad_(False) is module
    with gw.context():
        assert not module(EIGHT).requires_grad


def test_apply_takes_a_function_that_is_exposed_there(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    assert module.apply(models.halve) is module

    assert module.state_dict()["weight"] == 1
    with pytest.raises(UsageError, match="is a lambda"):
        module.apply(lambda _: None)


# -- state


def test_its_state_is_that_of_the_module_there(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,), {"bias": 3.0})
    local = models.Scaled(0.0)

    state = module.state_dict()
    local.load_state_dict(state)

    assert list(state) == ["weight", "bias", "calls"]
    assert (local.weight, local.bias) == (2, 3)
    assert state._metadata == local.state_dict()._metadata
    assert not state["weight"].requires_grad


def test_a_state_is_loaded_there(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))
    told = models.Scaled(7.0, bias=1.0).state_dict(keep_vars=True)  # no warning of a cut graph

    for assign in (False, True):
        keys = module.load_state_dict(told, assign=assign)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert module.state_dict() == {"weight": 7, "bias": 1, "calls": 0}

    keys = module.load_state_dict({"weight": torch.tensor(1.0), "w": EIGHT}, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["bias", "calls"], ["w"])
    with pytest.raises(RuntimeError, match=r'on w1: .*\n.*Unexpected key\(s\) in state_dict: "w"'):
        module.load_state_dict({**told, "w": EIGHT})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({**told, "weight": EIGHT}, strict=False)


def test_inside_a_context_kept_variables_are_differentiable(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    with gw.context():
        weight = module.state_dict(keep_vars=True)["weight"]
        (weight**3).backward()

    assert ask(module, models.gradients) == [12, None]


# -- as a part of another module


def test_a_module_that_holds_one_keeps_its_state_and_mode(workers):
    model, local = models.Hybrid("w1"), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    names = {"0.weight": "here.weight", "0.bias": "here.bias"}
    names |= {"1.weight": "there.weight", "1.bias": "there.bias"}
    told = {names[key]: value for key, value in local.state_dict().items()}
    assert model.load_state_dict(told).missing_keys == []
    state = model.state_dict()
    model.eval()

    assert list(state) == list(told)
    assert all(torch.equal(state[key], told[key]) for key in told)
    assert set(state._metadata) == {"", "here", "there"}
    assert ask(model.there, models.is_training) is False
    assert len(list(model.parameters())) == 2  # those of this worker
    assert model.double().here.weight.dtype == torch.float64


def test_what_does_not_fit_is_told_with_the_names_of_the_whole(workers):
    model = models.Hybrid("w1")
    state = model.state_dict()
    del state["there.bias"]
    state["there.more"] = state["here.bias"]

    keys = model.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["there.bias"], ["there.more"])

    state["there.weight"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"there\.: Error.*\n.*size mismatch for weight"):
        model.load_state_dict(state, strict=False)


# -- travelling


def test_it_travels_and_stands_for_the_same_module(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,)).eval()

    for worker in ("w0", "w1", "w2"):
        with torch.no_grad():
            y, on, training = gw.rpc_sync(worker, models.use, args=(module, EIGHT))
        assert torch.equal(y, 2 * EIGHT)
        assert (on, training) == ("w1", False)
    back = gw.rpc_sync("w2", models.pass_on, args=(module,))
    back.train()
    assert ask(module, models.is_training)
    assert back is not module


def test_gradients_flow_through_one_that_has_travelled(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))
    x = EIGHT.clone().requires_grad_()

    with gw.context():
        y, _, _ = gw.rpc_sync("w2", models.use, args=(module, x))
        y.sum().backward()

    assert torch.equal(x.grad, torch.full((8,), 2.0, dtype=torch.float64))
    assert ask(module, models.gradients) == [28, 8]


def test_one_is_made_of_a_reference_to_a_module(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    same = gw.RemoteModule.init_from_module_rref("w1", module.get_module_rref())
    elsewhere = gw.rpc_sync(
        "w2",
        gw.RemoteModule.init_from_module_rref,
        args=("w1/cpu", module.get_module_rref()),
    )
    mine = gw.RemoteModule.init_from_module_rref("w0", gw.RRef(models.Scaled(4.0)))

    with torch.no_grad():
        assert torch.equal(same(EIGHT), elsewhere(EIGHT))
        assert torch.equal(mine(EIGHT), 4 * EIGHT)


def test_a_subclass_travels_if_it_is_exposed(workers):
    module = models.Tuned("w1", models.Scaled, (2.0,))

    assert type(gw.rpc_sync("w2", models.pass_on, args=(module,))) is models.Tuned


def test_it_is_not_for_python_s_pickle(workers):
    module = gw.RemoteModule("w1", models.Scaled, (2.0,))

    for attempt in (lambda: torch.save(module, io.BytesIO()), lambda: copy.deepcopy(module)):
        with pytest.raises(UsageError, match="can only be pickled when using RPC"):
            attempt()


@pytest.mark.parametrize(
    "parts", [[], [1, "cpu", True, None], ["w1", "cpu", True, None], ["w1", "cpu", 1, None, 3]]
)
def test_parts_that_make_none_are_a_bad_message(workers, parts):
    codec = workers[0].worker.calls._bodies._codec
    data = to_msgpack([Tag.PARTS, "gradwire.nn.remote_module:RemoteModule", *parts])

    with pytest.raises(gw.BadMessage):
        codec.decode(data, [])


def test_only_what_is_made_of_parts_comes_in_parts(workers):
    codec = workers[0].worker.calls._bodies._codec

    with pytest.raises(gw.BadMessage, match="is not made of parts here"):
        codec.decode(to_msgpack([Tag.PARTS, "torch.nn:Linear", 2, 2]), [])


# -- what goes wrong


def test_a_place_that_is_none_is_refused_at_once(workers):
    with pytest.raises(UnknownWorker, match="could not find destination name w9"):
        gw.RemoteModule("w9", nn.Linear, (1, 1))
    with pytest.raises(UsageError, match="'w1/gpu' names no device: Expected one of"):
        gw.RemoteModule("w1/gpu", nn.Linear, (1, 1))
    rref = gw.RRef(models.Scaled(1.0))
    with pytest.raises(UsageError, match="on w1 was made of a reference to a value of w0"):
        gw.RemoteModule.init_from_module_rref("w1", rref)
    with pytest.raises(UsageError, match="a Linear is no reference to a module"):
        gw.RemoteModule.init_from_module_rref("w1", nn.Linear(1, 1))


def test_a_device_that_the_worker_lacks_is_told_at_the_first_use(workers):
    module = gw.RemoteModule("w1/cuda:120", nn.Linear, (1, 1))

    with pytest.raises(UsageError, match="on w1: the Linear could not be put on cuda:120"):
        module(EIGHT)


def test_what_is_no_module_is_told_at_the_first_use(workers):
    module = gw.RemoteModule("w1", models.NotAModule)
    with pytest.raises(UsageError, match=r"NotAModule, which is no torch\.nn\.Module"):
        module()

    module = gw.RemoteModule("w1", models.Raising)
    with pytest.raises(ValueError, match="no such model"):
        module.state_dict()

    module = gw.RemoteModule.init_from_module_rref("w0", gw.RRef(3))
    with pytest.raises(UsageError, match="made of a reference to a int"):
        module.train()


def test_a_class_that_is_not_exposed_is_not_made():
    with cluster(2) as made, made[0].worker.scope():
        module = gw.RemoteModule("w1", models.Scaled, (1.0,))
        with pytest.raises(NotExposed, match="Scaled is not exposed"):
            module(EIGHT)


def test_an_attribute_that_is_remote_says_so(workers):
    module = gw.RemoteModule("w1", models.Scaled, (1.0,))

    story = "'RemoteModule' object has no attribute 'weight' here: the module itself is on w1/cpu"
    with pytest.raises(AttributeError, match=re.escape(story)):
        _ = module.weight
    assert not hasattr(module, "calls")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("to", ("cpu",)),
        ("cpu", ()),
        ("cuda", ()),
        ("type", (torch.float32,)),
        ("float", ()),
        ("double", ()),
        ("half", ()),
        ("bfloat16", ()),
        ("share_memory", ()),
        ("register_parameter", ("p", None)),
        ("register_buffer", ("b", None)),
        ("add_module", ("m", None)),
        ("children", ()),
        ("named_children", ()),
    ],
)
def test_what_makes_no_sense_from_here_is_refused(workers, method, args):
    module = gw.RemoteModule("w1", models.Scaled, (1.0,))

    with pytest.raises(UsageError, match=rf"^{method} is not for a RemoteModule: .* on w1/cpu"):
        getattr(module, method)(*args)


def test_it_takes_no_parameters_and_modules_of_its_own(workers):
    module = gw.RemoteModule("w1", models.Scaled, (1.0,))

    for part in (nn.Parameter(EIGHT), nn.Linear(1, 1)):
        with pytest.raises(UsageError, match="more = … is not for a RemoteModule"):
            module.more = part
    module.note = "of the user's own"
    assert module.note == "of the user's own"


# -- another behavior


class Strict(gw.RemoteModule):
    """A class above it with errors of its own, and fewer methods."""

    def _refuse(self, method, _hint=""):
        raise ValueError(f"no {method}")

    def parameters(self, recurse=True):
        self._refuse("parameters")

    named_parameters = parameters


def test_a_class_above_may_differ(workers):
    module = Strict("w1", models.Scaled, (2.0,))

    with pytest.raises(ValueError, match="no parameters"):
        module.parameters()
    with pytest.raises(ValueError, match="no cuda"):
        module.cuda()
    assert len(module.remote_parameters()) == 2


def test_a_class_above_may_travel_as_other_parts(workers):
    module = models.Bare("w1", models.Scaled, (2.0,))
    module.more = 3

    with torch.no_grad():
        names, *results = gw.rpc_sync("w2", models.attributes_and_results, args=(module, EIGHT))

    assert names == ["on", "device", "module_rref", "forward_async", "forward"]
    assert all(torch.equal(result, 2 * EIGHT) for result in results)


# -- which line of the program sent


class Holder(nn.Module):
    """A module of this worker, with one elsewhere in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)  # held


def lines_of(program):
    """The lines at which the edges were sent that the result of the program holds."""
    kept = program()
    found = [edge.line for edge in gw.live_edges()]
    del kept
    return found


def line_of(text):
    with open(__file__, encoding="utf-8") as lines:
        (found,) = [n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {text}")]
    return f"{__file__}:{found}"


@pytest.mark.parametrize("way", ["called", "awaited", "held", "in a row"])
def test_an_edge_names_the_users_line_through_modules_of_any_kind(workers, way):
    x = torch.ones(2, requires_grad=True)
    module = gw.RemoteModule("w1", nn.Linear, (2, 2))

    def program():
        match way:
            case "called":
                return module(x)  # called
            case "awaited":
                return module.forward_async(x).wait()  # awaited
            case "held":
                return Holder(module)(x)
            case "in a row":
                return nn.Sequential(module)(x)  # in a row

    assert lines_of(program) == [line_of(way)]


def test_a_module_elsewhere_trains_without_a_context(workers):
    x = torch.ones(2, requires_grad=True)
    module = gw.RemoteModule("w1", models.Scaled, (3.0,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.Sequential(module, module)(x).sum().backward()

    assert x.grad.tolist() == [9, 9]


def test_a_program_in_a_folder_that_begins_like_ours_is_the_users(workers):
    beside = Path(gw.__file__).parent.parent / "gradwire_app" / "train.py"
    spaces = {"module": gw.RemoteModule("w1", nn.Linear, (2, 2)), "x": EIGHT[:2].float()}
    spaces["x"].requires_grad_()
    program = compile("\ny = module(x)\n", beside, "exec")

    assert lines_of(lambda: exec(program, spaces)) == [f"{beside}:2"]
