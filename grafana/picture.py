"""Draw the top of the overview dashboard from its JSON over a live run: ``python -m grafana.picture @tiny FILE.png``.

Starts ``afterplay run`` and a Prometheus of its own, waits until the run ends, asks Prometheus the panels' own queries
and draws their answers in the dashboard's grid. Grafana is not involved: colours and fonts are not its own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import afterplay
from grafana.dashboard_lint import substitute
from grafana.prometheus_process import Api, PrometheusProcess
from grafana.prove import load
from grafana.targets import targets_of_run

COLUMNS = 24
UNIT_INCHES = (0.6, 0.36)
"""Width and height of one cell of the dashboard's grid."""
POINTS = 200
BUCKETS_NAMED_MAX = 10
"""Labels beside a heat map: more of them would overlap."""
COLOURS = {"red": "#e0575b", "orange": "#ee9a3a", "yellow": "#e3c53b", "green": "#57a65f"}
Series = list[tuple[dict[str, str], list[float], list[float]]]


def ask(api: Api, expr: str, begin: float, end: float) -> Series:
    """Labels, seconds since ``begin``, and numbers of each series of a query."""
    step = max(1.0, (end - begin) / POINTS)
    found = api.get("/api/v1/query_range", query=substitute(expr), start=begin, end=end, step=step)["result"]
    series = []
    for one in found:
        points = [(float(at) - begin, float(value)) for at, value in one["values"] if math.isfinite(float(value))]
        series.append((one["metric"], [at for at, _ in points], [value for _, value in points]))
    return [one for one in series if one[1]]


def legend(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"])


def in_unit(value: float, defaults: Mapping[str, Any]) -> str:
    share = defaults.get("unit") == "percentunit"
    return f"{100 * value if share else value:.{defaults.get('decimals', 2)}f}{' %' if share else ''}"


def draw_stat(axis: Any, panel: Mapping[str, Any], found: Sequence[Series]) -> None:
    """The last number on the colour of its threshold."""
    defaults, values = panel["fieldConfig"]["defaults"], [series[-1][2][-1] for series in found if series]
    colour = "#dddddd"
    for threshold in defaults.get("thresholds", {}).get("steps", ()) if values else ():
        if threshold["value"] is None or values[0] >= threshold["value"]:
            colour = COLOURS.get(threshold["color"], colour)
    axis.set_facecolor(colour)
    axis.text(0.5, 0.42, in_unit(values[0], defaults) if values else "no data", fontsize=15, ha="center", va="center")
    axis.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))


def draw_heatmap(axis: Any, panel: Mapping[str, Any], found: Sequence[Series]) -> None:
    """Increase of each bucket of a histogram: the series are cumulative over ``le``."""
    series = sorted((one for many in found for one in many), key=lambda one: float(one[0]["le"]))
    if not series:
        return
    times = sorted({at for _, seconds, _ in series for at in seconds})
    rows = [[dict(zip(s, v, strict=True)).get(at, 0.0) for at in times] for _, s, v in series]
    own = [[high - low for high, low in zip(row, below, strict=True)] for below, row in itertools.pairwise(rows)]
    axis.pcolormesh(times, range(len(rows)), [rows[0], *own], cmap="Oranges", shading="nearest")
    named = range(0, len(rows), math.ceil(len(rows) / BUCKETS_NAMED_MAX))
    axis.set_yticks(named, [series[i][0]["le"] for i in named], fontsize=6)


def draw_lines(axis: Any, panel: Mapping[str, Any], found: Sequence[Series]) -> None:
    for target, series in zip(panel["targets"], found, strict=True):
        for labels, seconds, values in series:
            axis.plot(seconds, values, lw=1.3, label=legend(target, labels))
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=6, frameon=False)
    axis.grid(alpha=0.3)


DRAW = {"stat": draw_stat, "heatmap": draw_heatmap, "timeseries": draw_lines}


def picture(dashboard: Mapping[str, Any], api: Api, begin: float, end: float, until: str) -> Figure:
    """The panels above the row ``until``, each in its place of the grid."""
    last = next(p["gridPos"]["y"] for p in dashboard["panels"] if p["type"] == "row" and p["title"] == until)
    shown = [panel for panel in dashboard["panels"] if panel["gridPos"]["y"] < last]
    width, height = COLUMNS * UNIT_INCHES[0], last * UNIT_INCHES[1]
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white")
    for panel in shown:
        at = panel["gridPos"]
        left, top = at["x"] / COLUMNS, 1 - at["y"] / last
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.4 / last, panel["title"], fontsize=11, fontweight="bold", va="center")
            continue
        small = panel["type"] == "stat"
        below, above = (0.2, 1.0) if small else (1.8, 1.2)  # cells for the legend and the title
        cell = (left + (0.1 if small else 0.9) / COLUMNS, top - (at["h"] - below) / last)
        axis = figure.add_axes((*cell, (at["w"] - (0.2 if small else 1.2)) / COLUMNS, (at["h"] - below - above) / last))
        axis.set_title(panel["title"], fontsize=8, loc="left")
        axis.tick_params(labelsize=6)
        DRAW[panel["type"]](axis, panel, [ask(api, target["expr"], begin, end) for target in panel["targets"]])
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", help="a run file, or @NAME of an example")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dashboard", default="afterplay-overview")
    parser.add_argument("--until", default="Throughput", metavar="ROW", help="the first row that is not drawn")
    options = parser.parse_args(arguments)
    with afterplay.train(options.run_file, fresh=True) as run:
        steps = iter(run)
        next(steps)  # all processes of the run are there
        with PrometheusProcess(targets_of_run(run.directory), scrape_interval="1s") as prometheus:
            begin = time.time()
            for _ in steps:
                end = time.time()
            drawn = picture(load(options.dashboard), Api(prometheus.url), begin, end, options.until)
    drawn.savefig(options.picture)
    print(f"{options.picture}: {end - begin:.0f} s of {run.directory.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
