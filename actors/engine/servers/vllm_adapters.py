"""A worker extension for vLLM: the weights of a served adapter are replaced in place.

vLLM's own route for that (``load_lora_adapter`` with ``load_inplace``, 0.32) marks the adapter's name so that every
later batch reads the folder again, and requests in flight read the folder that *they* began with: weights would flip
between versions. Here the adapter is loaded once by the route, without that mark, and from then on replaced under the
same id in the worker, between two batches, so that requests in flight go on with the new weights, as they do with whole
weights. The learner calls it through ``/collective_rpc`` while the engine is paused.
"""

from __future__ import annotations

from typing import Any


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
