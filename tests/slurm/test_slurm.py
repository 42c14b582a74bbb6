"""Programs that srun and sbatch start, on a real Slurm of two nodes on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gradwire.launch import certs
from tests.leftovers import eventually
from tests.processes.test_launchers import PROGRAM
from tests.slurm.cluster import Slurm, why_impossible
from tests.test_places import BATCH_SCRIPT, INTERACTIVE, SRUN

ROOT = Path(__file__).parents[2]
LIMIT = 100
WORKERS = 3
SHIMS = {"python": "", "gradwire": " -m gradwire"}
PAGES = "".join(page.read_text() for page in sorted((ROOT / "docs" / "guide").glob("*.md")))
SCRIPT, CERTIFIED = (
    next(block for block in re.findall(r"^```sh\n(.*?)^```", PAGES, re.M | re.S) if word in block)
    for word in ("#SBATCH", "GRADWIRE_TLS_CERT=certs")
)
IMPOSSIBLE = why_impossible()

pytestmark = [
    pytest.mark.needs_slurm,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(IMPOSSIBLE is not None, reason=str(IMPOSSIBLE)),
    pytest.mark.usefixtures("no_task_is_left"),
]

DONE = ["gradient [4.0, 4.0, 4.0] restart 0", *["returned None"] * 2, "returned the value"]


@pytest.fixture(scope="session")
def slurm():
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, Slurm(Path(directory)) as made:
        yield made


@pytest.fixture
def no_task_is_left(slurm):
    yield
    assert eventually(lambda: not slurm.tasks()), slurm.tasks()


@pytest.fixture
def home(tmp_path):
    """Where the reader of the guide works: the program, and the two commands it uses."""
    (tmp_path / "bin").mkdir()
    for name, arguments in SHIMS.items():
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        shim.chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def start(slurm, home):
    """Start a command at home."""

    def started(*command: str, **variables: str) -> subprocess.Popen:
        places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {
            **slurm.environment,
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in places if place),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        return subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def finished(start):
    """A command's exit status, and what it has printed."""

    def run(*command: str, **variables: str) -> tuple[int, str, str]:
        with start(*command, **variables) as process:
            try:
                printed, errors = process.communicate(timeout=LIMIT)
            finally:
                process.kill()
        return process.returncode, printed, errors

    return run


@pytest.fixture
def srun(finished):
    def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
        return finished("srun", "-n", str(WORKERS), *arguments, **variables)

    return run


@pytest.fixture
def sbatch(finished, slurm, home):
    """The exit status of a script and the sorted lines of its output, less torch's warnings."""

    def run(text: str, *options: str, **variables: str) -> tuple[int, list[str]]:
        (home / "job.sh").write_text(text)
        command = ["sbatch", "--parsable", "--output=out", *options, "job.sh"]
        status, job, errors = finished(*command, **variables)
        assert status == 0, errors
        assert eventually(lambda: slurm.status_of(job.strip()) is not None, LIMIT)
        lines = sorted((home / "out").read_text().splitlines())
        # torch warns if the name server is slow to say that an address has no name
        return slurm.status_of(job.strip()), [line for line in lines if line[:2] != "[W"]

    return run


def given(printed):
    """The variables that `env` has printed."""
    return dict(line.split("=", 1) for line in printed if "=" in line)


# -- what the table of places relies on


def test_a_step_has_the_variables_that_were_recorded(srun):
    show = '[ "$SLURM_PROCID" != 2 ] || env'
    status, printed, errors = srun("--nodes=2", "sh", "-c", show)

    assert status == 0, errors
    found = given(printed.splitlines())
    assert SRUN.keys() <= found.keys()
    assert found["SLURM_STEP_NUM_TASKS"] == "3"
    assert found["SLURM_STEP_NUM_NODES"] == "2"
    assert found["SLURM_STEP_NODELIST"] == "localhost,other"
    assert (found["SLURMD_NODENAME"], found["SLURM_NODEID"]) == ("other", "1")


def test_a_batch_script_has_no_variables_of_a_step(sbatch):
    status, printed = sbatch("#!/bin/sh\nenv\n", "--ntasks=4")

    assert status == 0
    found = given(printed)
    assert BATCH_SCRIPT.keys() <= found.keys()
    assert found["SLURM_PROCID"] == "0"
    assert [name for name in found if name.startswith("SLURM_STEP")] == []


def test_an_interactive_step_has_one_task(finished):
    command = "srun --interactive --preserve-env --pty env"
    status, printed, errors = finished("salloc", "-n", "4", *shlex.split(command))

    assert status == 0, errors
    found = {name: value.strip() for name, value in given(printed.splitlines()).items()}
    constant = INTERACTIVE.keys() - {"SLURM_JOB_ID", "SLURM_STEP_NODELIST"}
    assert {name: found[name] for name in constant} == {n: INTERACTIVE[n] for n in constant}


# -- one node


def test_tasks_of_srun_take_their_places_though_the_name_of_their_node_is_unknown(srun):
    status, printed, errors = srun("--nodelist=other", "python", "train.py", "nothing")

    assert status == 0, errors
    assert sorted(printed.splitlines()) == DONE


