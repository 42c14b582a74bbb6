"""gradwire on Ray: drivers are scripts of their own, as users write them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.leftovers import eventually
from tests.ray.conftest import ROOT

pytestmark = [
    pytest.mark.needs_ray,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(300),
]

EXAMPLE = (ROOT / "examples" / "03_pipeline.py").read_text()
GUIDE = ROOT / "docs" / "guide" / "ray.md"


def losses(text: str) -> list[str]:
    return re.findall(r"(?:loss|in one process) (-?0x[\w.+-]+)", text)


def test_an_example_gives_the_same_losses_to_the_bit_as_by_itself(one_node):
    exact = EXAMPLE.replace("{loss.item():.9f}", "{loss.item().hex()}")
    exact = exact.replace("{expected.item():.9f}", "{expected.item().hex()}")
    on_ray = exact.replace("gradwire.run(main, world_size=3)", "gradwire.ray.run(main, workers=3)")
    assert exact != on_ray

    there, here = losses(one_node.run(on_ray)), losses(one_node.run(exact))

    assert len(there) == 2
    assert there == here
    assert one_node.ask("left") == "[]"


def test_without_ray_the_error_says_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import gradwire; gradwire.ray"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "UsageError: gradwire.ray needs the library ray" in done.stderr
    assert "pip install 'gradwire[ray]'" in done.stderr


PROGRAM = '''
import os, signal, sys, time

import ray
import torch

import gradwire


class Told(Exception):
    """An error of the script's own."""


def fail():
    raise Told("as told")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def call(function):
    print("calling", flush=True)
    gradwire.rpc_sync("w1", function)


def wait():
    time.sleep(100)


def attempt(*args, **kwargs):
    try:
        print("value", gradwire.ray.run(*args, **kwargs))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
        print("cause", repr(error.__cause__))
        return error


