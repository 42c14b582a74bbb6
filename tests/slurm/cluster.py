"""A Slurm cluster of two nodes on this machine, from the system's packages and without systemd.

Debian's slurmd may run several times on one machine, each as a node with a name and a port of its
own. All listen on the loopback interface, and so does srun.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.leftovers import eventually

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("srun", "salloc", "sbatch", "scancel", "sinfo", "squeue", "scontrol")
NODES = ("localhost", "other")
"""the first one resolves, as workers on both nodes meet there; the second one does not"""
START_SECONDS = 40
STOP_SECONDS = 20

SETTINGS = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdSpoolDir={directory}/%n
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8\n"


def why_impossible() -> str | None:
    """Why no cluster can be started here; None if one can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in (*DAEMONS, *COMMANDS) if _found(name) is None]
    return f"needs the packages slurmctld, slurmd and munge: no {missing[0]}" if missing else None


class Slurm:
    """The daemons, from the beginning of a with statement to its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = directory / "slurm.conf"
        self.environment = {**_clean(os.environ), "SLURM_CONF": str(self.settings)}
        self._stack = ExitStack()

    def __enter__(self) -> Slurm:
        with ExitStack() as stack:
            self._stack = stack
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        here = self.directory
        (here / "key").write_bytes(secrets.token_bytes(128))
        (here / "key").chmod(0o600)
        controller, *ports = _free_ports(1 + len(NODES))
        text = SETTINGS.format(directory=here, port=controller)
        for name, port in zip(reversed(NODES), ports, strict=True):  # a first localhost is refused
            text += NODE.format(name=name, host=socket.gethostname(), port=port)
        for name in ("state", *NODES):
            (here / name).mkdir()
        self.settings.write_text(text)
        files = {"socket": "munge", "key-file": "key", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        munged = [f"--{option}={here / file}" for option, file in files.items()]
        self._daemon("munged", "--foreground", "--force", *munged)
        self._await((here / "munge").exists, "munged is not up")
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name, log=f"slurmd-{name}")
        self._await(self._is_idle, "the nodes are not up")
        self._stack.callback(self._end_jobs)

    def _daemon(self, name: str, *arguments: str, log: str = "") -> None:
        program = _found(name)
        assert program is not None
        with (self.directory / f"{log or name}.out").open("w") as out:
            daemon = subprocess.Popen(
                [program, *arguments], env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )
        self._stack.callback(_stop, daemon)

    def _await(self, condition, problem: str) -> None:
        if not eventually(condition, START_SECONDS):
            logs = {path.name: path.read_text()[-2000:] for path in self.directory.glob("*.out")}
            raise AssertionError(f"{problem}: {logs}")

    def _is_idle(self) -> bool:
        return self._answer("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)

    def _end_jobs(self) -> None:
        self._answer("scancel", "--user=root")
        eventually(lambda: not self._answer("squeue", "-h"), STOP_SECONDS)

    def _answer(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def status_of(self, job: str) -> int | None:
        """The exit status of a batch job, which `sbatch --wait` would tell half a minute late."""
        shown = self._answer("scontrol", "show", "job", job)
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        if fields["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
            return None
        return int(fields["ExitCode"].split(":")[0])

    def tasks(self) -> dict[int, dict[str, str]]:
        """The environments of the processes that run under this cluster, by process id."""
        mine, found = f"SLURM_CONF={self.settings}", {}
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                words = entry.read_bytes().decode(errors="replace").split("\0")
                if mine in words and any(word.startswith("SLURM_PROCID=") for word in words):
                    found[int(entry.parent.name)] = dict(w.split("=", 1) for w in words if "=" in w)
        return found


def _stop(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _clean(environment) -> dict[str, str]:
    """Without a secret, and without the variables of a job in which the tests themselves run."""
    return {k: v for k, v in environment.items() if not k.startswith(("SLURM", "GRADWIRE_"))}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
