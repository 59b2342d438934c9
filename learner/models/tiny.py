"""``model.source: tiny``: a random small decoder, for tests and for learning a game from scratch within a minute.

It has a word tokenizer of a few dozen tokens whose chat template spends two tokens a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from pipeline.config.base import Section
from pipeline.config.load import sentence
from pipeline.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES))

DEFAULT_WORDS = (
    *("guess", "higher", "lower", "I", "think", "of", "a", "number", "from", "to", "."),
    *("Guess", "it", "Reply", "with", "only", "The", "is", "than"),
)
"""The vocabulary of ``number_guess``, short and long form."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""``<|user|>guess<|end|><|assistant|>``: a role token before and an end token after each message."""


def build_tokenizer(numbers: int, words: Sequence[str] = DEFAULT_WORDS) -> PreTrainedTokenizerFast:
    """Tokens are the special ones, the numbers below ``numbers`` and ``words``, in this order.

    Text of known words and numbers with single spaces between them survives encode and decode unchanged; punctuation
    is a token of its own. Raises :class:`ConfigurationError` for a word that could never be a token.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")])
    for word in words:
        if [piece for piece, _ in split.pre_tokenize_str(word)] != [word]:
            raise ConfigurationError(
                f"model.tiny.words: {word!r} is not one word: leave out spaces and inner punctuation"
            )
    vocabulary: dict[str, int] = {}
    for token in (*SPECIAL, *map(str, range(numbers)), *words):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class TinyOptions(Section):
    """``model.tiny`` of the run file."""

    hidden_size: int = Field(64, ge=8, le=4096)
    layers: int = Field(2, ge=1, le=64)
    heads: int = Field(2, ge=1, le=64)
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the feed-forward layers; None: four times hidden_size."""
    seed: int = Field(0, ge=0)
    """Seed of the random weights."""
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
            problems = error.errors(include_url=False)
            lines = [sentence(problem, ("model", "tiny", *problem["loc"]), cls) for problem in problems]
            raise ConfigurationError("\n".join(lines)) from error


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
