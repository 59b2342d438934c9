"""A page of rollouts and the curves above it, as notebooks show them."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline.cli.viewer.plots import png_of

HEIGHT_PIXELS = 600


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A picture and an HTML page. The page has a frame of its own, in which its scripts reach nothing else."""

    html: str
    """The page of the rollouts; empty before the first."""
    figure: Any = None
    """Figure of matplotlib above it; None before the first step."""

    def save(self, path: str | Path) -> Path:
        """Write the page of the rollouts."""
        Path(path).write_text(self.html, encoding="utf-8", errors="replace")
        return Path(path)

    def _repr_html_(self) -> str:
        parts = []
        if self.figure is not None:
            picture = base64.b64encode(png_of(self.figure)).decode()
            parts.append(f'<img style="width:100%" alt="curves" src="data:image/png;base64,{picture}">')
        if self.html:
            style = f"width:100%;height:{HEIGHT_PIXELS}px;border:1px solid #ccc"
            parts.append(f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>')
        return "\n".join(parts) or "<p>no rollouts yet</p>"
