"""The tables and plots of the benchmarks' pages, made from files of figures.

docs/benchmarks/figures has a JSON file for each suite, as run.py writes it: a
list of runs, each with its command, date, machine, versions and figures. The
name of a figure, "table | row | column", is its place on a page, and a page
says with comments where a table goes:

    <!-- figures: SUITE TABLE -->
    <!-- end -->

Runs of one suite on one day and machine share a table. The table and the plots
of docs/benchmarks.md have the figures that headlines.json names.
"""

import functools
import itertools
import json
import pathlib
import re
from typing import Any
from xml.sax.saxutils import escape

DOCS = pathlib.Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "benchmarks"
PLOTS = {
    "gains": "Times as fast as something else (longer is better)",
    "costs": "Times the cost of a floor, or of less work (shorter is better)",
}
# Where the bars of a plot begin, and how long the longest is.
LEFT = 470
LONGEST = 200
STYLE = """<style>
text { font: 13px sans-serif; fill: #1f2328 }
rect { fill: #4c8dd6 }
line { stroke: #d1242f; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>"""

Figure = dict[str, Any]
Run = dict[str, Any]


@functools.cache
def load(suite: str) -> list[Run]:
    """Returns the runs of a suite; none if it has no file."""
    path = FOLDER / "figures" / f"{suite}.json"
    return json.loads(path.read_text("utf-8"))["runs"] if path.exists() else []


def cell(figure: Figure | None, with_unit: bool = True) -> str:
    """Returns the median, and the least and the most where they differ."""
    if figure is None:
        return ""
    digits = f".{figure['digits']}f" if figure["digits"] is not None else ""
    median, least, most = (
        value if value is None else f"{value:,{digits}}"
        for value in (figure["median"], figure["min"], figure["max"])
    )
    has_unit = with_unit and figure["unit"] not in ("", "AUC")
    unit = f" {figure['unit']}" if has_unit else ""
    if median is None:
        return f"{least} to {most}{unit}"
    if most is None or least == median == most:
        return median + unit
    spread = f"at most {most}" if least is None else f"{least} to {most}"
    return f"{median}{unit} ({spread})"


def caption(runs: list[Run], figures: list[Figure]) -> str:
    """Returns commands, date and machine."""
    machine = runs[0]["machine"]
    parts = [runs[0]["date"], machine["cpu"] or "CPU not noted"]
    if machine["family"]:
        parts.append(f"family {machine['family']}, model {machine['model']}")
    parts.append(f"{machine['cores']} cores")
    rounds = {figure["rounds"] for figure in figures}
    if len(rounds) == 1 and (count := rounds.pop()) and count > 1:
        spread = any(figure["min"] is not None for figure in figures)
        parts.append(
            f"medians of {count:,} rounds" + " (least to most)" * spread
        )
    commands = ", ".join(f"`{run['command']}`" for run in runs)
    note = f"; {runs[0]['note']}." if runs[0]["note"] else "."
    return f"{commands}: {', '.join(parts)}{note}"


def column_of(name: str, figures: list[Figure | None]) -> list[list[str]]:
    """Returns a column with its head, and one for its bars if they differ."""
    there = [figure for figure in figures if figure]
    units = {figure["unit"] for figure in there}
    if len(units) == 1 and name != (unit := max(units)):
        name = ", ".join(filter(None, [name, unit]))
    bars = [figure["to_reach"] if figure else "" for figure in figures]
    # Cells in another unit, such as ns, are the base of the ratios.
    without = {figure["unit"] for figure in there if not figure["to_reach"]}
    barred = {figure["unit"] for figure in there if figure["to_reach"]}
    is_shared = len(barred) and len({*bars} - {""}) == 1 < bars.count(max(bars))
    cells = [cell(figure, len(units) > 1) for figure in figures]
    if is_shared and not without & barred:
        return [[f"{name} ({max(bars)})", *cells]]
    return [[name, *cells], ["to reach", *bars]] if barred else [[name, *cells]]


def table(runs: list[Run], name: str) -> str:
    """Returns a table of figures as Markdown."""
    rows: dict[str, dict[str, Figure]] = {}
    for figure in itertools.chain(*(run["figures"] for run in runs)):
        place, row, column = figure["name"].split(" | ")
        if place == name:
            rows.setdefault(row, {})[column] = figure
    columns = [["", *rows]]
    for column in dict.fromkeys(itertools.chain(*rows.values())):
        columns += column_of(column, [row.get(column) for row in rows.values()])
    figures = [figure for row in rows.values() for figure in row.values()]
    return f"{caption(runs, figures)}\n\n{markdown(zip(*columns, strict=True))}"