if __name__ == "__main__":
'''


def with_program(body: str) -> str:
    """The program above, whose main part is this."""
    return PROGRAM + "    " + body.strip().replace("\n", "\n    ") + "\n"


def test_an_error_of_a_worker_has_its_own_type_and_names_the_worker(one_node):
    out = one_node.run(
        with_program("""
error = attempt(call, 2, args=(fail,))
assert isinstance(error, Told) and error.worker == "w1", error
""")
    )

    assert "RemoteTold: Told on w1: as told" in out
    assert one_node.ask("left") == "[]"


def test_an_actor_that_dies_is_named_and_nothing_is_left(one_node):
    out = one_node.run(with_program("attempt(call, 2, args=(end,))"))

    assert re.search(r"PeerLost: w1 died \(.+\) while it was at work", out)
    assert "cause RemotePeerLost(" in out
    assert one_node.ask("left") == "[]"


def test_ctrl_c_leaves_nothing(one_node):
    driver = one_node.start(with_program("attempt(call, 2, args=(wait,))"))
    try:
        assert any("calling" in line for line in driver.stdout)
        driver.send_signal(signal.SIGINT)
        out, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.communicate()

    assert "KeyboardInterrupt" in out
    assert one_node.ask("left") == "[]"


def test_a_driver_that_is_killed_leaves_nothing(one_node):
    driver = one_node.start(with_program("attempt(call, 2, args=(wait,))"))
    try:
        assert any("calling" in line for line in driver.stdout)
    finally:
        driver.kill()
        driver.communicate()

    assert eventually(lambda: one_node.ask("left") == "[]", 60)


def test_what_cannot_be_placed_or_sent_is_an_error_that_says_how(one_node):
    out = one_node.run(
        with_program("""
soon = gradwire.Options(timeouts=gradwire.Timeouts(join=2))
attempt(end, 2, resources={"CPU": 1, "scanner": 1}, options=soon)
attempt(end, 2, resources={})
attempt(end, 2, strategy="SPRAY")
attempt(lambda: 0, 2)
attempt(time.time, 2, timeout=0)
attempt(time.time, 2, options=gradwire.Options(is_open=True))
attempt(wait, 1, timeout=8)
""")
    )

    assert re.search(
        r"JoinTimeout: Ray found no places for 2 workers within 2 s: each needs "
        r"{'CPU': 1, 'scanner': 1}, PACK; the cluster has {.*'CPU': 4",
        out,
    )
    assert "UsageError: a worker cannot be placed by resources={}" in out
    assert "UsageError: Ray makes no placement group of these bundles: " in out
    assert "UsageError: what run() was given cannot be pickled" in out
    assert "UsageError: run(timeout=0) is not a positive, finite number" in out
    assert "UsageError: run() needs a closed world" in out
    assert "DeadlinePassed: run() gave up on w0 after 8 s" in out
    assert one_node.ask("left") == "[]"


def test_a_script_without_a_guard_is_told_so(one_node):
    out = one_node.run("import gradwire, time\ngradwire.ray.run(time.time, 2)\n")

    assert "run() was called while a worker was importing the script" in out
    assert 'if __name__ == "__main__":' in out


TRAINING = """
STEPS, KILL_IN = 6, 3


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def load(self, state):
        self.load_state_dict(state)

    def state(self):
        return {name: value.clone() for name, value in self.state_dict().items()}

    def parameter_refs(self):
        return [gradwire.RRef(parameter) for parameter in self.parameters()]


def kill_raylet():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)  # the actor ends when it notices, in the middle of this call


def place():
    return ray.get_runtime_context().get_node_id(), gradwire.incarnation()


def train(killer):
    torch.set_num_threads(1)
    parts, states, optimizer = {}, {}, None

    def build(attempt=None):
        nonlocal optimizer
        parts["w0"] = gradwire.remote("w0", Layer, args=(0,))
        parts["w1"] = gradwire.remote("w1", Layer, args=(1,))
        for name, state in states.items():
            parts[name].rpc_sync().load(state)
        refs = [ref for part in parts.values() for ref in part.rpc_sync().parameter_refs()]
        optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)

    build()
    committed = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, dtype=torch.float64, generator=generator)
        for attempt in gradwire.retrying(times=3, restore=build):
            with attempt:
                optimizer.zero_grad()
                hidden = parts["w0"].rpc_sync().forward(x)
                loss = parts["w1"].rpc_sync().forward(hidden).square().mean()
                if step == KILL_IN and attempt.number == 0 and killer:
                    gradwire.rpc_sync("w1", killer)
                loss.backward()
                optimizer.step()
                new = {name: part.rpc_sync().state() for name, part in parts.items()}
        states.update(new)
        weights = [value for state in new.values() for value in state.values()]
        committed.append((loss.item().hex(), *[float(w.sum()).hex() for w in weights]))
    return committed, gradwire.rpc_sync("w1", place), place()
"""


def with_training(body: str) -> str:
    return with_program(body).replace("def attempt(", TRAINING + "\n\ndef attempt(")


def test_an_actor_that_dies_is_restarted_and_the_next_committed_step_is_exact(one_node):
    out = one_node.run(
        with_training("""
quiet, _, _ = gradwire.ray.run(train, 2, args=(None,))
steps, (_, incarnation), _ = gradwire.ray.run(train, 2, args=(end,), restarts=1)
assert incarnation == 1
assert steps == quiet
print(len(steps), "steps are equal")
""")
    )

    assert "6 steps are equal" in out
    assert re.search(r"w1 died \(.+\) while it was at work; restarted as incarnation 1", out)
    assert one_node.ask("left") == "[]"


def test_a_node_that_dies_in_a_step_is_named_and_its_worker_restarted_elsewhere(three_nodes):
    out = three_nodes.run(
        with_training("""
on_two = {"strategy": "SPREAD"}
quiet, (first, _), (other, _) = gradwire.ray.run(train, 2, args=(None,), **on_two)
assert first != other
found = gradwire.ray.run(train, 2, args=(kill_raylet,), restarts=1, **on_two)
steps, (node, incarnation), (other, mine) = found
assert (incarnation, mine) == (1, 0)
assert node == other, "only one node is left"
assert steps == quiet
print(len(steps), "steps are equal")
""")
    )

    assert "6 steps are equal" in out
    assert re.search(r"w1 died \(.+\) while it was at work; restarted as incarnation 1", out)
    assert three_nodes.ask("left") == "[]"
    assert three_nodes.ask("add 2") == "added"  # for the next tests


SEARCH = '''
import glob, hashlib, os
from pathlib import Path

PRIVATE = "PRIVATE" + " KEY"  # this text is in a file


def secret():
    return hashlib.sha256(b"the secret of a test").hexdigest()


