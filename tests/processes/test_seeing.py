"""Traces over real processes: what was slow is named, whatever it was."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import gradwire
from tests.injection.proxy import proxied
from tests.process_cluster import process_cluster
from tests.processes import far
from tests.processes.conftest import TIMEOUTS
from tests.seeing.test_trace import check_rows

ROOT = Path(__file__).parents[2]


def traced(program):
    with gradwire.trace(show=False) as trace:
        program()
    return trace


def rows_of(trace):
    """Share, time, where and what of the first lines of the text."""
    found = []
    for line in trace.text.splitlines()[1:]:
        if " % " in line[:6]:
            share, _, _, _, rest = line.split(maxsplit=4)
            found.append((int(share), rest))
    return found


def test_arrows_connect_processes_over_each_kind_of_link(linked):
    def program():
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        gradwire.rpc_sync("w1", far.cubed, args=(x,)).sum().backward()

    trace = traced(program)

    crossed = {(a.way, a.source.worker, a.target.worker) for a in trace.timeline.arrows}
    assert {("call", "w0", "w1"), ("answer", "w1", "w0"), ("gradient", "w0", "w1")} <= crossed
    assert ("gradient", "w1", "w0") in crossed
    assert len({log.about for log in trace.timeline.logs.values()}) == 3  # processes
    assert trace.timeline.uncertainty == 0.0  # one machine has one clock
    assert trace.timeline.moved == 0


def test_a_slow_worker_is_named(workers):
    trace = traced(lambda: gradwire.rpc_sync("w2", far.after, args=(0.05,)))

    (_, what), *_ = rows_of(trace)
    assert what.split() == ["w2", "tests.processes.far.after"]


def test_a_large_tensor_is_named(workers):
    large = torch.ones(64, 1 << 16)

    trace = traced(lambda: gradwire.rpc_sync("w1", torch.sum, args=(large,)))

    (line,) = [line for line in trace.text.splitlines() if line.startswith(" largest crossings: ")]
    assert "w0 > w1 call of torch.sum float32[64,65536] 16.0 MiB" in line


def test_a_slow_link_is_named(hosts, tmp_path):
    options = gradwire.Options(listen="tcp://127.0.0.1:0", timeouts=TIMEOUTS)
    with process_cluster(2, expose=[far], options=options, hosts=hosts):
        with proxied("w1", seed=1) as proxy:
            x = torch.ones(500_000, dtype=torch.float64)
            gradwire.rpc_sync("w1", far.here)
            proxy.slow(10e6)  # 4 MB take 400 ms
            trace = traced(lambda: gradwire.rpc_sync("w1", torch.sum, args=(x,)))
        far.forget()

    (_, what), *_ = rows_of(trace)
    assert what.startswith("w0 > w1  call of torch.sum, float64[500000], 3.8 MiB, tcp")


def test_a_traced_pipeline_is_a_file_that_viewers_read(tmp_path):
    file = tmp_path / "step.json.gz"
    program = str(ROOT / "examples" / "03_pipeline.py")
    command = [sys.executable, "-m", "gradwire", "run", "-n", "3", "--trace", str(file), program]

    done = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 0, done.stderr
    assert f"over 3 workers (one clock)    trace: {file}" in done.stderr
    content = json.loads(gzip.decompress(file.read_bytes()))
    assert content["otherData"]["dropped events"] == 0
    rows = content["traceEvents"]
    check_rows(rows)
    path = [row for row in rows if row.get("cat") == "critical path"]
    assert sum(row["dur"] for row in path) == pytest.approx(
        1e6 * content["otherData"]["seconds"], rel=0.01
    )
    for row, after in pairwise(path):
        assert row["ts"] + row["dur"] == pytest.approx(after["ts"], abs=0.01)
    ways = {row["cat"] for row in rows if row["ph"] == "s"}
    assert {"call", "answer", "gradient"} <= ways


def test_a_traced_program_under_torchrun(tmp_path):
    file = tmp_path / "step.json"
    script = ROOT / "examples" / "03_pipeline.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

    done = subprocess.run(
        [*launcher, "--nproc-per-node", "3", str(script)],
        env={**os.environ, "GRADWIRE_TRACE": str(file), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    check_rows(json.loads(file.read_bytes())["traceEvents"])


def test_torch_s_profiles_ride_along_and_are_in_time(workers, tmp_path):
    with gradwire.trace(tmp_path / "step.tar", show=False, torch=True) as trace:
        gradwire.rpc_sync("w1", torch.matmul, args=(torch.ones(64, 64), torch.ones(64, 64)))

    assert trace.missing == {}
    with tarfile.open(tmp_path / "step.tar") as tar:
        content = {name: tar.extractfile(name).read() for name in tar.getnames()}
    (ours, *others) = json.loads(content["perfetto_manifest.json"])["perfetto_manifest"]["files"]
    assert ours == {"path": "gradwire.json.gz"}
    assert [each["path"] for each in others] == [f"torch-w{n}.json.gz" for n in range(3)]
    rows = json.loads(gzip.decompress(content["gradwire.json.gz"]))["traceEvents"]
    check_rows(rows)
    (served,) = [row for row in rows if row["ph"] == "X" and row["name"] == "torch.matmul"]
    profile = json.loads(gzip.decompress(content["torch-w1.json.gz"]))
    assert profile["distributedInfo"] == {"rank": 1, "world_size": 3, "backend": "gradwire"}
    (product,) = [row for row in profile["traceEvents"] if row["name"] == "aten::matmul"]
    at = product["ts"] + others[1]["clocks"]["offset_ns"] / 1000
    assert served["ts"] - 1000 < at < served["ts"] + served["dur"] + 1000


OTHER_CLOCK = ["unshare", "--time", "--monotonic", "1000", "--fork"]
SKEWED = """
import sys, torch, gradwire as gw

def main():
    x = torch.ones(3, requires_grad=True)
    with gw.trace(sys.argv[1]) as trace:
        gw.rpc_sync("w1", torch.sin, args=(x,)).sum().backward()
    timeline = trace.timeline
    assert 0 < timeline.uncertainty < 0.5, timeline.uncertainty
    assert [one for one in timeline.slices if one.track.worker == "w1"]
    assert abs(timeline.logs["w1"].offsets.first.seconds + 1000) < 1
    assert trace.missing == {}

if __name__ == "__main__":
    gw.run(main)
"""


def _has_other_clocks():
    command = [*OTHER_CLOCK, "true"]
    return shutil.which("unshare") and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.skipif(not _has_other_clocks(), reason="needs a time namespace, so root on Linux")
def test_the_clock_of_another_machine_is_measured(tmp_path):
    script, file = tmp_path / "skewed.py", tmp_path / "step.json"
    script.write_text(SKEWED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(script), str(file)]

    other = subprocess.Popen([*OTHER_CLOCK, *command], env={**os.environ, **job, "RANK": "1"})
    done = subprocess.run(
        command,
        env={**os.environ, **job, "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert other.wait(60) == 0
    assert "over 2 workers (clocks known to ±" in done.stderr
    check_rows(json.loads(file.read_bytes())["traceEvents"])
