"""gradwire.graph over a cluster in this process: what it shows of real graphs, and of workers."""

from __future__ import annotations

import inspect
import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.compat.rpc.behavior import TORCH
from gradwire.errors import ArgumentTypeError, GraphCutWarning, UsageError
from gradwire.options import Options
from gradwire.seeing import graph as collecting
from gradwire.seeing import graph_describe, graph_walk
from gradwire.seeing.graph_messages import DescribeGraph
from gradwire.seeing.graph_model import EdgeKind, PartKind
from gradwire.seeing.graph_text import text_of
from gradwire.testing import cluster, faults
from tests.leftovers import eventually

KEPT: dict[str, object] = {}


def two_layers(x):
    return KEPT.setdefault("model", nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))(x)


def doubled(x):
    return 2 * x


def through(x, *workers):
    if not workers:
        return x.sin()
    return gradwire.rpc_sync(workers[0], through, args=(x.cos(), *workers[1:])).exp()


def keep(name, x):
    KEPT[name] = x.sin() if isinstance(x, torch.Tensor) else x


def weight_of_module():
    return KEPT.setdefault("module", nn.Linear(2, 2))


EXPOSED = [two_layers, doubled, through, keep, weight_of_module, faults]


@pytest.fixture
def workers():
    with cluster(3, expose=EXPOSED) as made, made[0].worker.scope():
        yield made
    KEPT.clear()


def leaf(*shape):
    return torch.ones(*shape, requires_grad=True)


def line_after():
    """The place of the statement after the one that asks."""
    return f"{__file__}:{inspect.currentframe().f_back.f_lineno + 1}"


# -- text


def test_a_call_and_what_is_made_of_its_result(workers):
    x = leaf(2, 4)
    y = gradwire.rpc_sync("w1", two_layers, args=(x,))
    text = str(gradwire.graph((y + x).sum()))

    assert text.splitlines() == [
        "1 root on w0, 2 workers, 2 edges of 64 B",
        "",
        "w0",
        "  w0.1  1 leaf",
        "  w0.2  2 nodes, 1 leaf, root float32[]",
        "",
        "w1",
        "  w1.1  5 nodes, 4 parameters, 64 B saved",
        "",
        "edges",
        f"  e0.0  w0.1 > w1.1  float32[2, 4]  32 B  test_graph.py:{call_line(1)}",
        "  e1.0  w1.1 > w0.2  float32[2, 4]  32 B",
    ]


def call_line(n):
    """The n-th line with a call in the test that asks."""
    lines, first = inspect.getsourcelines(inspect.currentframe().f_back.f_code)
    calls = [first + at for at, line in enumerate(lines) if "gradwire.rpc_sync(" in line]
    return calls[n - 1]


def test_a_tensor_used_before_and_after_a_crossing_divides_its_worker_in_two(workers):
    x = leaf(3)
    h = x * 2
    y = gradwire.rpc_sync("w1", doubled, args=(h,))
    drawn = gradwire.graph((y * h).sum())

    first, last = [part for part in drawn.parts if part.worker == "w0"]
    assert (first.nodes, last.nodes) == (1, 2)
    (inside,) = [edge for edge in drawn.edges if edge.kind is EdgeKind.INSIDE]
    assert (drawn.parts[inside.source], drawn.parts[inside.target]) == (first, last)


def test_what_is_prepared_early_belongs_to_the_part_that_uses_it(workers):
    x, w = leaf(3, 3), leaf(3, 3)
    wide = w.t().exp()  # used only after the crossing
    y = gradwire.rpc_sync("w1", doubled, args=(x,))
    drawn = gradwire.graph((y @ wide).sum())

    assert [part.nodes for part in drawn.parts if part.worker == "w0"] == [0, 4]
    assert not [edge for edge in drawn.edges if edge.kind is EdgeKind.INSIDE]


