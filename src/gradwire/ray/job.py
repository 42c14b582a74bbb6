"""What the workers of one job on Ray are given: orders, keys, and where they meet."""

from __future__ import annotations

import importlib
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.agent.peers.secret import new_secret_text
from gradwire.options import Options
from gradwire.ray.seat import Keys, Orders, Script
from gradwire.ray.seats import Seats
from gradwire.transport.address import Address


@final
class Job:
    """One closed world: the driver hosts the store where its workers meet.

    So any worker may die and come back. On one node workers listen on unix sockets in a private
    directory; between nodes they use TLS, and each gets a certificate for its name.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: Options,
        given: bytes,
        script: Script | None,
        seats: Seats,
        *,
        may_restart: bool,
    ) -> None:
        self._names, self._script, self._seats = names, script, seats
        self._secret = None if options.secret else new_secret_text().encode()
        self._given = ray.put(given)
        self._over = f"gradwire/over {secrets.token_hex(16)}" if may_restart else None
        self._incarnations = [0] * len(names)
        self._is_near = seats.are_on_one_node()
        has_own = options.tls is not None or options.insecure
        self._tls = {} if self._is_near or has_own else _certificates(names)
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._where = host, self._store.port
        self._options = replace(options, init_method=str(Address("tcp", *self._where)))
        self._home = tempfile.TemporaryDirectory(prefix="gradwire-ray-")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._home.cleanup()

    def start(self, rank: int) -> None:
        """Start the actor of a worker."""
        self._seats.start(self.orders(rank), self.keys(rank), self._given)

    def restart(self, rank: int) -> int:
        """Start the next incarnation of a worker; returns its number."""
        self._incarnations[rank] += 1
        self.start(rank)
        return self._incarnations[rank]

    def end(self) -> None:
        """Tell workers that are restarted from now on that the function has returned."""
        if self._over is not None:
            self._store.set(self._over, "")

    def orders(self, rank: int) -> Orders:
        """What the worker is told."""
        incarnation = self._incarnations[rank]
        options = replace(self._options, incarnation=incarnation)
        if self._is_near and options.listen in ("auto", "unix"):
            # A new name: a peer that still connects to the old incarnation must not reach it.
            socket = Path(self._home.name, f"w{rank}.{incarnation}.socket")
            options = replace(options, listen=f"unix://{socket}")
        name, size = self._names[rank], len(self._names)
        return Orders(name, rank, size, options, self._where, self._script, self._over)

    def keys(self, rank: int) -> Keys:
        """What only the worker may know."""
        return Keys(self._secret, self._tls.get(self._names[rank]))


def _certificates(names: Sequence[str]) -> dict[str, tuple[bytes, bytes, bytes]]:
    """For each worker its certificate, its key, and an authority whose key is kept nowhere."""
    certs = importlib.import_module("gradwire.launch.certs")  # needs the library cryptography
    with tempfile.TemporaryDirectory(prefix="gradwire-certs-") as made:
        folder = certs.Folder(Path(made))
        certs.make(folder, names)
        shared = folder.authority.read_bytes()
        return {
            name: (folder.certificate(name).read_bytes(), folder.key(name).read_bytes(), shared)
            for name in names
        }
