"""`python -m benchmarks.chart [FILE]`: the ratios of one stored run, as SVG and PNG."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Row
from benchmarks.report import RESULTS, load

WHERE = Path(__file__).parents[1] / "docs" / "benchmarks"
_LEAST = 1 / 128
"""The least ratio that is drawn, and the inverse of the largest; the printed numbers are exact."""
_BETTER, _WORSE = "#1b7837", "#b2182b"
_LAYOUT = {
    "svg.hashsalt": "gradwire",  # the same numbers give the same file
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


def draw(rows: Sequence[Row], known: dict[str, Any], where: Path) -> list[Path]:
    """A bar for each row that both sides have: to the right of 1, gradwire is better."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.ratio]
    with mpl.rc_context(_LAYOUT):
        figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.2 * len(shown)), layout="constrained")
        places = range(len(shown), 0, -1)
        ratios = [row.ratio for row in shown]
        colours = [_BETTER if ratio >= 1 else _WORSE for ratio in ratios]
        ends = [min(max(ratio, _LEAST), 1 / _LEAST) for ratio in ratios]
        axes.barh(places, [end - 1 for end in ends], left=1, color=colours, height=0.6)
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(lambda value, _: _times(value))
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(places, [f"{row.question}: {row.measure}" for row in shown])
        axes.tick_params(axis="y", length=0)
        for place, ratio, end in zip(places, ratios, ends, strict=True):
            side = {"ha": "left", "xytext": (3, 0)} if ratio >= 1 else _LEFT
            axes.annotate(
                f"{ratio:.2f}", (end, place), textcoords="offset points", va="center", **side
            )
        axes.margins(x=0.15, y=0.01)
        axes.set_xlabel("how many times better gradwire is than torch.distributed.rpc, by medians")
        axes.set_title(_title(known), fontsize=8, loc="left")
        where.parent.mkdir(parents=True, exist_ok=True)
        drawn = [where.with_suffix(suffix) for suffix in (".svg", ".png")]
        figure.savefig(drawn[0], metadata={"Date": None})
        figure.savefig(drawn[1], dpi=150)
        pyplot.close(figure)
    return drawn


_LEFT = {"ha": "right", "xytext": (-3, 0)}


def _times(ratio: float) -> str:
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"


def _title(known: dict[str, Any]) -> str:
    machine, versions = known["machine"], known["versions"]
    return (
        f"{known['date'][:10]}, torch {versions.get('torch')}, gradwire {versions.get('gradwire')}"
        f", {machine['processor']}, {machine['cores']} cores"
    )


def newest() -> Path:
    """The last file that a whole run has stored."""
    stored = sorted(RESULTS.glob("*.json"))
    if not stored:
        sys.exit(f"nothing is stored in {RESULTS}{os.sep}; run `make bench` first")
    return stored[-1]


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    for path in draw(*load(source), WHERE):
        print(path)