def test_micro_batches_that_share_parameters_are_parts_of_their_own(workers):
    layer = nn.Linear(3, 3)
    sent = [layer(torch.ones(1, 3)) for _ in range(3)]
    results = [gradwire.rpc_sync("w1", doubled, args=(h,)) for h in sent]
    drawn = gradwire.graph(torch.cat(results).sum())

    assert [part.parameters for part in drawn.parts if part.worker == "w0"] == [2, 2, 2, 0]
    assert [part.nodes for part in drawn.parts if part.worker == "w1"] == [1, 1, 1]


def test_it_goes_on_through_all_workers_and_is_asked_for_anywhere(workers):
    x = leaf(3)
    y = gradwire.rpc_sync("w1", through, args=(x, "w2"))
    drawn = gradwire.graph(y)
    gradwire.rpc_sync("w1", keep, args=("y", y))
    there = workers[1].run(lambda: gradwire.graph(KEPT["y"]))

    assert drawn.workers == ("w0", "w1", "w2")
    assert [edge.name for edge in drawn.crossings] == ["e0.0", "e1.0", "e2.0", "e1.1"]
    assert (there.drawn_by, there.workers) == ("w1", ("w0", "w1", "w2"))
    assert [e.name for e in there.crossings] == ["e0.0", "e1.0", "e2.0", "e1.1", "e0.1"]


def test_a_call_to_itself_is_a_crossing(workers):
    drawn = gradwire.graph(gradwire.rpc_sync("w0", doubled, args=(leaf(3),)))

    assert drawn.workers == ("w0",)
    assert len(drawn.crossings) == 2
    assert len(drawn.parts) == 3


def test_a_graph_of_one_worker_has_one_part_and_no_edge(workers):
    drawn = gradwire.graph([leaf(3).sin(), leaf(2).cos()])

    assert text_of(drawn).startswith("2 roots on w0, 1 worker, no edges\n\nw0\n  w0.1  1 node")


def test_a_leaf_may_be_a_root(workers):
    x = leaf(3)
    assert gradwire.graph(x).parts[0].roots == ("float32[3]",)
    assert [part.roots for part in gradwire.graph([x, x.sin()]).parts] == [("float32[3]",)]


