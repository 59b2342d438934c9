#!/usr/bin/env python3
"""Draws docs/images/quickstart.png from the raw file of the quickstart, a line for each seed.

.venv/bin/python scripts/quickstart_picture.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "benchmarks" / "results" / "learning-2026-11-26" / "quickstart.json"
PICTURE = ROOT / "docs" / "images" / "quickstart.png"


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["font.size"] = 13
    figure, (learning, health) = pyplot.subplots(1, 2, figsize=(7.15, 3.96), dpi=200, layout="constrained")
    for seed, run in enumerate(json.loads(RAW.read_text())):
        updates = run["updates"]
        steps = [update["step"] for update in updates]
        right = [update["signals"]["first_right"] for update in updates]
        learning.plot(steps, right, color=("#2563eb", "#60a5fa", "#1e3a8a")[seed], label=f"seed {seed}", linewidth=1.8)
        for key, name, colour in (
            ("ratio_mean", "mean importance ratio", "#ea580c"),
            ("ess_ratio", "effective sample size", "#16a34a"),
            ("clip_fraction", "clipped tokens", "#6b7280"),
        ):
            values = [update[key] for update in updates]
            health.plot(steps, values, color=colour, label=None if seed else name, linewidth=1.4)
    learning.set_title("correct first answers", fontsize=13)
    learning.legend(frameon=False, loc="lower right", fontsize=12)
    health.set_title("off-policy health, shares", fontsize=13)
    health.legend(frameon=False, loc="center", fontsize=12)
    for axes in (learning, health):
        axes.set(xlabel="update", ylim=(0, 1.05), xlim=(1, 16))
        axes.set_xticks((1, 4, 8, 12, 16))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
