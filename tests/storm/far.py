"""One worker of a storm: a program of its own, told what to do by lines on its standard input.

`python -m tests.storm.far FD` answers with a line of JSON on the descriptor FD for each command. It
reads commands on its main thread, so that signal handlers, which run there, interrupt whatever it
is told to do.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import gradwire
from gradwire.current import current_worker
from gradwire.options import Options, Timeouts
from tests.leftovers import eventually
from tests.storm import forks, hazards, rounds, stuck
from tests.storm.notes import NOTES

TIMEOUTS = Timeouts(
    join=60, connect=10, call=10, backward=10, step=10, shutdown=20, suspect=10, dead=20
)
_BLAMES = ("sign of life", "was lost", "did not answer")


class _Listening(logging.Handler):
    """Everybody is alive: whatever is said of a lost or silent worker is wrong."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(blame in text for blame in _BLAMES) and forks.is_original():
            NOTES.wrong(f"the log says: {text}")


def join(directory: str, name: str, rank: int, listen: str) -> None:
    options = Options(
        init_method=f"file://{directory}/meeting",
        is_open=True,
        listen=listen,
        secret=str(Path(directory) / "secret"),
        timeouts=TIMEOUTS,
    )
    gradwire.init_rpc(name, rank, options=options, expose=[rounds])
    rounds.reset()
    stuck.watch(directory, name)


def episode(seed: int, seconds: float, kinds: list[str]) -> dict:
    """Rounds for so long, under these hazards; what was done, and what was wrong."""
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    with hazards.under(kinds, chance):
        trainers = [
            threading.Thread(
                target=_rounds, args=(chance.random(), until, kinds), name="trainer", daemon=True
            )
            for _ in range(chance.randint(0, 2) if "threads" in kinds else 0)
        ]
        for trainer in trainers:
            trainer.start()
        _rounds(chance.random(), until, kinds)
        for trainer in trainers:
            trainer.join(60)
            if trainer.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                NOTES.wrong("a trainer's thread has not ended")
    forks.reap(wait=True)
    return NOTES.taken()


def _rounds(seed: float, until: float, kinds: list[str]) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until and not NOTES.is_wrong:
        rounds.one(chance, kinds)
        forks.reap(wait=False)


def leftovers() -> dict:
    """What is left once all are calm."""
    found: dict = {}

    def is_clean() -> bool:
        gc.collect()
        worker = current_worker.find()
        refs = worker.refs.statistics()
        found.clear()
        found.update(
            contexts=len(worker.engine.contexts),
            passes=len(worker.engine.passes),
            requests=worker.agent.in_flight,
            jobs=worker.agent.dispatch.active,
            finalizers=hazards.owed(),
            **{name: getattr(refs, name) for name in refs.__dataclass_fields__},
        )
        return not any(found.values())

    eventually(is_clean, 10)
    return {what: n for what, n in found.items() if n}


def leave() -> None:
    gradwire.shutdown()


def remains() -> dict:
    """What an ended worker must not keep: threads, sockets, memory, children."""
    found: dict = {}

    def is_clean() -> bool:
        found.clear()
        names = [t.name for t in threading.enumerate() if t.name.startswith("gradwire")]
        if names:
            found["threads"] = names
        handles = [h for h in _handles() if h.startswith(("socket:", "/memfd"))]
        if handles:
            found["handles"] = handles
        return not found

    eventually(is_clean, 5)
    try:
        os.waitpid(-1, os.WNOHANG)
        found["children"] = True
    except ChildProcessError:
        pass
    return found


def _handles() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the one that listed the directory
            continue
    return found


COMMANDS = {c.__name__: c for c in (join, episode, leftovers, leave, remains)}


def main() -> None:
    answers = int(sys.argv[1])
    sys.unraisablehook = forks.unraisable
    warnings.simplefilter("ignore")  # a finalizer may use what its context has forgotten
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    logging.getLogger("gradwire").addHandler(_Listening())
    rounds.warm_up()
    # Not sys.stdin: its lock would be held by the interrupted read when a handler forks.
    heard = b""
    while True:
        while b"\n" not in heard:
            more = os.read(0, 1 << 16)
            if not more:
                return
            heard += more
        line, _, heard = heard.partition(b"\n")
        command = json.loads(line)
        name = command.pop("do")
        try:
            said = {"said": COMMANDS[name](**command)}
        except Exception as error:
            said = {"raised": f"{type(error).__name__}: {error}"}
        os.write(answers, json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    main()
