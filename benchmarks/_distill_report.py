"""Tables and the plot of benchmarks/distill.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from doublure_plugin.scenes import SCENES

__all__ = ["Cell", "Figures", "figures", "plot", "print_summary", "tables", "write_docs"]

Cell: TypeAlias = dict[str, Any]
"""One measurement: `key`, `hardware` and `rows`."""
Row: TypeAlias = dict[str, Any]

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = (
    "![PSNR over CPU seconds for each scene, and over MACs and bytes for each size]"
    "(images/quality.png)"
)
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
_ORDER = ("race", "grid", "compact", "hashgrid", "mlp")
_PRESETS = ("small", "medium", "large")
_LOOK = {
    "race": ("#111111", "-", "o"),
    "grid": ("#0072b2", "-", "s"),
    "compact": ("#d55e00", "-", "^"),
    "hashgrid": ("#009e73", "--", "D"),
    "mlp": ("#999999", "--", "v"),
}
"""Colour, line and marker: Okabe and Ito's palette, told apart without colour too."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Rows of all cells.

    Attributes:
        rows: Rows of families, one a scene, family, preset, seed and mark.
        streaming: Rows of a live stream and of a dataset.
        machines: Hardware of each cell.
    """

    rows: list[Row]
    streaming: list[Row]
    machines: list[dict[str, Any]]

    def of(self, **wanted: Any) -> list[Row]:
        """Rows of families that have these values."""
        return [r for r in self.rows if all(r[k] == v for k, v in wanted.items())]

    def values(self, name: str) -> list[Any]:
        """What there is of one key, in the order it is shown."""
        found = {r[name] for r in self.rows}
        orders = {"scene": list(SCENES), "family": list(_ORDER), "preset": list(_PRESETS)}
        return [v for v in orders[name] if v in found] if name in orders else sorted(found)


def figures(cells: Iterable[Cell]) -> Figures:
    """The rows of cells; of two that measured the same, the later one counts."""
    latest = {repr(sorted(cell["key"].items())): cell for cell in cells}
    rows = [row for cell in latest.values() for row in cell["rows"]]
    return Figures(
        [row for row in rows if "data" not in row],
        [row for row in rows if "data" in row],
        [cell["hardware"] for cell in latest.values()],
    )


def print_summary(found: Figures) -> None:
    """Medians and spread over seeds, on the terminal."""
    for preset in found.values("preset"):
        print(f"\ntest slices, {preset}: PSNR in dB, median over seeds (lowest..highest)")
        marks = found.values("cpu_s")
        print(f"{'':24}" + "".join(f"{mark:>20g} s" for mark in marks))
        for scene in found.values("scene"):
            for family in found.values("family"):
                rows = found.of(scene=scene, family=family, preset=preset)
                if rows:
                    each = [[r for r in rows if r["cpu_s"] == mark] for mark in marks]
                    print(f"{scene:14}{family:10}" + "".join(f"{_spread(e):>22}" for e in each))
    for line in _streaming_table(found):
        print(line)


def tables(found: Figures) -> list[str]:
    """Lines of Markdown: quality, its course, cost, and a live stream against a dataset."""
    lines: list[str] = []
    if found.rows:
        last = max(found.values("cpu_s"))
        lines += [*_quality_table(found, last), "", *_course_table(found), ""]
        lines += _cost_table(found, last)
    return [*lines, *_streaming_table(found)]


def write_docs(found: Figures) -> None:
    """Put tables between the markers of docs/quality.md, and draw its picture.

    Raises:
        SystemExit: The page or its markers are missing.
    """
    page = DOCS / "quality.md"
    text = page.read_text() if page.exists() else ""
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page}: expected the lines {BEGIN} and {END} in it")
    before, rest = text.split(BEGIN, 1)
    machines = sorted({f"{m['cpu']}, torch {m['torch']}" for m in found.machines})
    seeds = len(found.values("seed"))
    head = f"Measured on {'; '.join(machines)}; one thread; {seeds} seed{'s' * (seeds != 1)}."
    body = "\n".join([BEGIN, "", PICTURE, "", head, "", *tables(found), "", END])
    page.write_text(before + body + rest.split(END, 1)[1])
    plot(found, DOCS / "images" / "quality.png")
    print(f"wrote {page} and its picture")


def _quality_table(found: Figures, last: float) -> list[str]:
    families = found.values("family")
    lines = [
        f"PSNR in dB after {last:g} CPU seconds, medium sizes: median (lowest..highest) over seeds;"
        " - where nothing passed the gate,"
        " empty where it was not measured.",
        "",
        "| scene | " + " | ".join(families) + " | relative MSE | peak ratio |",
        "|---" * (len(families) + 3) + "|",
    ]
    ours = families[0]
    for scene in found.values("scene"):
        cells = [found.of(scene=scene, family=f, preset="medium", cpu_s=last) for f in families]
        rows = next((c for c, f in zip(cells, families, strict=True) if f == ours), [])
        other = [_median(rows, name) for name in ("relmse", "peak_ratio")]
        lines.append(
            f"| {scene} | "
            + " | ".join(_spread(cell) for cell in cells)
            + " | "
            + " | ".join("-" if v is None else f"{v:.3g}" for v in other)
            + " |"
        )
    return [*lines, "", f"Relative MSE and peak ratio are those of {ours}."]


def _course_table(found: Figures) -> list[str]:
    marks = found.values("cpu_s")
    ours = found.values("family")[0]
    lines = [
        f"PSNR of {ours} in dB by CPU seconds, medium sizes.",
        "",
        "| scene | " + " | ".join(f"{m:g} s" for m in marks) + " |",
        "|---" * (len(marks) + 1) + "|",
    ]
    for scene in found.values("scene"):
        cells = [found.of(scene=scene, family=ours, preset="medium", cpu_s=m) for m in marks]
        lines.append(f"| {scene} | " + " | ".join(_spread(cell) for cell in cells) + " |")
    return lines


def _cost_table(found: Figures, last: float) -> list[str]:
    scenes = _compared_scenes(found)
    lines = [
        f"What it costs a pixel, and the median PSNR after {last:g} s over {', '.join(scenes)}.",
        "",
        "| family | size | MACs | fetches | kB | PSNR, dB |",
        "|---|---|---|---|---|---|",
    ]
    for family, preset, cost, value in _costs(found, last, scenes):
        macs, fetches, nbytes = cost
        lines.append(
            f"| {family} | {preset} | {macs:,} | {fetches} | {nbytes / 1000:,.1f} |"
            f" {'-' if value is None else f'{value:.1f}'} |"
        )
    return lines


def _costs(
    found: Figures, last: float, scenes: Sequence[str]
) -> list[tuple[str, str, tuple[int, int, int], float | None]]:
    """Family, preset, its MACs, fetches and bytes, and the median over scenes of the PSNR.

    The race is left out: it has the cost of whichever family wins.
    """
    out = []
    for family in (f for f in found.values("family") if f != "race"):
        for preset in found.values("preset"):
            rows = found.of(family=family, preset=preset, cpu_s=last)
            each = [_median([r for r in rows if r["scene"] == s], "psnr_db") for s in scenes]
            if rows:
                known = [v for v in each if v is not None]
                value = statistics.median(known) if len(known) == len(scenes) else None
                cost = (rows[0]["macs"], rows[0]["fetches"], rows[0]["bytes"])
                out.append((family, preset, cost, value))
    return out


def _compared_scenes(found: Figures) -> list[str]:
    """Scenes that every family and preset was measured on, the main ones if there are any."""
    kinds = {(r["family"], r["preset"]) for r in found.rows}
    whole = [
        scene
        for scene in found.values("scene")
        if {(r["family"], r["preset"]) for r in found.of(scene=scene)} == kinds
    ]
    return [s for s in whole if SCENES[s].group == "main"] or whole


def _streaming_table(found: Figures) -> list[str]:
    if not found.streaming:
        return []
    marks = sorted({r["cpu_s"] for r in found.streaming})
    lines = [
        "",
        "The medium grid on a live stream, and on a dataset of 48 frames of 2,048 pixels: PSNR in"
        " dB on the same test slices, median (lowest..highest) over seeds.",
        "",
        "| scene | CPU s | live stream | dataset | gain, dB |",
        "|---|---|---|---|---|",
    ]
    for scene in dict.fromkeys(r["scene"] for r in found.streaming):
        for mark in marks:
            here = [r for r in found.streaming if r["scene"] == scene and r["cpu_s"] == mark]
            live, fixed = ([r for r in here if r["data"] == d] for d in ("live", "dataset"))
            ours, theirs = _median(live, "psnr_db"), _median(fixed, "psnr_db")
            gain = "-" if ours is None or theirs is None else f"{ours - theirs:+.1f}"
            lines.append(f"| {scene} | {mark:g} | {_spread(live)} | {_spread(fixed)} | {gain} |")
    return lines


def plot(found: Figures, path: Path) -> None:
    """PSNR over CPU seconds, a scene each, and over MACs and bytes for all sizes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    scenes = found.values("scene")
    columns = min(5, max(3, len(scenes)))
    above = -(-len(scenes) // columns)
    figure = plt.figure(figsize=(2.6 * columns, 2.2 * above + 3.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.2 * above, 3.4])
    axes = upper.subplots(above, columns, squeeze=False).ravel()
    marks = found.values("cpu_s")
    for axis, scene in zip(axes, scenes, strict=False):
        for family in found.values("family"):
            rows = found.of(scene=scene, family=family, preset="medium")
            _course(axis, family, rows, marks)
        axis.set_title(scene, fontsize=9)
        axis.set_xscale("log")
        axis.set_xticks(marks, [f"{m:g}" for m in marks])
        axis.minorticks_off()
        axis.margins(y=0.1)
        axis.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in axes[len(scenes) :]:
        axis.axis("off")
    upper.supylabel("PSNR, dB", fontsize=9)
    upper.supxlabel("CPU seconds, one thread (band: over seeds)", fontsize=9)

    last, compared = max(marks), _compared_scenes(found)
    left, right = lower.subplots(1, 2, sharey=True)
    for axis, index, scale, name in (
        (left, 0, 1.0, "MACs a pixel"),
        (right, 2, 1e-3, "kB of weights"),
    ):
        for family in (f for f in found.values("family") if f != "race"):
            points = [
                (cost[index] * scale, value, preset)
                for f, preset, cost, value in _costs(found, last, compared)
                if f == family and value is not None
            ]
            colour, line, marker = _LOOK[family]
            x, y = [p[0] for p in points], [p[1] for p in points]
            axis.plot(x, y, line, color=colour, marker=marker, label=family)
            for at, value, preset in points:
                axis.annotate(
                    preset[0].upper(), (at, value), xytext=(0, 6), textcoords="offset points",
                    ha="center", fontsize=8, color=colour,
                )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel(name, fontsize=9)
        axis.margins(0.1, 0.15)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    left.set_ylabel(f"PSNR after {last:g} s, dB", fontsize=9)
    lower.suptitle(f"median of {', '.join(compared)}; S, M, L: presets", fontsize=9)
    shown = {}
    for axis in axes:
        shown |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    names = [family for family in _ORDER if family in shown]
    figure.legend(
        [shown[family] for family in names], names,
        loc="outside upper center", ncols=max(1, len(names)), fontsize=9,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _course(axis: Any, family: str, rows: list[Row], marks: Sequence[float]) -> None:
    known = [
        (mark, [r["psnr_db"] for r in rows if r["cpu_s"] == mark and r["psnr_db"] is not None])
        for mark in marks
    ]
    known = [(mark, values) for mark, values in known if values]
    if not known:
        return
    colour, line, marker = _LOOK[family]
    x = [mark for mark, _ in known]

    def over(pick: Callable[[list[float]], float]) -> list[float]:
        return [pick(values) for _, values in known]

    axis.fill_between(x, over(min), over(max), color=colour, alpha=0.15, linewidth=0)
    axis.plot(
        x, over(statistics.median), line, color=colour, marker=marker, markersize=4, label=family
    )


def _median(rows: Sequence[Row], name: str) -> float | None:
    known = [r[name] for r in rows if r[name] is not None]
    return statistics.median(known) if known else None


def _spread(rows: Sequence[Row]) -> str:
    """Median and range of the PSNR; a dash where none was published, empty where not measured."""
    known = [r["psnr_db"] for r in rows if r["psnr_db"] is not None]
    if not known:
        return "-" if rows else ""
    middle = f"{statistics.median(known):.1f}"
    missing = f" of {len(known)}/{len(rows)}" if len(known) < len(rows) else ""
    if len(rows) == 1:
        return middle
    return f"{middle} ({min(known):.1f}..{max(known):.1f}){missing}"
