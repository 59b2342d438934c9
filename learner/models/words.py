"""A word tokenizer of a few dozen tokens whose chat template spends two tokens a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