def test_the_guide_shows_what_is_printed(workers, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guide" / "seeing.md").read_text()
    program, printed = re.search(
        r"^## The graph\n.*?^```python\n(.*?)^```\n\n^```text\n(.*?)^```", page, re.M | re.S
    ).groups()

    exec(compile(program, "train.py", "exec"), {"torch": torch, "gradwire": gradwire})

    assert capsys.readouterr().out == printed
    assert (tmp_path / "graph.svg").exists()


def test_tensors_that_cross_together_are_counted(workers):
    with cluster(2, behavior=TORCH) as made, made[0].worker.scope(), gradwire.context():
        drawn = gradwire.graph(gradwire.rpc_sync("w1", torch.add, args=(leaf(3), leaf(2, 3))))

    first = drawn.crossings[0]
    assert (first.tensors, first.count, first.bytes) == (("float32[3]", "float32[2, 3]"), 2, 36)
    assert "float32[3] and 1 more" in str(drawn)


# -- what is not reached


def test_a_result_that_nobody_uses_is_grey(workers):
    x = leaf(3)
    used = gradwire.rpc_sync("w1", doubled, args=(x,))
    unused = gradwire.rpc_sync("w2", doubled, args=(x,))
    drawn = gradwire.graph(used.sum())

    assert drawn.workers == ("w0", "w1", "w2")
    assert [e.name for e in drawn.crossings if not e.is_reached] == ["e0.1", "e2.0"]
    assert {part.worker for part in drawn.parts if not part.is_reached} == {"w0", "w2"}
    assert "not reached" in str(drawn)
    del unused


def test_what_belongs_to_another_context_is_not_shown(workers):
    x = leaf(3)
    outside = gradwire.rpc_sync("w1", doubled, args=(x,))
    with gradwire.context():
        y = gradwire.rpc_sync("w1", doubled, args=(x,))
        drawn = gradwire.graph(y)
    assert [edge.name for edge in drawn.crossings] == ["e0.1", "e1.1"]
    del outside


# -- cuts


@pytest.mark.parametrize("is_result", [False, True], ids=["arguments", "result"])
def test_a_cut_is_red_with_its_line(is_result):
    with cluster(2, expose=EXPOSED, options=Options(pickle=True)) as made, made[0].worker.scope():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(3):
                if is_result:
                    line = line_after()
                    gradwire.rpc_sync("w1", weight_of_module)
                else:
                    line = line_after()
                    gradwire.rpc_sync("w1", keep, args=("m", nn.Linear(2, 2)))
        drawn = gradwire.graph(leaf(3).sum())
    KEPT.clear()

    assert {warning.category for warning in warned} == {GraphCutWarning}
    (cut,) = drawn.cuts
    where = [drawn.parts[end].worker for end in (cut.source, cut.target)]
    assert where == (["w1", "w0"] if is_result else ["w0", "w1"])
    assert (cut.line, cut.times) == (line, 3)
    assert f"test_graph.py:{line.rpartition(':')[2]}" in drawn.svg()
    assert "3 times" in str(drawn)


@pytest.mark.filterwarnings("ignore::gradwire.errors.GraphCutWarning")
@pytest.mark.parametrize("how", ["rpc_async", "to_here"])
def test_a_cut_of_a_result_that_is_read_later_comes_from_its_worker(how):
    calls = {
        "rpc_async": lambda: gradwire.rpc_async("w1", weight_of_module).wait(),
        "to_here": lambda: gradwire.remote("w1", weight_of_module).to_here(),
    }
    with cluster(2, expose=EXPOSED, options=Options(pickle=True)) as made, made[0].worker.scope():
        calls[how]()
        drawn = gradwire.graph(leaf(3).sum())
    KEPT.clear()

    (cut,) = drawn.cuts
    assert [drawn.parts[end].worker for end in (cut.source, cut.target)] == ["w1", "w0"]
    assert cut.line.startswith(__file__)


@pytest.mark.filterwarnings("ignore::gradwire.errors.GraphCutWarning")
def test_torchs_api_outside_of_a_context_cuts_and_inside_is_drawn():
    with cluster(2, behavior=TORCH) as made, made[0].worker.scope():
        x = leaf(3)
        cut = gradwire.graph(gradwire.rpc_sync("w1", torch.sin, args=(x,)).sum())
        with gradwire.context():
            drawn = gradwire.graph(gradwire.rpc_sync("w1", torch.sin, args=(x,)).sum())

    # The callee gets a leaf of its own, and so does the caller of its result.
    assert [(e.what, e.count) for e in cut.cuts] == [
        ("the arguments of torch.sin on w1", 1),
        ("the result of torch.sin on w1", 1),
    ]
    assert cut.crossings == []
    assert [edge.name for edge in drawn.crossings] == ["e0.0", "e1.0"]


# -- saved memory


def test_memory_is_counted_once_and_without_parameters(workers):
    layer = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    y = layer(x)
    (part,) = gradwire.graph((y.sin() + y.cos()).sum()).parts

    assert part.saved == 2 * 4 * 8 * 4  # x and y, each once
    assert part.unknown == 0
    assert part.parameters == 2


@pytest.mark.slow  # torch imports much for a checkpoint
def test_what_hooks_have_packed_is_not_unpacked_and_unknown(workers):
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: "packed", unpacked.append):
        y = leaf(3).sin()
    again = []

    def counted(x):
        again.append(1)
        return x.sin().cos()

    z = checkpoint(counted, leaf(3), use_reentrant=False)
    said = [part.unknown for part in gradwire.graph([y, z]).parts]

    assert sum(said) >= 2
    assert (unpacked, again) == ([], [1])
    assert "saved: unknown" in str(gradwire.graph(y))


def test_what_is_saved_beside_an_optimizer_is_known(workers):
    model = gradwire.RemoteModule("w0", nn.Linear, (4, 4))
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.1)
    with gradwire.context():
        drawn = gradwire.graph(model(leaf(2, 4)).sum())
    (part,) = [part for part in drawn.parts if part.parameters]
    assert (part.saved, part.unknown) == (2 * 4 * 4, 0)
    del optimizer


