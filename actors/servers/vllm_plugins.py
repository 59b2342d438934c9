"""Worker extensions for vLLM, imported in every worker before the model is built (``--worker-extension-cls``).

:class:`AdapterReload` replaces the weights of a served LoRA adapter in place. vLLM's own route for that
(``load_lora_adapter`` with ``load_inplace``, 0.32) marks the adapter's name so that every later batch reads the folder
again, and requests in flight read the folder that *they* began with: weights would flip between versions. Here the
route loads the adapter once, without that mark, and from then on the worker replaces it under the same id between two
batches, so that requests in flight continue with the new weights, as they do with full weights. The learner calls it
through ``/collective_rpc`` while the engine is paused.

:class:`TiedHead` makes tied output heads follow reloaded weights on a CPU. vLLM's CPU build packs each matrix for its
kernels when it is loaded. A checkpoint with tied embeddings has no tensor for the output head, so ``reload_weights``
(vLLM 0.32) packs the new embedding again but leaves the head with the packed copy of the *first* weights: sampling
would follow the published policy only in part. With this module imported, a tied head uses the matrix of its embedding
whenever that is packed. ``tests/end_to_end/test_engine_contract.py`` proves the effect.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class AdapterReload:
    """Methods that vLLM adds to its workers (``--worker-extension-cls``)."""

    model_runner: Any

    def reload_adapter(self, name: str, folder: str) -> None:
        """Read ``folder`` into the one adapter of this server. Raises :class:`RuntimeError` when none is loaded."""
        from vllm.lora.request import LoRARequest

        manager = self.model_runner.lora_manager
        loaded = sorted(manager.list_adapters())
        if len(loaded) != 1:
            raise RuntimeError(f"expected one loaded adapter, got ids {loaded}: load it by /v1/load_lora_adapter first")
        manager.add_adapter(LoRARequest(name, loaded[0], folder, load_inplace=True))


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
