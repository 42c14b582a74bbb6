"""A trace of workers in one process: what it holds, what it says, and what it leaves behind."""

import gzip
import json
import sys
import tarfile
import threading
import time
from itertools import pairwise

import pytest
import torch

import gradwire as gw
from gradwire.errors import OverLimit, UsageError
from gradwire.seeing.messages import Record
from gradwire.seeing.recording import Recorder
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
WEIGHT = {}


def stage(x):
    weight = WEIGHT.setdefault(threading.get_ident(), torch.ones(8, 8, requires_grad=True))
    return torch.relu(x @ weight)


def slow(x):
    time.sleep(0.05)  # what is traced is a slow function
    return x * 2


def fails(x):
    raise ValueError("as it should")


def nested(x):
    return gw.rpc_sync("w2", stage, args=(x,))


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)
    WEIGHT.clear()


def step():
    x = torch.ones(4, 8, requires_grad=True)
    y = gw.rpc_sync("w1", stage, args=(x,))
    z = gw.rpc_sync("w2", stage, args=(y,))
    z.sum().backward()


def traced(workers, program, file=None):
    def run():
        with gw.trace(file, show=False) as trace:
            program()
        return trace

    return workers[0].run(run)


def names(trace, worker):
    return [one.name for one in trace.timeline.slices if one.track.worker == worker]


def test_every_crossing_has_an_arrow_from_its_sender_to_its_receiver(workers):
    trace = traced(workers, step)

    crossed = sorted(
        (arrow.way, arrow.source.worker, arrow.target.worker)
        for arrow in trace.timeline.arrows
        if arrow.way in ("call", "answer", "gradient")
    )
    assert crossed == [
        ("answer", "w1", "w0"),
        ("answer", "w2", "w0"),
        ("call", "w0", "w1"),
        ("call", "w0", "w2"),
        ("gradient", "w0", "w1"),
        ("gradient", "w0", "w2"),
        ("gradient", "w1", "w0"),
        ("gradient", "w2", "w0"),
    ]
    assert all(arrow.left <= arrow.came for arrow in trace.timeline.arrows)
    assert trace.timeline.dropped == trace.timeline.moved == 0


def test_functions_passes_and_runs_are_slices_of_their_workers(workers):
    trace = traced(workers, step)

    assert f"{__name__}.stage" in names(trace, "w1")
    assert "backward" in names(trace, "w0")
    assert "backward" in names(trace, "w1")
    assert "backward" in names(trace, "w2")


def test_an_arrow_says_what_it_carried(workers):
    trace = traced(workers, step)

    (call,) = [a for a in trace.timeline.arrows if a.way == "call" and a.target.worker == "w1"]
    assert call.tensors == "float32[4,8]"
    assert call.size >= 128
    gradients = {a.tensors for a in trace.timeline.arrows if a.way == "gradient"}
    assert gradients == {"float32[4,8]"}


def test_the_path_is_connected_and_sums_to_the_step(workers):
    def program():
        step()
        waited = [gw.rpc_async("w1", nested, args=(torch.ones(2, 8),)) for _ in range(3)]
        for future in waited:
            future.wait()

    trace = traced(workers, program)

    path = trace.path
    assert path[0].began == 0.0
    assert path[-1].ended == trace.timeline.seconds
    for part, following in pairwise(path):
        assert part.ended == following.began
    assert sum(part.seconds for part in path) == pytest.approx(trace.timeline.seconds, rel=0.01)


def test_the_text_names_the_slow_function_and_its_worker(workers):
    trace = traced(workers, lambda: gw.rpc_sync("w2", slow, args=(torch.ones(2),)))

    head, first, *_ = trace.text.splitlines()
    assert "over 3 workers (one clock)" in head
    *_, worker, function = first.split()
    assert (worker, function) == ("w2", f"{__name__}.slow")


def test_a_call_that_fails_is_there_too(workers):
    def program():
        with pytest.raises(ValueError, match="as it should"):
            gw.rpc_async("w1", fails, args=(1,)).wait()

    trace = traced(workers, program)

    (call,) = trace.timeline.calls
    assert call.name == f"{__name__}.fails"
    assert 0 < call.began < call.ended <= trace.timeline.seconds


