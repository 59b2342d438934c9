"""Write every generated file: ``python -m grafana.generate`` (``--check`` only compares, exit 1 on a difference).

From the declarations (``grafana/boards/*.yaml``) to Grafana's dashboards and Prometheus' rule file. Ids of panels are
ours and stable: row ``r`` (1, 2, …) has id ``100·r`` and its panels ``100·r + 1`` …, so links to panels survive
additions to other rows.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

import yaml

from grafana.declarations import ALERTS, BOARDS, RECORDS, Band, Board, Limit, Panel, scoped

with warnings.catch_warnings():  # the SDK warns about its own import
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import heatmap as heatmap_models
    from grafana_foundation_sdk.models import prometheus as prometheus_models

HERE = Path(__file__).parent
TAG = "afterplay"
RUNBOOK = "docs/RUNBOOK.md"
RUN = "{{ with $labels.run }}{{ . }}: {{ end }}"
"""Opens the summary of an alert where targets have the label."""
DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"
AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel


def dashboard_json(spec: Board) -> str:
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
        .variables(_variables(spec))
        .annotations(_annotations())
        .links([_link()])
    )
    for number, row in enumerate(spec.rows, 1):
        board.with_row(builders.Row(row.title).id(100 * number))
        for index, panel in enumerate(row.panels, 1):
            board.with_panel(build_panel(panel, 100 * number + index))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _variables(spec: Board) -> list[Builder[models.VariableModel]]:
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        source,
        _query_variable("run", "Run", "label_values(up, run)", every=".*"),  # also series without the label
        _query_variable("job", "Job", 'label_values(up{run=~"$run"}, job)'),
        _query_variable("instance", "Instance", 'label_values(up{run=~"$run",job=~"$job"}, instance)'),
        _query_variable(
            "environment", "Environment", "label_values(afterplay_replay_inserted_trajectories_total, env)"
        ),
        _window_variable(),
        *(builders.TextBoxVariable(n).label(label).default_value(value) for n, (label, value) in spec.texts.items()),
    ]


def _asked_variable(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .query({"query": query, "refId": name})
        .definition(query)
        .datasource(DATASOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _query_variable(name: str, label: str, query: str, every: str = ".+") -> builders.QueryVariable:
    return (
        _asked_variable(name, label, query)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(every)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _window_variable() -> builders.QueryVariable:
    """Seconds over which panels take rates: five minutes, or two and a half updates where those take longer."""
    longest = 'max(afterplay_learner_update_seconds{run=~"$run"} >= 0)'
    query = f"query_result(clamp_min(ceil(2.5 * {longest}), 300) or vector(300))"
    window = _asked_variable("window", "Window, seconds", query).regex("/ ([0-9]+) /")
    return window.current(models.VariableOption(selected=True, text="300", value="300"))


def _annotations() -> list[Builder[models.AnnotationQuery]]:
    published = scoped("changes(afterplay_learner_policy_version[$__rate_interval]) > 0")
    restarted = scoped("changes(process_start_time_seconds[$__rate_interval]) > 0")
    return [
        _annotation("Weights published", published, "blue", "weights published", "{{instance}}"),
        _annotation("Restarts", restarted, "orange", "restart", "{{job}} {{instance}}"),
        _annotation("Firing alerts", 'ALERTS{run=~"$run",alertstate="firing"}', "red", "{{alertname}}", "{{instance}}"),
    ]


def _annotation(name: str, expr: str, color: str, title: str, text: str) -> builders.AnnotationQuery:
    query = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color)
    return query.expr(expr).step("10s").title_format(title).text_format(text)


def _link() -> builders.DashboardLink:
    link = builders.DashboardLink("Afterplay dashboards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).keep_time(True).include_vars(True)


def build_panel(spec: Panel, panel_id: int) -> AnyPanel:
    panel: AnyPanel
    if spec.kind == "stat":
        panel = _stat(spec)
    elif spec.kind == "heatmap":
        panel = _heatmap(spec)
    else:
        panel = _timeseries(spec)
    panel.id(panel_id).title(spec.title).description(spec.description).unit(spec.unit)
    panel.datasource(DATASOURCE).span(spec.width).height(spec.height)
    if spec.decimals is not None:
        panel.decimals(spec.decimals)
    for index, (legend, query) in enumerate(spec.queries.items()):
        target = _target(query, legend, chr(ord("A") + index), heat=spec.kind == "heatmap")
        panel.with_target(target.instant() if spec.instant else target)
    return panel


def _target(query: str, legend: str, ref_id: str, heat: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).expr(query).datasource(DATASOURCE).range()
    target.editor_mode(prometheus_models.QueryEditorMode.CODE)
    if heat:
        return target.format(prometheus_models.PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return target.legend_format(legend or "__auto")


def _stat(spec: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .thresholds(thresholds(spec.limit))
    )


def _timeseries(spec: Panel) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if spec.stacked else 8)
        .show_points(common_models.VisibilityMode.AUTO)
        .span_nulls(True)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if spec.stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if spec.log_scale:
        scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(2)
        panel.scale_distribution(scale)
    if spec.limit is not None:
        panel.thresholds(thresholds(spec.limit))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    return panel


def _heatmap(spec: Panel) -> heatmap.Panel:
    color = (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .fill("dark-orange")
    )
    axis = heatmap.YAxisConfig().unit(spec.unit)
    return heatmap.Panel().calculate(False).color(color).cell_gap(1).y_axis(axis).show_legend()


def thresholds(limit: Limit | Band | None) -> builders.ThresholdsConfig:
    """Colours of a panel from the constant that its alert uses."""
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(threshold_steps(limit))


def threshold_steps(limit: Limit | Band | None) -> list[models.Threshold]:
    """Grafana's steps: each colour holds from its value upwards; the first has no value."""
    if limit is None:
        return [_step(None, BLUE)]
    if isinstance(limit, Band):
        low, high = limit.center - limit.tolerance, limit.center + limit.tolerance
        return [_step(None, ORANGE), _step(low, GREEN), _step(high, ORANGE)]
    if limit.bad == "above":
        steps = [_step(None, GREEN)]
        if limit.warning is not None:
            steps.append(_step(limit.warning, ORANGE))
        if limit.critical is not None:
            # An alert fires above its limit and Grafana colours from it on; 0 must stay green for counts of failures.
            steps.append(_step(limit.critical if limit.critical else 1, RED))
        return steps
    if limit.critical is not None and limit.warning is not None:
        return [_step(None, RED), _step(limit.critical, ORANGE), _step(limit.warning, GREEN)]
    return [_step(None, ORANGE if limit.critical is None else RED), _step(limit.warning or limit.critical, GREEN)]