def holders(needles):
    """Files, arguments, environments and shared memory of all processes that hold one of these."""
    places = [p for p in Path(os.environ["RAY_TMPDIR"]).rglob("*") if p.is_file()]
    places += map(Path, glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"))
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(("/memfd", "/dev/shm", "/tmp")):
                places.append(Path(link))
        except OSError:
            continue
    found, seen = [], 0
    for place in places:
        try:
            data = place.read_bytes()
        except OSError:
            continue
        seen += 1
        found += [str(place) for needle in needles if needle.encode() in data]
    assert seen > 30, seen
    return found


def search_for_secret():
    with open(os.path.join(os.environ["RAY_TMPDIR"], "known"), "w") as file:
        file.write(secret())
    known = holders([secret()])
    os.unlink(file.name)
    return known, holders([secret(), PRIVATE])


def call_search():
    return gradwire.rpc_sync("w1", search_for_secret)
'''


def test_nothing_of_ray_holds_the_secret_or_a_key(three_nodes):
    body = """
import gradwire.ray.job
gradwire.ray.job.new_secret_text = secret
known, found = gradwire.ray.run(call_search, 2, options=gradwire.Options(
    timeouts=gradwire.Timeouts(call=90)))
assert len(known) == 1, known
print("during", found, "after", holders([secret(), PRIVATE]))
print(ray.cluster_resources() and "state", secret() in str(ray._private.state.actors()))
"""
    out = three_nodes.run(SEARCH + with_program(body))

    assert "during [] after []" in out
    assert "state False" in out


def test_if_the_caller_dies_its_next_incarnation_calls_the_function_again(one_node):
    out = one_node.run(
        with_program("attempt(die_once, 2, restarts=1)").replace(
            "def wait(",
            "def die_once():\n"
            "    if not gradwire.incarnation():\n"
            "        end()\n"
            "    return gradwire.incarnation(), gradwire.incarnation('w1')\n\n\n"
            "def wait(",
        )
    )

    assert "value (1, 0)" in out


def test_without_cryptography_nodes_need_an_explicit_choice(three_nodes):
    out = three_nodes.run(
        with_program("""
sys.modules["cryptography"] = None
attempt(os.getpid, 2)
print("insecure", gradwire.ray.run(sum, 2, ([1, 2],), options=gradwire.Options(insecure=True)))
""")
    )

    assert "UsageError: to make certificates, gradwire needs the library cryptography" in out
    assert "insecure 3" in out
    assert three_nodes.ask("left") == "[]"


def test_the_driver_calls_the_workers_as_one_of_them(three_nodes):
    out = three_nodes.run(
        with_training("""
with gradwire.ray.workers(3, strategy="SPREAD") as names:
    assert names == ["w1", "w2", "w3"], names
    places = {gradwire.rpc_sync(name, place)[0] for name in names}
    x = torch.ones(3, requires_grad=True)
    gradwire.rpc_sync("w3", torch.sin, args=(x,)).sum().backward()
    print(len(places), "nodes,", torch.equal(x.grad, x.detach().cos()))
from gradwire.current import current_worker
print("a worker no more:", current_worker.maybe_default())
try:
    with gradwire.ray.workers(1):
        raise Told("in the block")
except Told as error:
    print("told", error)
""")
    )

    assert "2 nodes, True" in out
    assert "a worker no more: None" in out
    assert "told in the block" in out
    assert three_nodes.ask("left") == "[]"


def test_the_driver_trains_on_when_an_actor_is_restarted(one_node):
    out = one_node.run(
        with_training("""
with gradwire.ray.workers(1):
    quiet, _, _ = train(None)
with gradwire.ray.workers(1, restarts=1):
    steps, (_, incarnation), _ = train(end)
assert incarnation == 1
assert steps == quiet
print(len(steps), "steps are equal")
with gradwire.ray.workers(2):
    try:
        call(end)
    except gradwire.PeerLost as error:
        print("lost:", error.message)
    print("w2 still answers:", gradwire.rpc_sync("w2", place)[1] == 0)
""")
    )

    assert "6 steps are equal" in out
    assert "lost: w1 was lost" in out
    assert one_node.ask("left") == "[]"


BESIDE = """
def triple(x):
    return 3 * x
"""


def test_a_worker_sees_its_own_gpus_and_the_modules_beside_the_script(one_node):
    (one_node.path / "beside.py").write_text(BESIDE)
    out = one_node.run("""
        import os

        import beside
        import ray
        import torch

        import gradwire


        def gpus():
            return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_gpu_ids()


        def main():
            tripled = gradwire.rpc_sync("w1", beside.triple, args=(torch.ones(1),))
            return gpus(), gradwire.rpc_sync("w1", gpus), tripled.item()


        if __name__ == "__main__":
            each = {"CPU": 1, "GPU": 1}
            print(gradwire.ray.run(main, 2, resources=each, expose=[beside]))
    """)

    assert "(('0', [0]), ('1', [1]), 3.0)" in out or "(('1', [1]), ('0', [0]), 3.0)" in out


def test_what_a_node_does_not_have_is_named(one_node):
    out = one_node.run(
        with_program("attempt(wait, 1)").replace(
            "import ray\n", "import ray\nif __name__ != '__main__':\n    import only_here\n", 1
        )
    )
    assert (
        "UsageError on w0: w0 could not import the script: ModuleNotFoundError: No module named "
        "'only_here'" in out
    )
    assert 'ray.init(runtime_env={"working_dir": "."})' in out

    out = one_node.run(
        with_program(
            'ray.init(runtime_env={"env_vars": {"PYTHONPATH": "/nowhere"}})\nattempt(wait, 1)'
        )
    )
    assert "PeerLost: w0 died (ModuleNotFoundError: No module named 'gradwire') while it" in out
    assert "hint: gradwire must be installed on every node" in out


def test_the_program_of_the_guide_runs(one_node):
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)

    out = one_node.run(program)

    assert "run: [0.54030" in out
    assert "workers: [0.0, 0.0]" in out
