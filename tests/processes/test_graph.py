"""The picture of a graph whose parts lie in several processes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import torch

import gradwire
from gradwire.seeing.graph_model import PartKind
from tests.processes import far


def _lanes(drawn):
    root = ET.fromstring(drawn.svg())
    return [g.get("data-worker") for g in root.iter() if g.get("class") == "lane"]


def test_each_process_describes_its_part(linked):
    layers = [gradwire.remote(f"w{n}", far.Layer, args=(2.0,)) for n in (1, 2)]
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    h = layers[0].rpc_sync().forward(x)
    loss = layers[1].rpc_sync().forward(h).sum()
    drawn = gradwire.graph(loss, timeout=60)
    loss.backward()

    assert _lanes(drawn) == ["w0", "w1", "w2"]
    assert [edge.name for edge in drawn.crossings] == ["e0.0", "e1.0", "e0.1", "e2.0"]
    assert [part.parameters for part in drawn.parts if part.worker != "w0"] == [1, 1]
    assert sum(edge.bytes for edge in drawn.crossings) == 4 * 4 * 8
    assert drawn.silent == ()


def test_a_process_that_was_killed_has_a_lane_that_says_so(workers):
    layer = gradwire.remote("w2", far.Layer, args=(2.0,))
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss = layer.rpc_sync().forward(x).sum()
    workers["w2"].kill()
    drawn = gradwire.graph(loss, timeout=5)

    assert _lanes(drawn) == ["w0", "w2"]
    assert [name for name, _ in drawn.silent] == ["w2"]
    assert PartKind.SILENT in {part.kind for part in drawn.parts if part.worker == "w2"}
    assert "no answer" in drawn.svg()
