"""From messages to token ids, without ever tokenising again what was sampled."""

from actors.rendering.renderer import Conversation, Renderer, load_tokenizer

__all__ = ["Conversation", "Renderer", "load_tokenizer"]
