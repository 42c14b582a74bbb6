"""The command line: `gradwire certs` makes certificates; also `python -m gradwire certs`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import GradwireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser("gradwire", description="one autograd graph, many workers")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("certs", help="make the certificates of workers").add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="output directory")
    add("--workers", required=True, metavar="NAME,…", help="names, one certificate each")
    add("--days", type=float, default=30, help="validity (default: 30)")
    add("--renew", action="store_true", help="replace existing certificates")
    key_help = "the authority's key, if it is not in DIR"
    add("--authority-key", type=Path, metavar="FILE", help=key_help)
    options = parser.parse_args(arguments)
    try:
        _certs(options)
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 2
    return 0


def _certs(options: argparse.Namespace) -> None:
    from gradwire.launch import certs  # needs an optional library

    folder = certs.Folder(options.out)
    workers = [name.strip() for name in options.workers.split(",")]
    is_new = not folder.authority.exists()
    certs.make(
        folder, workers, days=options.days, renew=options.renew, authority_key=options.authority_key
    )
    print(f"{folder.authority}  for every worker")
    for worker in workers:
        print(f"{folder.certificate(worker)}  for {worker} alone, with its .key")
    if is_new:
        print(f"{folder.authority_key}  can name anyone: move it away from the workers")


if __name__ == "__main__":
    sys.exit(main())
