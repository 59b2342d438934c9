#!/usr/bin/env python3
"""Writes docs/METRICS.md from the declarations of metrics and ``learner.process.recorder.NUMBERS``.

.venv/bin/python scripts/metrics_page.py          writes the page
.venv/bin/python scripts/metrics_page.py --check  only compares, exit code 1 when the page is not current
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from actors.metrics import ActorMetrics  # noqa: E402
from learner.metrics import LearnerMetrics  # noqa: E402
from learner.process.recorder import NUMBERS, Number  # noqa: E402
from pipeline.runtime.metrics import Declaration, MetricSet, ProcessMetrics  # noqa: E402
from pipeline.stage.metrics import ReplayMetrics  # noqa: E402

PAGE = ROOT / "docs" / "METRICS.md"
SETS: dict[str, type[MetricSet]] = {
    "Every process": ProcessMetrics,
    "Actor": ActorMetrics,
    "Replay stage": ReplayMetrics,
    "Learner": LearnerMetrics,
}
HEAD = """# Metrics

Each process serves its metrics at `/metrics`, and `metrics.jsonl` in the run directory has one line
for each update. With `metrics.port: 9100` the replay stage listens on 9100, the learner on 9101 and
actor i on 9102 + i. The default 0 takes free ports, which `processes.json` lists.

```bash
curl -s localhost:9101/metrics | grep ess_ratio
```

The last word of a name, before `_total`, is the unit: seconds, bytes, nats, versions, tokens,
trajectories, tasks, groups, steps or ratio. The run decides the values of labels that are not
explained below a table.

This page is generated from the declarations of metrics and the table `NUMBERS` of
`learner/process/recorder.py`. Change those and run `python scripts/metrics_page.py`.
"""
KEYS = """
## Keys of `metrics.jsonl`

```json
{"step": 1, "update": 0, "reward_mean": 0.25, "ess_ratio": 0.98, "seconds": {"step": 7.5}}
```

A key with a metric has the meaning of that metric. For a counter it is the increase in the update.

| key | meaning |
|---|---|"""
GLOSS = re.compile(r"; (\w+ = .*)\.$")
"""The end of a help that explains the values of labels."""


def meaning(declaration: Declaration[Any]) -> str:
    """The help without its explanation of labels."""
    return GLOSS.sub(".", declaration.help)


def gloss(declaration: Declaration[Any]) -> str:
    """Values of the labels; empty where the run decides them all."""
    explained = GLOSS.search(declaration.help)
    if explained:
        return re.sub(r"(^|; )(\w+) = ", r"\1`\2` is ", explained[1]) + "."
    fixed = {name: values for name, values in declaration.labels.items() if not isinstance(values, str) and values}
    return "; ".join(f"`{name}` is {', '.join(values)}" for name, values in fixed.items()) + "." * bool(fixed)


def glosses(metrics: type[MetricSet]) -> Iterator[str]:
    """One item for each different explanation, with the metrics that share it."""
    names: dict[str, list[str]] = {}
    for declaration in metrics.declarations().values():
        names.setdefault(gloss(declaration), []).append(f"`{declaration.full_name}`")
    names.pop("", None)
    for text, of in names.items():
        yield textwrap.fill(
            f"* {', '.join(of)}: {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def series(number: Number) -> str:
    """The series of a number: its metric with the values of its labels."""
    assert number.metric is not None
    values = ", ".join(f'{name}="{value}"' for name, value in zip(number.metric.labels, number.labels, strict=False))
    return f"`{number.metric.full_name}" + (f"{{{values}}}`" if values else "`")


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def lines() -> Iterator[str]:
    for title, metrics in SETS.items():
        yield f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|"
        for d in metrics.declarations().values():
            row = [f"`{d.full_name}`", d.kind.__name__.lower(), ", ".join(f"`{n}`" for n in d.labels), meaning(d)]
            yield "| " + " | ".join(map(cell, row)) + " |"
        if found := list(glosses(metrics)):
            yield "\n" + "\n".join(found)
    yield KEYS
    for number in NUMBERS:
        if number.key:
            yield f"| `{number.key}` | {cell(number.doc or series(number))} |"


def main(*arguments: str) -> int:
    text = HEAD + "\n".join(lines()) + "\n"
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
