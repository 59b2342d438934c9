"""``curves.png``: the curves of a run, drawn from ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.metrics import PHASES
from pipeline.runtime.run_directory import write_bytes_atomically
from pipeline.store.evaluation_results import results_by_updates
from pipeline.views.step_lines import Line, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2a6f97", "#e07a5f", "#3d9970", "#8e6c8a", "#d4a017", "#5c6b73", "#b56576", "#7fb7be", "#bbbbbb")
_GREY = "#999999"
LEGEND_COLUMNS_MAX = 5
CURVES: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "importance ratio π/μ": (("ratio_mean", "mean", 1),),
    "effective sample size (share)": (("ess_ratio", "ESS / N", 2),),
    "staleness (versions)": (("staleness_mean", "mean", 3), ("staleness_max", "max", 5)),
    "KL(μ‖π) and entropy (nats)": (("kl_k3", "KL (k3)", 4), ("entropy", "entropy", 0)),
    "tokens per second": (("tokens_per_second", "trained", 2),),
}
"""Panels of curves alone: the title; key of ``metrics.jsonl``, label and colour of each curve."""
_LIMITS = {
    "effective sample size (share)": (0, 1.05),
    "staleness (versions)": (0, None),
    "tokens per second": (0, None),
}


def draw(metrics_file: Path, picture: Path) -> str | None:
    """Draw the picture. Returns None, or in words why there is none (no steps yet, no matplotlib)."""
    if not read_lines(metrics_file):
        return f"not drawn: {metrics_file} has no steps yet"
    try:
        drawn = figure(metrics_file, metrics_file.resolve().parent.name)
    except ImportError as error:
        return f"not drawn: {error}. Install matplotlib"
    _write(drawn, picture)
    return None


def png_of(figure: Figure, form: str = "png") -> bytes:
    """The picture as a file."""
    data = BytesIO()
    figure.savefig(data, format=form)
    return data.getvalue()


def _write(figure: Figure, picture: Path) -> None:
    """Write the picture in the form that its name ends in. Raises :class:`ConfigurationError` for an unknown one."""
    form = picture.suffix[1:].lower() or "png"
    if form not in figure.canvas.get_supported_filetypes():
        raise ConfigurationError(f"expected a picture that ends in .png, .pdf or .svg, got {picture}")
    write_bytes_atomically(picture, png_of(figure, form))


def _figure(height: float = 7.2) -> Figure:
    """An empty figure, which notebooks show. Raises :class:`ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    shown = type("Curves", (Figure,), {"_repr_png_": png_of})
    found: Figure = shown(figsize=(13, height), dpi=110, layout="constrained", facecolor="white")
    return found


def figure(metrics_file: Path, name: str) -> Figure:
    """The curves, as a figure that notebooks show. Raises :class:`ImportError` without matplotlib."""
    lines, figure = read_lines(metrics_file), _figure()
    reward, signals, *plain, seconds = axes = figure.subplots(2, 4).ravel()
    _reward(reward, lines, results_by_updates(metrics_file.with_name("evaluations.jsonl")).values())
    names = {name for line in lines if isinstance(line.get("signals"), Mapping) for name in line["signals"]}
    drawn = sorted(names)[: len(_COLOURS)]
    signals.set_title("environment signals" + (f" ({len(drawn)} of {len(names)})" if len(drawn) < len(names) else ""))
    for colour, signal in enumerate(drawn):
        _plot(signals, lines, signal, signal, colour, within="signals")
    _ratio_band(plain[0], lines)
    for axis, (title, curves) in zip(plain, CURVES.items(), strict=True):
        axis.set_title(title)
        for curve in curves:
            _plot(axis, lines, *curve)
        if title in _LIMITS:
            axis.set_ylim(*_LIMITS[title])
    _seconds(seconds, lines)
    for axis in axes:
        _dress(axis)
    figure.suptitle(f"{_literal(name) or 'run'}: {len(lines)} steps", fontsize=13, fontweight="bold")
    return figure


OVERLAID = {
    "reward": "reward_mean",
    "importance ratio π/μ": "ratio_mean",
    "effective sample size (share)": "ess_ratio",
    "staleness (versions)": "staleness_mean",
    "KL(μ‖π) (nats)": "kl_k3",
    "entropy (nats)": "entropy",
    "tokens per second": "tokens_per_second",
    "seconds per step": "seconds",
}
"""Panels of several runs: the title, and the key of ``metrics.jsonl``."""


def draw_runs(metrics_files: Mapping[str, Path], picture: Path) -> None:
    """The curves of several runs over each other, a colour for each name. Raises :class:`ImportError` without
    matplotlib."""
    runs = {name: read_lines(file) for name, file in metrics_files.items()}
    figure = _figure()
    for axis, (title, key) in zip(figure.subplots(2, 4).ravel(), OVERLAID.items(), strict=True):
        axis.set_title(title)
        for colour, (name, lines) in enumerate(runs.items()):
            if key == "seconds":
                _plot(axis, lines, "step", name, colour, within=key)
            else:
                _plot(axis, lines, key, name, colour)
        _dress(axis)
    _write(figure, picture)


def draw_resources(
    seconds: Sequence[float], panels: Mapping[str, Sequence[Mapping[str, int]]], marks: Sequence[float], picture: Path
) -> None:
    """Stacked areas of bytes over time, one panel for each title, with a line at each of ``marks``."""
    figure = _figure(3.8)
    for axis, (title, samples) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axis.set_title(f"{title} (MB)")
        names = sorted({name for sample in samples for name, n_bytes in sample.items() if n_bytes})
        heights = [[sample.get(name, 0) / 1e6 for sample in samples] for name in names]
        if names:
            axis.stackplot(seconds, *heights, labels=names, colors=_COLOURS, alpha=0.85)
        for mark in marks:
            axis.axvline(mark, color=_GREY, lw=0.5, ls=":")
        _dress(axis, "seconds")
    _write(figure, picture)


def _series(lines: Iterable[Line], key: str, within: str | None = None) -> tuple[list[int], list[float]]:
    """Steps and values of one key; lines without a number there are skipped."""
    points = []
    for line in lines:
        holder: Any = line.get(within, {}) if within else line
        value = holder.get(key) if isinstance(holder, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            points.append((int(line["step"]), float(value)))
    return [p[0] for p in points], [p[1] for p in points]


def curve_style(number: int) -> dict[str, str]:
    """Colour and line style of a curve: no two of 36 curves look alike."""
    return {"color": _COLOURS[number % len(_COLOURS)], "ls": ("-", "--", ":", "-.")[number // len(_COLOURS) % 4]}


def _plot(axis: Any, lines: list[Line], key: str, label: str, colour: int, within: str | None = None) -> None:
    steps, values = _series(lines, key, within)
    if steps:
        marker = "o" if len(steps) < 40 else None
        axis.plot(steps, values, label=_literal(label), lw=1.8, marker=marker, ms=3, **curve_style(colour))


def _literal(name: str) -> str:
    """A name as matplotlib draws it, without formulas."""
    return name.replace("$", r"\$")


def _ratio_band(axis: Any, lines: list[Line]) -> None:
    steps, bottom = _series(lines, "ratio_min")
    other, top = _series(lines, "ratio_max")
    if steps and steps == other:
        axis.fill_between(steps, bottom, top, color=_COLOURS[1], alpha=0.18, lw=0, label="min to max")
    axis.axhline(1.0, color=_GREY, lw=0.8, ls="--")


def _reward(axis: Any, lines: list[Line], results: Iterable[Mapping[str, Any]]) -> None:
    """Means of the updates; scores on held-out tasks over the updates in the weights, with their standard errors."""
    axis.set_title("reward")
    steps, means = _series(lines, "reward_mean")
    _, deviations = _series(lines, "reward_std")
    if len(deviations) == len(means):
        low = [m - d for m, d in zip(means, deviations, strict=True)]
        high = [m + d for m, d in zip(means, deviations, strict=True)]
        axis.fill_between(steps, low, high, color=_COLOURS[0], alpha=0.15, lw=0, label="± std")
    _plot(axis, lines, "reward_mean", "mean", 0)
    found = [r for r in results if isinstance(r.get("score"), int | float)]
    if found:
        axis.errorbar(
            [r["updates"] for r in found],
            [r["score"] for r in found],
            yerr=[r.get("se") or 0.0 for r in found],
            label="held out (± se)", color=_COLOURS[1], marker="s", ms=4, lw=1.2, capsize=2,
        )  # fmt: skip


def _seconds(axis: Any, lines: list[Line]) -> None:
    axis.set_title("seconds per step, by phase")
    steps = [int(line["step"]) for line in lines]
    base = [0.0] * len(lines)
    for colour, phase in enumerate(PHASES):
        found = [line.get("seconds") for line in lines]
        heights = [float(s.get(phase) or 0.0) if isinstance(s, Mapping) else 0.0 for s in found]
        if any(heights):
            axis.bar(steps, heights, 0.9, bottom=base, label=phase, color=_COLOURS[colour % len(_COLOURS)])
            base = [b + h for b, h in zip(base, heights, strict=True)]


def _dress(axis: Any, over: str = "step") -> None:
    axis.grid(alpha=0.25, lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(over, fontsize=8)
    axis.locator_params(axis="x", integer=True)
    axis.tick_params(labelsize=8)
    axis.title.set_fontsize(10)
    labels = axis.get_legend_handles_labels()[1]
    if labels:  # below the axes, where it covers no curve and no bar
        axis.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=min(len(labels), LEGEND_COLUMNS_MAX), fontsize=7,
            frameon=False, columnspacing=1.0, handlelength=1.4,
        )  # fmt: skip
    elif not axis.has_data():
        axis.text(0.5, 0.5, "not reported", ha="center", va="center", transform=axis.transAxes, color=_GREY)


def draw_comparison(
    curves: Mapping[str, Sequence[tuple[float, float, float, float]]],
    ratios: Sequence[tuple[str, float, float, float]],
    labels: tuple[str, str, float],
    picture: Path,
) -> None:
    """Curves of arms, (tokens, mean, low, high), beside ratios of their costs, (name, ratio, low, high). ``labels``:
    the value, the arm that the others are compared with, and the target."""
    value, base, target = labels
    figure = _figure(4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, (name, rows) in enumerate(curves.items()):
        tokens, means, lows, highs = zip(*rows, strict=True) if rows else ((), (), (), ())
        style = curve_style(number)
        left.plot(tokens, means, lw=2, label=name, **style)
        left.fill_between(tokens, lows, highs, color=style["color"], alpha=0.15, lw=0)
    left.axhline(target, color=_GREY, lw=0.9, ls="--")
    left.set_title(f"{value}: mean over seeds and 95 % interval")
    _dress(left, "generated tokens")
    places = range(len(ratios))
    for place, (_, ratio, low, high) in zip(places, ratios, strict=True):
        right.plot([max(low, 1e-3), min(high, 1e3)], [place] * 2, color=_COLOURS[0], lw=2)
        right.plot([ratio], [place], "o", color=_COLOURS[0])
    right.set_xscale("log")
    right.set_yticks(list(places), [name for name, *_ in ratios])
    right.invert_yaxis()
    right.axvline(1.0, color=_GREY, lw=0.9, ls="--")
    right.set_title(f"cost relative to {base}, 95 % interval")
    right.grid(alpha=0.25, lw=0.6)
    right.spines[["top", "right"]].set_visible(False)
    _write(figure, picture)
