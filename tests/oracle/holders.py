"""Who holds the nodes that a program has left.

The collector knows only what Python holds. A node is mostly held from C++: by the nodes before it,
which a tensor holds; by the engine's queue of a thread, after a run that has failed; by the
saved-tensor hooks of a thread. So tensors are asked for their graphs, and the rest is named.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator

import torch

from gradwire.autograd.backward.engine_run import drain
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.crossing import Joined, Recv, Send
from gradwire.torch_private import Node, backward_class

NODES = {function.__name__: backward_class(function) for function in (Send, Recv, Joined)}
_LEVELS = 3
_SOME = 6


def hooks_here() -> str | None:
    """The saved-tensor hooks that this thread is under, in words: none, where a call begins."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    return f"{hooks[0].__qualname__} on {threading.current_thread().name}"


def report() -> str:
    """All that is known, in lines; the stacks of all threads go to stderr."""
    faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    nodes = [weakref.ref(alive) for alive in gc.get_objects() if type(alive) in NODES.values()]
    lines = [f"{len(nodes)} nodes"]
    lines += [f"{spoken(ref())}, held by {_chain(ref)}" for ref in nodes[:_SOME]]
    before = _tensors_before(nodes)
    lines += [f"{_short(ref())} leads there, held by {_chain(ref)}" for ref in before[:_SOME]]
    if not before:
        lines.append("no tensor leads there: look for what C++ holds for a thread (hooks, tasks)")
    drain()
    gc.collect()
    lines.append(f"{sum(ref() is not None for ref in nodes)} nodes after one more collection")
    return "\n    ".join(lines)


def spoken(node: Node) -> str:
    """A node, its edge, and what the tables of both ends say of it."""
    end = getattr(node, "end", None)
    if end is None:
        return node.name()
    said = [f"{node.name()} of {end.edge}, the other end on w{end.peer}"]
    if end.context is not None:
        said.append(f"made in {end.context}")
    for alive in gc.get_objects():
        if type(alive) is Engine:
            said += _said_by(alive, end.edge)
    return ", ".join(said)


def _said_by(engine: Engine, edge: object) -> Iterator[str]:
    me, edges = engine.directory.me.name, engine.edges
    if edge.worker == edges.me and edge.n in edges.sent:
        yield f"{me} has it among the sent"
    if edges.is_alive(edge):
        yield f"{me} has it among the received"
    table = edges.from_peers.get(edge.worker)
    if table is not None and edge.n in table.untold:
        yield f"{me} has not told that it is over"


def _tensors_before(nodes: list[weakref.ref]) -> list[weakref.ref]:
    """The tensors from whose graphs one of these nodes is reached."""
    wanted, leads = {ref() for ref in nodes}, {}
    tensors = [alive for alive in gc.get_objects() if isinstance(alive, torch.Tensor)]
    graphs = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return [weakref.ref(tensor) for tensor in graphs if _reaches(tensor.grad_fn, wanted, leads)]


def _reaches(root: Node, wanted: set[Node], leads: dict[Node, bool]) -> bool:
    todo, seen = [root], {root}
    while todo:
        node = todo.pop()
        if node in wanted or leads.get(node):
            leads[root] = True
            return True
        behind = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= behind
        todo += [parent for parent in behind if leads.get(parent, True)]
    leads.update(dict.fromkeys(seen, False))
    return False


def _chain(ref: weakref.ref) -> str:
    """What holds this, what holds that, and so on; without what looks for it."""
    said, known = [], set()
    found = [ref()]
    for _ in range(_LEVELS):
        known |= {id(found), *map(id, found)}
        holders = gc.get_referrers(*found)
        known.add(id(holders))
        found = [holder for holder in holders if id(holder) not in known and not _looks(holder)]
        if not found:
            break
        said.append(", ".join(sorted({_short(holder) for holder in found})))
    return " <- ".join(said) or "nothing in Python"


def _looks(holder: object) -> bool:
    return inspect.isframe(holder) and holder.f_code.co_filename == __file__


def _short(holder: object) -> str:
    if inspect.isframe(holder):
        return f"{holder.f_code.co_qualname}:{holder.f_lineno}"
    if isinstance(holder, torch.Tensor):
        return f"a {type(holder).__name__} of {holder.grad_fn and holder.grad_fn.name()}"
    if type(holder) is not dict:
        return type(holder).__name__
    return f"dict({', '.join([repr(key)[:30] for key in list(holder)[:4]])})"