def markdown(lines: Any) -> str:
    """Returns lines of cells, of which the first is the head, as a table."""
    head, *rest = (
        [f"| {text} " if text else "| " for text in line] for line in lines
    )
    rows = [head, ["|---"] * len(head), *rest]
    return "".join("".join(row) + "|\n" for row in rows)


def tables(suite: str, name: str) -> str:
    """Returns a table for each day and machine."""
    runs = [
        run
        for run in load(suite)
        if any(f["name"].startswith(f"{name} | ") for f in run["figures"])
    ]
    groups = itertools.groupby(
        runs, lambda run: (run["date"], run["machine"], run["note"])
    )
    found = [table(list(group), name) for _, group in groups]
    return "\n".join(found) or "There are no figures of it yet.\n"


def find(headline: dict[str, str]) -> tuple[Run, Figure]:
    """Returns the first figure with the headline's name, and its run."""
    for run in load(headline["suite"]):
        for figure in run["figures"]:
            if figure["name"] == headline["figure"]:
                return run, figure
    raise LookupError(f"there is no figure for {headline}")


def overview(
    headlines: list[dict[str, str]], pages: dict[pathlib.Path, str]
) -> str:
    """Returns the table of docs/benchmarks.md."""
    lines = [["", "measured", "to reach", "command", "page"]]
    for headline in headlines:
        run, figure = find(headline)
        mark = f"<!-- figures: {headline['suite']} "
        page = next(path.stem for path in pages if mark in pages[path])
        link = f"[{page}](benchmarks/{page}.md)"
        command = f"`{run['command']}`"
        bar = figure["to_reach"]
        lines.append([headline["words"], cell(figure), bar, command, link])
    return markdown(lines)


def plot(title: str, bars: list[tuple[str, Figure]]) -> str:
    """Returns bars as SVG, each with a red line at its bar to reach."""
    values = [f["max" if f["median"] is None else "median"] for _, f in bars]
    goals = [re.search(r"[\d.]+", figure["to_reach"]) for _, figure in bars]
    ends = [float(goal[0]) if goal else 0.0 for goal in goals]
    scale = LONGEST / max(values + ends)
    size = f"0 0 {LEFT + LONGEST + 160} {40 + 26 * len(bars)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">',
        STYLE,
        f'<text x="4" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for i, ((words, figure), value, end) in enumerate(
        zip(bars, values, ends, strict=True)
    ):
        y = 32 + 26 * i
        words = escape(words.replace("`", ""))
        width, goal = round(value * scale), round(LEFT + end * scale)
        place = f'x="{LEFT - 8}" y="{y + 14}" text-anchor="end"'
        lines += [
            f"<text {place}>{words}</text>",
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="18"/>',
        ]
        if end:
            ys = f'y1="{y - 2}" y2="{y + 20}"'
            lines.append(f'<line x1="{goal}" x2="{goal}" {ys}/>')
        x = max(LEFT + width, goal) + 6
        lines.append(f'<text x="{x}" y="{y + 14}">{cell(figure)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def render() -> dict[pathlib.Path, str]:
    """Returns the pages and plots, by path, that the figures give."""

    def filled(text: str, mark: str, content: Any) -> str:
        return re.sub(
            rf"(<!-- {mark} -->\n).*?(?=<!-- end -->)",
            lambda found: found[1] + content(*found.groups()[1:]),
            text,
            flags=re.DOTALL,
        )

    pages = {
        path: filled(path.read_text("utf-8"), r"figures: (\w+) (.+?)", tables)
        for path in (*sorted(FOLDER.glob("*.md")), DOCS / "scaling.md")
    }
    headlines = json.loads((FOLDER / "headlines.json").read_text("utf-8"))
    first = DOCS / "benchmarks.md"
    files = {
        first: filled(
            first.read_text("utf-8"),
            "headlines",
            lambda: overview(headlines, pages),
        )
    }
    for name, title in PLOTS.items():
        bars = [
            (each["words"], find(each)[1])
            for each in headlines
            if each["plot"] == name
        ]
        files[DOCS / "images" / f"benchmarks_{name}.svg"] = plot(title, bars)
    return files | pages


def write() -> None:
    """Writes the pages and plots."""
    for path, text in render().items():
        path.write_text(text, "utf-8")