def test_an_example_runs_the_same_by_srun_and_by_itself(srun, finished):
    example = str(ROOT / "examples" / "03_pipeline.py")
    losses = set()
    for status, printed, errors in (finished("python", example), srun("python", example)):
        assert status == 0, errors
        losses.add(re.search(r"^loss .*$", printed, re.M)[0])
    assert len(losses) == 1


def test_an_error_of_the_function_ends_the_step(srun):
    status, printed, errors = srun("python", "train.py", "raises")

    assert status == 1
    assert "returned" not in printed
    assert "ValueError: the loss is infinite" in errors
    assert re.search(r"^srun: error: \w+: tasks? 0.*: Exited with exit code 1$", errors, re.M)


def test_a_worker_that_dies_in_a_call_is_named(srun):
    status, _, errors = srun("python", "train.py", "lost")

    assert status != 0
    assert "PeerLost: w2" in errors
    assert re.search(r"^srun: error: \w+: task 2: Killed$", errors, re.M)


@pytest.mark.parametrize(("rank", "options"), [("0", ()), ("2", ("--kill-on-bad-exit=1",))])
def test_all_end_when_one_is_killed(start, slurm, rank, options):
    command = ["srun", "-n", str(WORKERS), *options, "python", "train.py", "waits"]
    with start(*command) as step:
        assert step.stdout.readline() == "up\n", step.stderr.read()
        (task,) = [pid for pid, of in slurm.tasks().items() if of["SLURM_PROCID"] == rank]
        os.kill(task, signal.SIGKILL)
        _, errors = step.communicate(timeout=LIMIT)

    assert step.returncode != 0
    assert re.search(rf"^srun: error: \w+: task {rank}: Killed$", errors, re.M)


def test_nothing_is_left_when_srun_is_killed(start, slurm):
    with start("srun", "-n", str(WORKERS), "python", "train.py", "waits") as step:
        assert step.stdout.readline() == "up\n", step.stderr.read()
        assert len(slurm.tasks()) >= WORKERS
        step.kill()
        assert eventually(lambda: not slurm.tasks(), LIMIT)


def test_two_steps_run_at_once_on_one_node(sbatch):
    step = "srun --exact -n 3 python train.py nothing &\n"
    status, printed = sbatch(f"#!/bin/sh\n{step}{step}wait\n", "--nodes=1", "--ntasks=6")

    assert status == 0, printed
    assert printed == sorted(DONE * 2)


def test_programs_with_workers_of_their_own_have_them_in_a_batch_script_and_a_step(sbatch):
    torchrun = "python -m torch.distributed.run --standalone --local-addr=127.0.0.1"
    lines = [
        "gradwire run -n 3 train.py nothing",
        f"srun -n 1 {torchrun} --nproc-per-node=3 train.py nothing",
    ]
    status, printed = sbatch("#!/bin/sh\n" + "\n".join(lines), "--nodes=1", "--ntasks=4")

    assert status == 0, printed
    assert [line for line in printed if line in DONE] == sorted([DONE[0], DONE[-1], *DONE])


# -- two nodes


def test_the_batch_script_of_the_guide_works_over_two_nodes(sbatch, home):
    text = SCRIPT.replace("train.py", "train.py nothing")
    status, printed = sbatch(text, "--nodes=2", f"--ntasks={WORKERS}")

    assert (status, printed) == (0, DONE)
    assert list(home.glob(".gradwire-*")) == []


def test_two_nodes_need_a_secret(srun):
    command = ["--nodes=2", "--kill-on-bad-exit=1", "python", "train.py", "nothing"]
    status, _, errors = srun(*command)

    assert status != 0
    assert "this worker was given no secret" in errors


@pytest.mark.parametrize("shift", [False, True])
def test_workers_on_two_nodes_show_the_certificates_of_the_guide(sbatch, home, shift):
    program = PROGRAM.replace("gw.Options(", 'gw.Options(listen="tcp://127.0.0.1:0", ')
    (home / "train.py").write_text(program)
    names = [f"w{rank}" for rank in range(WORKERS)]
    certs.make(certs.Folder(home / "certs"), names, days=1)
    *first, _ = SCRIPT.splitlines()
    text = "\n".join([*first, CERTIFIED]).replace("train.py", "train.py nothing")
    if shift:
        text = text.replace("{name}", "w1")

    status, printed = sbatch(text, "--nodes=2", f"--ntasks={WORKERS}")

    if shift:
        assert status != 0
        assert "has a certificate for" in "\n".join(printed)
    else:
        assert (status, printed) == (0, DONE)


def test_rank_0_on_another_node_than_the_first_is_an_error_until_it_is_named(srun, home):
    (home / "hosts").write_text("other\nlocalhost\nlocalhost\n")
    (home / "secret").write_text("0" * 64)
    (home / "secret").chmod(0o600)
    there = {"SLURM_HOSTFILE": "hosts", "GRADWIRE_SECRET_FILE": str(home / "secret")}
    command = ["--distribution=arbitrary", "--kill-on-bad-exit=1", "python", "train.py", "nothing"]

    status, _, errors = srun(*command, **there)
    assert status != 0
    assert "the task of rank 0 runs on other, and workers would meet on localhost" in errors

    status, printed, errors = srun(*command, **there, MASTER_ADDR="127.0.0.1")
    assert status == 0, errors
    assert sorted(printed.splitlines()) == DONE
