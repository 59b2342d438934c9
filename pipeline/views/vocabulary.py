"""Token ids as text, each token for itself: read from ``tokenizer.json``, the file that every fast tokenizer has.

A tokenizer's own ``decode`` gives the text of a sequence. Here each token must keep its place, also where it is only a
part of a character. So ids are mapped to bytes by the rule of the tokenizer's decoder, and bytes to text as they
become whole characters:

* byte-level (GPT-2, Llama 3, Qwen): every character of a token represents one byte (the table of GPT-2's
  ``bytes_to_unicode``);
* SentencePiece (Llama 2, Mistral, Gemma): ``▁`` is a space, ``<0x0A>`` a byte;
* WordPiece: a token begins a word unless it begins with the decoder's prefix;
* whole words (WordLevel without a decoder): a space goes before each;
* anything else: the token's own text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ToBytes = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as it is shown."""

    text: str
    """Text that becomes readable with it; empty if it only begins or continues a character."""
    part: str = ""
    """Its bytes in hexadecimal where it is not whole characters by itself."""
    special: bool = False
    """A control token, such as the end of a turn."""


class Vocabulary:
    """Text of token ids. Without a tokenizer (``known`` is False) every token is shown as its number."""

    def __init__(self, tokens: Mapping[int, bytes], special: Iterable[int] = ()) -> None:
        self._tokens = tokens
        self._special = frozenset(special)
        self._pieces: dict[int, Piece] = {}
        """Texts of tokens that are whole characters."""
        self.known = bool(tokens)

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """Vocabulary of ``folder/tokenizer.json``. A file that is missing or not understood gives an empty one, which
        shows ids."""
        try:
            raw = orjson.loads((folder / "tokenizer.json").read_bytes())
            vocab, to_bytes = raw["model"]["vocab"], _rule(raw)
            tokens = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, *_) in enumerate(vocab))
            found = {int(i): to_bytes(str(token)) for token, i in tokens}
            added = raw.get("added_tokens") or ()
            found |= {int(one["id"]): str(one["content"]).encode("utf-8", "replace") for one in added}
            return cls(found, (int(one["id"]) for one in added if one.get("special")))
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return cls({})

    def bytes_of(self, token_id: int) -> bytes:
        """Its bytes; of an unknown id its number in brackets."""
        found = self._tokens.get(token_id)
        return f"⟨{token_id}⟩".encode() if found is None else found

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """One piece for each id. All texts together are the text of the ids; bytes that are no character become
        U+FFFD where that is certain."""
        out: list[Piece] = []
        decoder, pending = _decoder(), False

        def close() -> None:
            """Leave the open character broken."""
            out[-1] = replace(out[-1], text=out[-1].text + decoder.decode(b"", final=True))

        for token_id in token_ids:
            piece = self._pieces.get(token_id)
            if piece is None:
                piece = self._piece(token_id)
            if pending and (piece.special or piece.part == ""):  # a whole character follows
                close()
                decoder, pending = _decoder(), False
            if piece.part:
                piece = Piece(decoder.decode(self.bytes_of(token_id)), piece.part)
                pending = decoder.getstate()[0] != b""
            out.append(piece)
        if pending:
            close()
        return out

    def _piece(self, token_id: int) -> Piece:
        """Text of one token alone."""
        raw, special = self.bytes_of(token_id), token_id in self._special
        try:
            piece = Piece(raw.decode(), "", special)
        except UnicodeDecodeError:
            return Piece("", raw.hex(" ").upper())
        self._pieces[token_id] = piece
        return piece


def bytes_of_tokens(tokenizer: Any) -> Callable[[int], bytes]:
    """The bytes of one id of a loaded tokenizer, by the same rules; those of its text where there is no rule."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "decoder"):
        return lambda token_id: str(tokenizer.decode([token_id])).encode("utf-8", "replace")
    decoder = None if backend.decoder is None else orjson.loads(backend.decoder.__getstate__())
    rule = _rule({"decoder": decoder, "model": {"type": type(backend.model).__name__}})
    added = {int(i): str(token).encode("utf-8", "replace") for i, token in tokenizer.added_tokens_decoder.items()}

    def found(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        token = backend.id_to_token(token_id)
        return b"" if token is None else rule(token)

    return found


def is_byte(token: str) -> bool:
    """True for a token of SentencePiece that is one byte.

    >>> is_byte("<0x0A>"), is_byte("<0x0AB>")
    (True, False)
    """
    return _BYTE.fullmatch(token) is not None


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _rule(raw: Mapping[str, Any]) -> ToBytes:
    """Function from one token to its bytes, by the decoder of a tokenizer.json."""
    parts = _parts(raw.get("decoder"))
    kinds = {str(part.get("type")) for part in parts}
    if "ByteLevel" in kinds:
        table = _byte_level()

        def mapped(token: str) -> bytes:
            try:
                return bytes([table[c] for c in token])
            except KeyError:  # an added token that is written as it reads
                return token.encode("utf-8", "replace")

        return mapped
    if "WordPiece" in kinds:
        prefix = next(str(part.get("prefix", "##")) for part in parts if part.get("type") == "WordPiece")
        return lambda token: (token.removeprefix(prefix) if token.startswith(prefix) else " " + token).encode()
    spaces = [_space(part) for part in parts if part.get("type") in ("Metaspace", "Replace")]
    replaced = [space for space in spaces if space]

    def plain(token: str) -> bytes:
        match = _BYTE.fullmatch(token) if "ByteFallback" in kinds else None
        if match:
            return bytes.fromhex(match.group(1))
        for space in replaced:
            token = token.replace(space, " ")
        return token.encode("utf-8", "replace")

    words = raw.get("decoder") is None and raw["model"].get("type") == "WordLevel"
    return (lambda token: b" " + plain(token)) if words else plain


def _parts(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder.get("decoders") or () for part in _parts(inner)]
    return [decoder]


def _space(part: Mapping[str, Any]) -> str:
    """The text that represents a space; empty if there is none."""
    if part.get("type") == "Metaspace":
        return str(part.get("replacement", "▁"))
    pattern = part.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) and part.get("content") == " " else ""


def _byte_level() -> dict[str, int]:
    """Character → byte of byte-level tokenizers: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
