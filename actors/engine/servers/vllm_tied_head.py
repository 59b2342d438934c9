"""A worker extension for vLLM on CPU: tied output heads follow reloaded weights.

vLLM's CPU build packs each matrix for its kernels when it is loaded. A checkpoint with tied embeddings has no tensor
for the output head, so ``reload_weights`` (vLLM 0.32) packs the new embedding again but leaves the head with the
packed copy of the *first* weights: sampling would follow the published policy only in part. vLLM imports this module
in every worker (``--worker-extension-cls``) before it builds the model; from then on a tied head uses the matrix of
its embedding whenever that is packed. ``tests/end_to_end/test_engine_contract.py`` proves the effect.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_HEADS = "_afterplay_tied_heads"


class TiedHead:
    """Adds no method to the worker; naming it makes vLLM import this module."""


def _install() -> None:
    tie, process = UnquantizedEmbeddingMethod.tie_weights, UnquantizedEmbeddingMethod.process_weights_after_loading

    def tie_weights(self: Any, layer: Any, embed_tokens: Any) -> Any:
        setattr(embed_tokens, _HEADS, (*getattr(embed_tokens, _HEADS, ()), layer))
        return tie(self, layer, embed_tokens)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        process(self, layer)
        for head in getattr(layer, _HEADS, ()):
            head.cpu_linear = layer.cpu_linear

    UnquantizedEmbeddingMethod.tie_weights = tie_weights
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading


_install()