def test_nothing_is_measured_while_the_worker_that_draws_runs_a_backward(workers):
    x, said = leaf(3), []
    y = gradwire.rpc_sync("w1", through, args=(x,))
    other = gradwire.rpc_sync("w2", through, args=(leaf(3),))
    y.register_hook(lambda _: said.append(gradwire.graph(other)))
    z = gradwire.rpc_sync("w1", through, args=(y,))
    z.sum().backward()

    (drawn,) = said
    assert [(p.saved, p.unknown) for p in drawn.parts if p.worker == "w2"] == [(0, 1)]
    assert "saved: unknown" in str(drawn)


def test_what_is_not_reached_is_not_measured(workers):
    used = gradwire.rpc_sync("w1", through, args=(leaf(3),))
    unused = gradwire.rpc_sync("w1", through, args=(leaf(3),))
    saved = [(p.is_reached, p.saved) for p in gradwire.graph(used).parts if p.worker == "w1"]
    assert saved == [(True, 12), (False, 0)]
    del unused


def test_a_graph_that_was_freed_has_saved_nothing(workers):
    y = leaf(3).sin()
    y.sum().backward()
    assert gradwire.graph(y).parts[0].saved == 0


# -- a picture changes nothing


def test_gradients_are_the_same_to_the_bit_after_a_picture(workers):
    grads = []
    for is_drawn in (False, True):
        torch.manual_seed(0)
        x = torch.randn(3, requires_grad=True)
        y = gradwire.rpc_sync("w1", through, args=(x, "w2")).sum()
        if is_drawn:
            gradwire.graph(y)
        y.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# -- SVG and DOT


def parsed(drawn):
    return ET.fromstring(drawn.svg().replace('xmlns="http://www.w3.org/2000/svg" ', ""))


def classes(root, name):
    return [each for each in root.iter() if name in each.get("class", "").split()]


def test_svg_has_a_lane_per_worker_and_an_arrow_per_edge(workers):
    x = leaf(3)
    y = gradwire.rpc_sync("w1", through, args=(x, "w2"))
    unused = gradwire.rpc_sync("w2", doubled, args=(x,))
    drawn = gradwire.graph((y * x).sum())
    root = parsed(drawn)

    assert [lane.get("data-worker") for lane in classes(root, "lane")] == ["w0", "w1", "w2"]
    assert len(classes(root, "crossing")) == len(drawn.crossings) == 6
    assert len(classes(root, "part")) == len(drawn.parts)
    assert classes(root, "crossing")[0].find("title").text.startswith("e0.0, w0 to w1")
    assert "prefers-color-scheme: dark" in root.find("style").text
    del unused


def test_forms(workers, tmp_path):
    drawn = gradwire.graph(gradwire.rpc_sync("w1", doubled, args=(leaf(3),)))
    for name, form in {"a.svg": drawn.svg(), "a.dot": drawn.dot(), "a.txt": str(drawn)}.items():
        drawn.save(tmp_path / name)
        assert (tmp_path / name).read_text() == form
    assert drawn._repr_svg_() in drawn._repr_html_()
    assert drawn.dot().count(" -> ") == 2
    with pytest.raises(UsageError, match=r"not saved as a\.png") as refused:
        drawn.save(tmp_path / "a.png")
    assert "hint: end the name in .svg, .dot, .txt" in str(refused.value)


# -- workers that do not answer


def test_a_worker_that_is_lost_has_a_lane_that_says_so(workers):
    y = gradwire.rpc_sync("w1", through, args=(leaf(3), "w2"))
    workers[2].worker.close()
    assert eventually(lambda: all(e.to != "w2" for e in workers[1].run(gradwire.live_edges)))
    drawn = gradwire.graph(y)

    assert drawn.workers == ("w0", "w1", "w2")
    ((name, why),) = drawn.silent
    assert name == "w2"
    assert "w2 was lost" in why
    assert [edge.name for edge in drawn.crossings] == ["e0.0", "e2.0", "e1.1"]  # w1 drops e1.0
    kinds = [(part.worker, part.kind) for part in drawn.parts if part.worker != "w0"]
    assert kinds == [
        ("w1", PartKind.LOCAL),
        ("w2", PartKind.SILENT),
        ("w1", PartKind.GONE),
    ]
    assert "no answer" in drawn.svg()


