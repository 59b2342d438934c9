"""All processes on this machine, under the supervisor."""

from __future__ import annotations

import shlex

from rich.console import Console

from pipeline.errors import ConfigurationError
from pipeline.launchers.launcher import Launch
from pipeline.runtime.process import ExitCode
from pipeline.supervisor.inventory import local_inventory
from pipeline.supervisor.plan import plan
from pipeline.supervisor.run import run


def launch(request: Launch) -> int:
    """Run to the end. A dry run prints the command of each process. Raises :class:`ConfigurationError`."""
    given = {"--nodes": request.nodes, "--gpus": request.gpus, "--out": request.out, "--": request.arguments}
    for option, value in given.items():
        if value not in ("", None, ()):
            raise ConfigurationError(
                f"{option} is for runs on several machines, got --on local: omit it. CUDA_VISIBLE_DEVICES limits the "
                "GPUs of this machine, and afterplay plan FILE shows other machines"
            )
    if not request.dry_run:
        return run(request.config, request.fresh)
    console = Console(highlight=False)
    for place in plan(request.config, local_inventory()).fitting().places:
        variables = [f"{name}={value}" for name, value in place.environment.items()]
        command = shlex.join([*variables, *place.command(str(request.config.run.path / "config.yaml"))])
        console.print(f"{place.name}: {command}", markup=False, soft_wrap=True)
    return ExitCode.FINISHED
