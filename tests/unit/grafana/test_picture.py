"""The picture of a dashboard has every panel of its grid, drawn from the panel's own queries."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grafana.dashboard_lint import substitute
from grafana.picture import draw_heatmap, picture
from grafana.prove import load


class Prometheus:
    """Answers each query with two series of which one has a gap, and remembers the queries."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, path: str, **query: Any) -> Any:
        self.asked.append(query["query"])
        times = range(int(query["start"]), int(query["end"]), 10)
        return {
            "result": [
                {"metric": {"le": le, "level": "token"}, "values": [[t, value] for t in times]}
                for le, value in (("1", "0.5"), ("+Inf", "0.75"))
            ]
            + [{"metric": {"le": "2"}, "values": [[times[0], "NaN"]]}]
        }


def test_every_panel_above_the_last_row_is_drawn_from_its_queries(tmp_path: Path) -> None:
    dashboard, api = load("afterplay-overview"), Prometheus()
    drawn = picture(dashboard, api, 1000.0, 1100.0, "Staleness")  # type: ignore[arg-type]
    last = next(p["gridPos"]["y"] for p in dashboard["panels"] if p["title"] == "Staleness")
    above = [p for p in dashboard["panels"] if p["gridPos"]["y"] < last and p["type"] != "row"]
    assert [axis.get_title(loc="left") for axis in drawn.axes] == [panel["title"] for panel in above]
    assert api.asked == [substitute(target["expr"]) for panel in above for target in panel["targets"]]
    drawn.savefig(tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").stat().st_size > 10_000


def test_labels_of_a_heat_map_do_not_overlap() -> None:
    figure = Figure(figsize=(4, 2))
    axis = figure.add_axes((0.2, 0.2, 0.7, 0.7))
    series = [({"le": str(2.0**i)}, [0.0, 1.0], [float(i), float(i)]) for i in range(40)]
    draw_heatmap(axis, {}, [series])
    figure.draw_without_rendering()
    heights = [label.get_window_extent() for label in axis.get_yticklabels()]
    assert len(heights) > 5
    assert all(lower.y1 < upper.y0 for lower, upper in itertools.pairwise(heights))


def test_panels_without_data_say_so() -> None:
    class Empty(Prometheus):
        def get(self, path: str, **query: Any) -> Any:
            return {"result": []}

    drawn = picture(load("afterplay-overview"), Empty(), 0.0, 10.0, "Staleness")  # type: ignore[arg-type]
    assert drawn.axes[0].texts[0].get_text() == "no data"
