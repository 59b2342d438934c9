"""Options of one embedded engine, as command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Each field is a flag: ``max_length`` is ``--max-length``."""

    model: Path
    """Folder with config, safetensors and tokenizer."""
    host: str = "127.0.0.1"
    port: int = 8100
    served_name: str = "policy"
    """The only ``model`` that requests may name."""
    dtype: str = "auto"
    """bfloat16, float16, float32 or auto (the checkpoint's)."""
    device: str = "auto"
    """cpu, cuda or auto."""
    threads: int = 0
    """CPU threads of a forward pass; 0: one per core."""
    max_length: int = 1024
    """Tokens of prompt and completion together."""
    max_sequences: int = 128
    """Requests decoded together."""
    queue_max: int = 4096
    """Requests admitted but not finished; more are answered 503."""
    kv_cache_gib: float = 1.0
    """Upper bound of the KV cache."""
    block_size: int = 16
    """Tokens of a KV block; only whole blocks hit the prefix cache."""
    batch_tokens: int = 512
    """Tokens of one forward pass; longer prompts are read in pieces."""
    seed: int = -1
    """Seed of the sampling, as of ``vllm serve``; -1: another one at each start."""
    return_routed_experts: bool = False
    """Answers have the experts that routers chose; requests then share no prefixes."""

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> EngineOptions:
        """Parse command-line flags; a wrong one ends the process with a usage message."""
        parser = argparse.ArgumentParser(prog="python -m actors.embedded.server", description=__doc__)
        types = get_type_hints(cls)
        for field in fields(cls):
            required, flag = field.name == "model", f"--{field.name.replace('_', '-')}"
            parser.add_argument(
                flag,
                type=_boolean if types[field.name] is bool else types[field.name],
                required=required,
                default=None if required else field.default,
            )
        return cls(**vars(parser.parse_args(arguments)))


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError
    return text == "True"