def _step(value: float | None, color: str) -> models.Threshold:
    return models.Threshold(value=value, color=color)


def alerts_yaml(speed: float = 1.0) -> str:
    """The rule file. With ``speed`` for a run whose time passes faster (its limits are configuration): rules are
    evaluated, and wait, that much less, and look back as much less."""

    def faster(expr: str) -> str:
        return re.sub(r"(?<=[\[:])\d+[smhd](?=[\]:])", lambda found: _faster(found[0], speed), expr)

    rules: list[dict[str, object]] = [{"record": name, "expr": faster(expr)} for name, expr in RECORDS.items()]
    rules += [
        {
            "alert": alert.name,
            "expr": faster(alert.expr),
            "for": _faster(alert.for_, speed),
            "labels": {"severity": alert.severity},
            "annotations": {"summary": RUN + alert.summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    head = "# Generated by `python -m grafana.generate` from grafana/boards/signals.yaml.\n"
    document = {"groups": [{"name": "afterplay", "interval": _faster("15s", speed), "rules": rules}]}
    return head + yaml.safe_dump(document, sort_keys=False, width=140, allow_unicode=True)


def _faster(duration: str, speed: float) -> str:
    """
    >>> _faster("15s", 1), _faster("1m", 15), _faster("0m", 15)
    ('15s', '4000ms', '0ms')
    """
    if speed == 1:
        return duration
    unit = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}[duration[-1]]
    return f"{int(duration[:-1]) * unit / speed:.0f}ms"


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
