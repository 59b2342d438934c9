"""Waits for the model folder of a run, which appears complete, by rename."""

from __future__ import annotations

import logging
import time
from pathlib import Path

LOOK_SECONDS = 0.05
"""Interval at which the folder is looked for: there is no event to wait for across processes."""

log = logging.getLogger("afterplay.engine")


def await_model(folder: Path) -> None:
    """Block until ``folder`` is a prepared model. A signal ends the wait with the process."""
    if not (folder / "config.json").exists():
        log.info("waiting for the model in %s", folder)
    while not (folder / "config.json").exists():
        time.sleep(LOOK_SECONDS)
