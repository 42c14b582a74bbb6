"""The printed table, the stored file, and the description of the machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.api import GRADWIRE, SIDES, TORCH
from benchmarks.measure import Row, Run, Summary
from benchmarks.sides import cores

RESULTS = Path(__file__).parent / "results"
_TIMES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))
_LIBRARIES = ("torch", "gradwire", "numpy", "msgspec")
_PEERS = ("ray", "torchmonarch", "hivemind", "pyzmq", "grpcio")


def facts(run: Run, arguments: Sequence[str] | None) -> dict[str, Any]:
    """The command, the versions and the machine."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *given]),
        "rounds": run.rounds,
        "seconds_per_block": run.seconds,
        "python": platform.python_version(),
        "versions": _versions([*_LIBRARIES, *(_PEERS if run.peers else ())]),
        "machine": {
            "processor": _processor(),
            "cores": len(cores()),
            "memory_gib": round(_memory() / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
            "load_before": os.getloadavg()[0],
        },
    }


def _versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of the installed packages."""
    return {name: version for name in names if (version := _maybe_version(name))}


def _maybe_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # perhaps not installed, but on the path
        found = importlib.util.find_spec(name) and importlib.import_module(name)
        return getattr(found, "__version__", None)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(rows: Sequence[Row], known: dict[str, Any]) -> str:
    """The table that `make bench` prints."""
    others = sorted({side for row in rows for side in row.sides} - set(SIDES))
    head = ["measure", TORCH, GRADWIRE, "ratio", *others]
    lines = [head] + [_cells(row, others) for row in rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    drawn = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([*_heading(known), "", *drawn, "", *_legend(rows)])


def _cells(row: Row, others: Sequence[str]) -> list[str]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    named = [_cell(row, side) for side in (TORCH, GRADWIRE)]
    mark = " *" if row.note else ""
    measure = f"{row.question}: {row.measure}{mark}"
    return [measure, *named, ratio, *(_cell(row, side) for side in others)]


def _cell(row: Row, side: str) -> str:
    return spoken(row.sides[side], row.unit) if side in row.sides else "-"


def spoken(summary: Summary, unit: str) -> str:
    """The median and, in brackets, the 10th and the 90th percentile."""
    scale = 1.0
    if unit == "s":
        unit, scale = next((u, s) for least, u, s in _TIMES if summary.median >= least)
    middle, low, high = (_number(v * scale) for v in (summary.median, summary.low, summary.high))
    return f"{middle} {unit} [{low} {high}]"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *rest = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]


def _heading(known: dict[str, Any]) -> list[str]:
    machine = known["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    return [
        f"{known['command']}   ({known['date']})",
        f"Python {known['python']}, {versions}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, load before {machine['load_before']:.2f}",
        f"{known['rounds']} rounds of each side in turn, after one to warm up",
    ]


def _legend(rows: Sequence[Row]) -> list[str]:
    notes = [f"* {row.question}: {row.measure}: {row.note}" for row in rows if row.note]
    return [
        "median [10th and 90th percentile]; ratio of medians: above 1 gradwire is better",
        *notes,
    ]


def dated_file(known: dict[str, Any]) -> Path:
    """The file for a whole run."""
    moment = known["date"].partition("+")[0].replace(":", "")
    return RESULTS / f"{moment}.json"


def save(path: Path, rows: Sequence[Row], known: dict[str, Any]) -> None:
    """Write the rows of the table, with the median of every round."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**known, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read what `save` has written."""
    known = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for stored in known.pop("rows"):
        stored.pop("ratio")
        sides = {side: Summary(**summary) for side, summary in stored.pop("sides").items()}
        rows.append(Row(sides=sides, **stored))
    return rows, known
