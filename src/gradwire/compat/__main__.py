"""`python -m gradwire.compat [-m] program args…` runs it with gradwire in the place of torch's RPC.

The program is run as `__main__`, with its own `sys.argv` and `sys.path`. Python processes that it
starts are substituted too: see `gradwire/compat/startup/sitecustomize.py`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

from gradwire.agent.peers.secret import write_secret
from gradwire.compat.substitution import install
from gradwire.options import hand_down_secret, put_first_on_python_path, secret_from_environment

_USAGE = "usage: python -m gradwire.compat [-m module | program.py] [arguments of the program]"


def main(arguments: list[str]) -> None:
    """Install, hand the substitution down to child processes, and become the program."""
    match arguments:
        case ["-m", module, *rest]:
            _begin()
            sys.argv = [module, *rest]  # run_module puts the file's name first
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-h" | "--help", *_]:
            print(_USAGE)
        case [program, *_] if not program.startswith("-"):
            _begin()
            sys.argv = arguments
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(program))
            runpy.run_path(program, run_name="__main__")
        case _:
            reason = f"unknown option {arguments[0]}" if arguments else "no program given"
            sys.exit(f"{reason}\n{_USAGE}")


def _begin() -> None:
    """A secret for the workers, unless the environment names one, lasts as long as this process."""
    if not secret_from_environment():
        directory = tempfile.mkdtemp(prefix="gradwire-compat-")
        hand_down_secret(write_secret(Path(directory) / "secret"))
        atexit.register(_remove, directory, os.getpid())
    install()
    put_first_on_python_path(str(Path(__file__).parent / "startup"))


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # and not one that it forked
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
