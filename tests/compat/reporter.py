"""Run by the tests of `python -m gradwire.compat`: says whose RPC each kind of process sees."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import torch.distributed.rpc as rpc


def say(where: str) -> None:
    print(f"{where}: {rpc.__name__}", flush=True)


def main() -> None:
    say("main")
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=say, args=(method,))
        child.start()
        child.join()
    code = "import torch.distributed.rpc as rpc; print('subprocess:', rpc.__name__)"
    subprocess.run([sys.executable, "-c", code], check=True)
    quick = "import sys; print('idle:', 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", quick], check=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["torchrun"]:
            say(f"rank {os.environ['RANK']}")
        case ["arguments", *rest]:
            print(sys.argv[0], rest, sys.path[0], __name__, sys.modules["__main__"].__file__)
        case _:
            main()
