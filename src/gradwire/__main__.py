"""The command line: `gradwire run`, `top`, `page`, `secret` and `certs`; also `python -m`."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import gradwire
from gradwire.agent.peers.secret import new_secret_text, write_secret
from gradwire.errors import GradwireError
from gradwire.options import with_workers
from gradwire.seeing import jobs, top
from gradwire.seeing.top import VIEWS

_EXAMPLES = """examples:
  gradwire run -n 3 train.py --epochs 2         start train.py, whose gradwire.run(fn) has 3 workers
  gradwire run -n 3 --trace t.json.gz train.py  the same, and see where its time went
  gradwire top                                  what the workers of your running job do
  gradwire page                                 the same in a browser
  gradwire secret --out job.secret              a secret for workers on several machines
  gradwire certs --out certs --workers w0,w1    certificates, for TLS between machines
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.act(options)
    except (GradwireError, OSError) as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gradwire",
        description="one autograd graph, many workers",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gradwire {gradwire.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="start a program whose gradwire.run() starts N workers")
    run.add_argument("-n", "--workers", type=int, required=True, metavar="N", help="how many")
    trace_help = "trace the function that run() calls into this .json or .json.gz file"
    run.add_argument("--trace", metavar="FILE", help=trace_help)
    run.add_argument("program", help="the program, a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(act=_run)

    _add_watching(commands)
    secret = commands.add_parser("secret", help="make the secret of a job")
    out_help = "a new file that only you can read; without it, standard output"
    secret.add_argument("--out", type=Path, metavar="FILE", help=out_help)
    secret.set_defaults(act=_secret)

    certs = commands.add_parser("certs", help="make the certificates of workers")
    certs.set_defaults(act=_certs)
    add = certs.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="output directory")
    add("--workers", required=True, metavar="NAME,…", help="names, one certificate each")
    add("--days", type=float, default=30, help="validity (default: 30)")
    add("--renew", action="store_true", help="replace existing certificates")
    key_help = "the authority's key, if it is not in DIR"
    add("--authority-key", type=Path, metavar="FILE", help=key_help)
    return parser


def _add_watching(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = commands.add_parser("top", help="show what the workers of a running job do")
    top.add_argument("--view", choices=VIEWS.values(), default="workers", help="what to begin with")
    top.add_argument("--seconds", type=float, default=1.0, metavar="S", help="between two updates")
    top.add_argument("--once", action="store_true", help="print one table and end")
    top.set_defaults(act=_top)
    page = commands.add_parser("page", help="open the page of a running job in a browser")
    page.add_argument("--print", action="store_true", help="print its address; open no browser")
    page.add_argument("--list", action="store_true", help="list the jobs that serve a page")
    page.set_defaults(act=_page)
    job_help = "a process id of the job; not needed if you have one. It serves a page"
    for command in (top, page):
        command.add_argument("job", nargs="?", metavar="JOB", help=job_help)


def _top(options: argparse.Namespace) -> None:
    with suppress(KeyboardInterrupt):
        page = jobs.chosen(jobs.running_pages(), options.job)
        top.show(page, options.view, max(0.1, options.seconds), once=options.once)


def _page(options: argparse.Namespace) -> None:
    if options.list:
        print(top.listed(jobs.running_pages()))
        return
    page = jobs.chosen(jobs.running_pages(), options.job)
    file = None if options.print else jobs.file_to_open(page)
    if file is None or not webbrowser.open(file.as_uri()):
        print(page.url)


def _run(options: argparse.Namespace) -> None:
    """Become the program, so that it is `__main__` and gets signals and the terminal."""
    command = [sys.executable, options.program, *options.arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, with_workers(options.workers, options.trace))


def _secret(options: argparse.Namespace) -> None:
    if options.out is None:
        print(new_secret_text())
    else:
        print(write_secret(options.out))


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
