"""Addresses of a run that Prometheus should scrape: ``python -m grafana.targets RUN_DIRECTORY [-o targets.json]``.

The output is Prometheus' ``file_sd`` format, read by ``grafana/prometheus/local.yml``. Write it again after a restart
when ``metrics.port`` is 0 (free ports).
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from grafana.prometheus_process import Target
from pipeline.config import RunConfig
from pipeline.runtime.engine_addresses import engine_addresses
from pipeline.runtime.engine_keys import is_loopback
from pipeline.runtime.process import EVERYWHERE
from pipeline.runtime.run_directory import RunDirectory

OUTPUT = Path(__file__).parent / "prometheus" / "targets.json"


def targets_of_run(directory: Path) -> list[Target]:
    """Every process of a run that lives, engines included.

    Raises ``FileNotFoundError`` when the folder is no run directory.
    """
    run = RunDirectory(directory)
    config = RunConfig.model_validate(yaml.safe_load(run.config_file.read_text()))
    found = []
    for path in sorted(run.processes.glob("*.json")):
        role, record = path.stem.split("-")[0], json.loads(path.read_text())
        port, host, machine = (record.get(key) for key in ("metrics_port", "metrics_host", "machine"))
        here = machine in (None, socket.gethostname())
        if host in (*EVERYWHERE, None):
            host = "127.0.0.1" if here else machine
        elif is_loopback(host) and not here:
            print(
                f"{path.stem} is left out: it listens on {host} of {machine}. Set metrics.host: 0.0.0.0",
                file=sys.stderr,
            )
            continue
        if port and role != "engine":
            found.append(Target(f"afterplay-{role}", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    engines = engine_addresses(config.engine, run, None).now()  # Prometheus shows them no key
    found += [Target("afterplay-engine", urlsplit(url).netloc) for url in engines]
    return found


def file_sd(targets: Sequence[Target], run: str) -> list[dict[str, Any]]:
    """The list as ``file_sd`` reads it: one entry per job. The label ``run`` tells runs apart whose targets are in one
    Prometheus."""
    jobs: dict[str, list[str]] = {}
    for target in targets:
        jobs.setdefault(target.job, []).append(target.address)
    return [{"targets": addresses, "labels": {"job": job, "run": run}} for job, addresses in jobs.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the run directory, for example runs/quickstart")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    targets = targets_of_run(options.directory)
    if not targets:
        print(f"expected processes of a live run in {options.directory}, found none: is it running?", file=sys.stderr)
        return 1
    temporary = options.output.with_suffix(".tmp")
    temporary.write_text(json.dumps(file_sd(targets, options.directory.resolve().name), indent=2) + "\n")
    temporary.replace(options.output)
    print(f"{len(targets)} targets in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
