"""`python -m gradwire.compat`: an unmodified program, and the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTER = HERE / "reporter.py"

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def run(*arguments: str, python_path: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*python_path, *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def printed_by(*arguments: str, python_path: tuple[str, ...] = ()) -> list[str]:
    done = run(*arguments, python_path=python_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_kind_of_process_that_a_program_starts_is_substituted():
    assert printed_by("-m", "gradwire.compat", str(REPORTER)) == [
        "main: gradwire.compat.rpc",
        "fork: gradwire.compat.rpc",
        "spawn: gradwire.compat.rpc",
        "forkserver: gradwire.compat.rpc",
        "subprocess: gradwire.compat.rpc",
        "idle: False",
    ]


def test_the_workers_of_torchrun_are_substituted():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    printed = printed_by("-m", "gradwire.compat", *torchrun, str(REPORTER), "torchrun")

    assert sorted(printed) == ["rank 0: gradwire.compat.rpc", "rank 1: gradwire.compat.rpc"]


def test_a_program_sees_its_own_arguments_and_path():
    plain = printed_by(str(REPORTER), "arguments", "--depth", "3")

    assert printed_by("-m", "gradwire.compat", str(REPORTER), "arguments", "--depth", "3") == plain


def test_a_module_sees_its_own_arguments():
    plain = printed_by("-m", "tests.compat.reporter", "arguments", "x")

    assert (
        printed_by("-m", "gradwire.compat", "-m", "tests.compat.reporter", "arguments", "x")
        == plain
    )


def test_a_child_may_import_gradwire_first(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys\n"
        "code = 'import gradwire, torch.distributed.rpc as rpc; print(rpc.__name__)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )

    assert printed_by("-m", "gradwire.compat", str(program)) == ["gradwire.compat.rpc"]


def test_a_child_runs_the_sitecustomize_of_the_machine_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'print(customized)'], check=True)\n"
    )

    printed = printed_by("-m", "gradwire.compat", str(program), python_path=(str(tmp_path),))

    assert printed == ["True"]


WORLD = """
import os, stat, sys, torch.distributed.rpc as rpc, torch.multiprocessing as mp

def work(rank, place):
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        print(rpc.rpc_sync("w1", os.getenv, args=("GRADWIRE_SECRET_FILE",)))
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=2)
    path = os.environ["GRADWIRE_SECRET_FILE"]
    print(path, oct(stat.S_IMODE(os.stat(path).st_mode)))
"""


def test_the_workers_of_a_program_share_a_secret_that_ends_with_it(
    tmp_path, no_secret, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text(WORLD)

    in_worker, at_the_end = printed_by(
        "-m", "gradwire.compat", str(program), f"file://{tmp_path}/meeting"
    )

    assert at_the_end == f"{in_worker} 0o600"
    assert in_worker.startswith(f"{tmp_path}/gradwire-compat-")
    assert not list(tmp_path.glob("gradwire-*"))


def test_a_secret_that_is_there_is_used(tmp_path, secret):
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['GRADWIRE_SECRET_FILE'])")

    assert printed_by("-m", "gradwire.compat", str(program)) == [secret]


@pytest.mark.parametrize(
    ("arguments", "complaint"), [((), "no program given"), (("--fast",), "unknown option --fast")]
)
def test_a_wrong_command_line_is_explained(arguments, complaint):
    done = run("-m", "gradwire.compat", *arguments)

    assert done.returncode == 1
    assert complaint in done.stderr
    assert "usage: python -m gradwire.compat" in done.stderr
