"""Write every generated file: ``python -m grafana.generate`` (``--check`` only compares, exit 1 on a difference)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grafana.alerts import alerts_yaml
from grafana.boards import BOARDS
from grafana.panels import DATASOURCE, build_panel, build_row
from grafana.promql import metric
from grafana.sdk import Builder, JSONEncoder, builders, models
from grafana.specs import BoardSpec

HERE = Path(__file__).parent
TAG = "afterplay"


def dashboard_json(spec: BoardSpec) -> str:
    """One dashboard as Grafana's JSON, keys sorted, newline at the end."""
    board = (
        builders.Dashboard(spec.title)
        .uid(spec.uid)
        .tags([TAG])
        .readonly()
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(_variables())
        .annotations(_annotations())
        .links([_link()])
    )
    for number, row in enumerate(spec.rows, 1):
        board.with_row(build_row(row, 100 * number))
        for index, panel in enumerate(row.panels, 1):
            board.with_panel(build_panel(panel, 100 * number + index))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _variables() -> list[Builder[models.VariableModel]]:
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        source,
        _query_variable("job", "Job", "label_values(up, job)"),
        _query_variable("instance", "Instance", 'label_values(up{job=~"$job"}, instance)'),
        _query_variable(
            "environment", "Environment", "label_values(afterplay_replay_inserted_trajectories_total, env)"
        ),
    ]


def _query_variable(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .query({"query": query, "refId": name})
        .definition(query)
        .datasource(DATASOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _annotations() -> list[Builder[models.AnnotationQuery]]:
    published = f"changes({metric('learner_policy_version')}[$__rate_interval]) > 0"
    restarted = f"changes({metric('process_start_time_seconds')}[$__rate_interval]) > 0"
    return [
        _annotation("Weights published", published, "blue", "weights published", "{{instance}}"),
        _annotation("Restarts", restarted, "orange", "restart", "{{job}} {{instance}}"),
        _annotation("Firing alerts", 'ALERTS{alertstate="firing"}', "red", "{{alertname}}", "{{instance}}"),
    ]


def _annotation(name: str, expr: str, color: str, title: str, text: str) -> builders.AnnotationQuery:
    query = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color)
    return query.expr(expr).step("10s").title_format(title).text_format(text)


def _link() -> builders.DashboardLink:
    link = builders.DashboardLink("Afterplay dashboards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).keep_time(True).include_vars(True)


def outputs() -> dict[Path, str]:
    """Every generated file and its text."""
    boards = {HERE / "dashboards" / f"{board.uid}.json": dashboard_json(board) for board in BOARDS}
    return {**boards, HERE / "prometheus" / "alerts.yml": alerts_yaml()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the committed files are current")
    check = parser.parse_args().check
    stale = 0
    for path, text in outputs().items():
        current = path.read_text() if path.exists() else None
        if current == text:
            continue
        stale += 1
        print(f"{'differs' if check else 'written'}: {path.relative_to(HERE.parent)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
