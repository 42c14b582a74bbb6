"""`gradwire certs`: what is done for a job before it starts; also `python -m gradwire certs`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import GradwireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _certs(options)
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire", description="one autograd graph, many workers"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    certs = commands.add_parser(
        "certs", help="make the certificates by which workers know each other"
    )
    certs.add_argument("--out", type=Path, required=True, metavar="DIR", help="where files go")
    certs.add_argument(
        "--workers", required=True, metavar="NAME,…", help="one certificate for each"
    )
    certs.add_argument("--days", type=float, default=30, help="how long they last (default: 30)")
    certs.add_argument("--renew", action="store_true", help="replace those that are there")
    certs.add_argument(
        "--authority-key", type=Path, metavar="FILE", help="if it was moved away from DIR"
    )
    return parser


def _certs(options: argparse.Namespace) -> None:
    from gradwire.launch import certs  # needs a library that gradwire itself does not

    folder = certs.Folder(options.out)
    workers = [name.strip() for name in options.workers.split(",")]
    is_new = not folder.authority.exists()
    certs.make(
        folder,
        workers,
        days=options.days,
        renew=options.renew,
        authority_key=options.authority_key,
    )
    print(f"{folder.authority}  for every worker")
    for worker in workers:
        print(f"{folder.certificate(worker)}  for {worker} alone, with its .key")
    if is_new:
        print(f"{folder.authority_key}  can name anyone: move it away from the workers")


if __name__ == "__main__":
    sys.exit(main())
