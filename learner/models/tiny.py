"""``model.source: tiny``: a random small decoder, for tests and for learning a game from scratch within a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from learner.models.words import DEFAULT_WORDS, END, PAD, build_tokenizer
from pipeline.config.base import Section
from pipeline.errors import ConfigurationError


class TinyOptions(Section):
    """``model.tiny`` of the run file."""

    hidden_size: int = Field(64, ge=8, le=4096)
    layers: int = Field(2, ge=1, le=64)
    heads: int = Field(2, ge=1, le=64)
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the feed-forward layers; None: four times hidden_size."""
    seed: int = Field(0, ge=0)
    """Of the random weights."""
    max_position: int = Field(1024, ge=8)
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the random weights: small means a nearly uniform first policy."""
    numbers: int = Field(64, ge=0, le=10_000)
    """The numbers 0 to numbers - 1 are single tokens."""
    words: tuple[str, ...] = DEFAULT_WORDS
    """Words that are single tokens; anything else becomes the unknown token."""

    @model_validator(mode="after")
    def _head_size_even(self) -> TinyOptions:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of 2 * heads ({2 * self.heads})")
        return self

    @classmethod
    def parse(cls, options: dict[str, Any], max_length: int) -> TinyOptions:
        """Options of the run file; max_position is at least ``max_length``. Raises :class:`ConfigurationError`."""
        try:
            return cls.model_validate({"max_position": max(1024, max_length), **options})
        except ValidationError as error:
            lines = [
                f"model.tiny.{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()
            ]
            raise ConfigurationError("; ".join(lines) + f"; known options: {', '.join(cls.model_fields)}") from error


def write_tiny_model(options: TinyOptions, folder: Path) -> None:
    """Write a Llama-style decoder with tied embeddings in float32, the same for the same options on any machine."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer(options.numbers, options.words)
    ids = tokenizer.get_vocab()
    model_config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size or 4 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        head_dim=options.hidden_size // options.heads,
        max_position_embeddings=options.max_position,
        initializer_range=options.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model: Any = LlamaForCausalLM(model_config)
    model.generation_config.eos_token_id = [ids[END]]
    model.generation_config.pad_token_id = ids[PAD]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