def test_a_span_and_a_step_of_an_optimizer_are_slices(workers):
    def program():
        ref = gw.remote("w1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [ref], lr=0.1)
        with gw.span("a step of mine"):
            ref.to_here().sum().backward()
            optimizer.step()

    trace = traced(workers, program)

    assert "a step of mine" in names(trace, "w0")
    assert "optimizer step" in names(trace, "w0")


def test_a_span_without_a_trace_and_without_a_worker_does_nothing():
    with gw.span("alone"):
        pass


def test_the_file_is_one_that_viewers_of_chrome_traces_read(workers, tmp_path):
    trace = traced(workers, step, tmp_path / "step.json.gz")

    rows = json.loads(gzip.decompress(trace.file.read_bytes()))["traceEvents"]
    check_rows(rows)
    assert str(trace.file) in trace.text
    assert {row["args"]["name"].split()[0] for row in rows if row["name"] == "process_name"} == {
        "critical",
        "w0",
        "w1",
        "w2",
    }


def check_rows(rows):
    """Every begin has its end, slices nest, and every arrow has both ends in order."""
    stacks, begun, left = {}, {}, {}
    for row in sorted((r for r in rows if r["ph"] == "X"), key=lambda r: (r["ts"], -r["dur"])):
        stack = stacks.setdefault((row["pid"], row["tid"]), [])
        while stack and stack[-1] <= row["ts"]:
            stack.pop()
        ended = round(row["ts"] + row["dur"], 3)
        assert not stack or ended <= stack[-1], row
        stack.append(ended)
    for row in rows:
        key = row.get("cat"), row.get("id"), str(row.get("id2")), row["ph"] in "be" and row["pid"]
        match row["ph"]:
            case "b":
                assert key not in begun
                begun[key] = row["ts"]
            case "e":
                assert begun.pop(key) <= row["ts"]
            case "s":
                assert key not in left
                left[key] = row["ts"]
            case "f":
                assert left.pop(key) <= row["ts"]
                assert row["bp"] == "e"
            case kind:
                assert kind in "XM"
    assert not begun
    assert not left
    assert all(isinstance(row["pid"], int) and isinstance(row["tid"], int) for row in rows)


def test_nothing_is_recorded_before_or_after(workers):
    events = [member.worker.events for member in workers]
    assert [each.record for each in events] == [None] * 3

    traced(workers, step)

    assert [each.record for each in events] == [None] * 3
    assert [each.kept() for each in events] == [[]] * 3


def test_two_workers_may_trace_at_the_same_time(workers):
    def outer():
        with gw.trace(show=False) as trace:
            inner = workers[1].run(traced_here)
            gw.rpc_sync("w2", stage, args=(torch.ones(2, 8),))
        return inner, trace

    def traced_here():
        with gw.trace(show=False) as trace:
            gw.rpc_sync("w2", slow, args=(torch.ones(2),))
        return trace

    inner, trace = workers[0].run(outer)

    assert f"{__name__}.slow" in names(inner, "w2")
    assert f"{__name__}.stage" not in names(inner, "w2")
    assert {f"{__name__}.slow", f"{__name__}.stage"} <= set(names(trace, "w2"))


def test_the_block_may_raise_and_the_trace_is_there(workers):
    def program():
        with gw.trace(show=False) as trace:
            try:
                gw.rpc_sync("w1", fails, args=(1,))
            finally:
                kept.append(trace)

    kept = []
    with pytest.raises(ValueError, match="as it should"):
        workers[0].run(program)

    assert f"{__name__}.fails" in names(kept[0], "w1")


def test_a_worker_that_is_lost_meanwhile_is_said_to_be_missing(workers):
    def program():
        with gw.trace(show=False) as trace:
            step()
            workers[2].worker.close()
        return trace

    trace = workers[0].run(program)

    assert list(trace.missing) == ["w2"]
    assert " no events of w2: " in trace.text
    assert f"{__name__}.stage" in names(trace, "w1")


def test_events_that_were_too_many_are_counted_and_said(workers, monkeypatch):
    monkeypatch.setattr(gw.events, "MOST_KEPT", 20)

    trace = traced(workers, lambda: [step() for _ in range(10)])

    assert trace.timeline.dropped > 20
    assert "MISSING EVENTS, as there were too many: w0 " in trace.text


def test_many_events_are_sent_in_parts(workers, monkeypatch):
    monkeypatch.setattr(gw.seeing.recording, "_EVENTS_IN_AN_ANSWER", 3)

    trace = traced(workers, step)

    assert len(trace.timeline.slices) > 9
    assert trace.timeline.dropped == 0


def test_a_worker_records_for_a_few_traces_of_each_peer_and_forgets_those_of_the_lost(workers):
    recorder = workers[1].worker.part(Recorder)
    agent = workers[0].worker.agent

    def ask(n):
        deadline = agent.clock.now() + 30
        _, promise = agent.request(1, Record(n), deadline=deadline, description="trace")
        return agent.wait_for(1, promise)

    answers = [ask(n) for n in range(5)]

    assert isinstance(answers[4], OverLimit)
    assert workers[1].worker.events.watchers == 4
    workers[0].worker.close()
    recorder._peer_lost(0, None)
    assert workers[1].worker.events.record is None


def test_another_kind_of_file_is_refused(workers):
    with pytest.raises(UsageError, match=r"name a \.json or a \.json\.gz file"):
        workers[0].run(gw.trace, "step.html")
    with pytest.raises(UsageError, match=r"with torch=True is not written(.|\n)*name a \.tar file"):
        workers[0].run(lambda: gw.trace("step.json", torch=True))


@pytest.mark.slow
def test_a_process_is_profiled_once_whatever_its_workers(workers, tmp_path):
    def run():
        with gw.trace(tmp_path / "step.tar", show=False, torch=True) as trace:
            step()
        return trace

    assert workers[0].run(run).missing == {}
    with tarfile.open(tmp_path / "step.tar") as tar:
        assert tar.getnames() == ["perfetto_manifest.json", "gradwire.json.gz", "torch-w0.json.gz"]


@pytest.mark.slow
def test_a_profile_that_torch_refuses_is_said_to_be_missing(workers, tmp_path):
    def run():
        file = tmp_path / "step.tar"
        with torch.profiler.profile(), gw.trace(file, show=False, torch=True) as trace:
            step()
        return trace

    assert "this process takes a profile already" in workers[0].run(run).missing["w0"]
