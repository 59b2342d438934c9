"""From declarations (``grafana/specs.py``) to Grafana's model."""

from __future__ import annotations

from grafana.sdk import (
    builders,
    common,
    common_models,
    heatmap,
    heatmap_models,
    models,
    prometheus,
    prometheus_models,
    stat,
    timeseries,
)
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import Band, Limit

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")

GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"


AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel


def build_panel(spec: PanelSpec, panel_id: int) -> AnyPanel:
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
    for index, query in enumerate(spec.queries):
        panel.with_target(_target(query, chr(ord("A") + index), heat=spec.kind == "heatmap"))
    return panel


def build_row(spec: RowSpec, row_id: int) -> builders.Row:
    return builders.Row(spec.title).id(row_id)


def _target(query: Query, ref_id: str, heat: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).expr(query.expr).datasource(DATASOURCE).range()
    target.editor_mode(prometheus_models.QueryEditorMode.CODE)
    if heat:
        return target.format(prometheus_models.PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return target.legend_format(query.legend or "__auto")


def _stat(spec: PanelSpec) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .thresholds(thresholds(spec.limit))
    )


def _timeseries(spec: PanelSpec) -> timeseries.Panel:
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


def _heatmap(spec: PanelSpec) -> heatmap.Panel:
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