def test_a_worker_that_is_silent_has_a_lane_that_says_so(workers):
    y = gradwire.rpc_sync("w1", through, args=(leaf(3), "w2"))
    with faults.armed("delay before-handle DescribeGraph", on="w2"):
        drawn = gradwire.graph(y, timeout=0.2)
        gradwire.rpc_sync("w2", faults.release)

    ((name, why),) = drawn.silent
    assert (name, "did not answer" in why) == ("w2", True)
    assert [part.kind for part in drawn.parts if part.worker == "w2"] == [PartKind.SILENT]
    assert [edge.name for edge in drawn.crossings] == ["e0.0", "e1.0", "e2.0", "e1.1"]
    assert f"  {why}" in str(drawn).splitlines()


def test_an_edge_that_was_released_is_said_to_be(workers):
    with gradwire.context():
        y = gradwire.rpc_sync("w1", doubled, args=(leaf(3),))
    drawn = gradwire.graph(y)

    assert {part.kind for part in drawn.parts if part.worker == "w1"} == {PartKind.GONE}


# -- limits


def test_what_is_over_the_limit_is_left_out_in_words(workers, monkeypatch):
    monkeypatch.setattr(collecting, "MOST_EDGES", 4)
    monkeypatch.setattr(collecting, "_FEWEST", 2)
    h = leaf(3)
    for _ in range(10):
        h = gradwire.rpc_sync("w1", doubled, args=(h,)) + h
    drawn = gradwire.graph(h)

    assert 4 <= len(drawn.crossings) <= 8
    assert drawn.crossings[-1].name == "e1.9"
    assert "16 edges further from the roots: not drawn" in drawn.left_out
    assert drawn.left_out[0] in drawn.svg()
    assert drawn.left_out[0] in str(drawn)


def test_many_results_of_one_sum_are_limited(workers, monkeypatch):
    monkeypatch.setattr(collecting, "MOST_EDGES", 4)
    monkeypatch.setattr(collecting, "_FEWEST", 2)
    results = [gradwire.rpc_sync("w1", doubled, args=(leaf(3),)) for _ in range(10)]
    drawn = gradwire.graph(torch.stack(results).sum())

    assert len(drawn.crossings) <= 8
    assert "w0: more than is drawn" in drawn.left_out
    assert [part.roots for part in drawn.parts if part.roots] == [("float32[]",)]


def test_only_so_many_nodes_are_looked_at(workers, monkeypatch):
    monkeypatch.setattr(graph_walk, "MOST_NODES", 50)
    x = leaf(3)
    for _ in range(100):
        x = x + 1
    walked = graph_walk.walk([x.grad_fn], most=50)
    assert (len(walked.inputs), walked.is_cut_short) == (50, True)


def test_a_peer_cannot_ask_for_more_than_the_limit(workers, monkeypatch):
    monkeypatch.setattr(graph_describe, "MOST_EDGES", 3)
    x = leaf(3)
    kept = [gradwire.rpc_sync("w1", doubled, args=(x,)) for _ in range(10)]
    engine = workers[0].worker.engine
    question = DescribeGraph({}, 1 << 40, [None], True)
    parts = graph_describe.describe(engine, {}, question, [])
    assert (len(parts.sent), parts.is_cut_short) == (3, True)
    del kept


# -- misuse


def test_misuse_is_explained(workers):
    with pytest.raises(ArgumentTypeError, match="graph\\(\\) was given a float"):
        gradwire.graph(1.0)
    with pytest.raises(ArgumentTypeError, match="no tensor"):
        gradwire.graph([])
    with pytest.raises(UsageError, match="does not require grad"):
        gradwire.graph(torch.ones(3))
