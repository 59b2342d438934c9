"""Worker extensions for vLLM, imported in every worker before the model is built (``--worker-extension-cls``).

:class:`AdapterReload` replaces the weights of a served LoRA adapter in place. vLLM's own route for that
(``load_lora_adapter`` with ``load_inplace``, 0.32) marks the adapter's name so that every later batch reads the folder
again, and requests in flight read the folder that *they* began with: weights would flip between versions. Here the
route loads the adapter once, without that mark, and from then on the worker replaces it under the same id between two
batches, so that requests in flight continue with the new weights, as they do with full weights. The learner calls it
through ``/collective_rpc`` while the engine is paused.

:class:`UpdateRecovery` undoes a load that failed half-way. vLLM (0.32) loads layer by layer: after an error, or with a
trainer that is gone, some layers have new weights, some are empty, and the next load counts what the last one read.

:class:`DeltaReload` brings the weights to a newer version by weight deltas (:mod:`pipeline.runtime.weights`). A
worker keeps the published weights in host memory, applies the delta there, and vLLM reloads all layers from that
memory: the same path as a whole load, so the served weights are those of a whole load on every device. vLLM's own
sparse loader (``checkpoint_weight_patch``, 0.32) writes into the live parameters instead. It cannot tell what they were
before, is undefined after an error half-way, and does not reach the packed matrices of a CPU.

Importing this module makes a worker that waits for weights by NCCL give up where none comes
(:mod:`actors.servers.broadcasts`), and leave its group before it joins another. Tied output heads also follow reloaded
weights on a CPU. vLLM's CPU build packs each matrix for its kernels when it is loaded. A checkpoint with tied
embeddings has no tensor for the output head, so ``reload_weights`` (vLLM 0.32) packs the new embedding again but leaves
the head with the packed copy of the *first* weights: sampling would follow the published policy only in part. Here a
tied head uses the matrix of its embedding whenever that is packed. ``tests/end_to_end/test_engine_contract.py`` proves
the effect.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from actors.servers.broadcasts import WatchedBroadcasts
from actors.servers.deltas import patch, read_base
from pipeline.errors import DeltaMismatch


class UpdateRecovery:
    """Methods that vLLM adds to its workers (``--worker-extension-cls``)."""

    model_runner: Any

    def abandon_update(self) -> None:
        """Undo a load of weights that began and did not finish, whoever began it. Layers that were read whole keep
        their new values, the others get back what they had: the engine may not serve before a whole load."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self.model_runner.get_model().modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
        worker: Any = self
        worker._weight_update_active = False
        if worker.weight_transfer_engine is not None:
            worker.weight_transfer_engine.reset_weight_update_target()


class AdapterReload(UpdateRecovery):
    """Also replaces an adapter."""

    def reload_adapter(self, name: str, folder: str) -> None:
        """Read ``folder`` into the one adapter of this server. Raises :class:`RuntimeError` when none is loaded."""
        from vllm.lora.request import LoRARequest

        manager = self.model_runner.lora_manager
        loaded = sorted(manager.list_adapters())
        if len(loaded) != 1:
            raise RuntimeError(f"expected one loaded adapter, got ids {loaded}: load it by /v1/load_lora_adapter first")
        manager.add_adapter(LoRARequest(name, loaded[0], folder, load_inplace=True))


class DeltaReload(UpdateRecovery):
    """Also loads weight deltas."""

    _afterplay_weights: tuple[str, dict[str, Any]] | None = None
    """Folder of the last whole load, and its weights with the deltas since, in host memory."""

    def load_deltas(self, files: list[str]) -> dict[str, str] | None:
        """Load the version of the last of ``files``; None, or before anything has changed the reason for refusing.
        Raises :class:`DeltaMismatch` instead where there are several copies of the model: vLLM (0.32) returns the
        answer of the first copy only, but an error of each. Copies of a model without experts count as one each, and
        only their number tells them apart; the refusal of the first is the answer."""
        worker: Any = self
        folder = str(worker.model_runner.vllm_config.model_config.model)
        held, self._afterplay_weights = self._afterplay_weights, None  # they are gone if anything fails
        try:
            weights = held[1] if held is not None and held[0] == folder else read_base(Path(folder), Path(files[0]))
            patch(weights, [Path(file) for file in files])
        except DeltaMismatch as error:
            parallel = worker.model_runner.vllm_config.parallel_config
            if parallel.data_parallel_size > 1 or parallel.data_parallel_index:
                raise
            return {"refused": str(error)}
        worker.reload_weights(weights_iterator=iter(weights.items()))
        self._afterplay_weights = folder, weights
        return None


_HEADS = "_afterplay_tied_heads"


def _install() -> None:
    tie, process = UnquantizedEmbeddingMethod.tie_weights, UnquantizedEmbeddingMethod.process_weights_after_loading

    def tie_weights(self: Any, layer: Any, embed_tokens: Any) -> Any:
        setattr(embed_tokens, _HEADS, (*getattr(embed_tokens, _HEADS, ()), layer))
        return tie(self, layer, embed_tokens)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        process(self, layer)
        if hasattr(layer, "cpu_linear"):
            for head in getattr(layer, _HEADS, ()):
                head.cpu_linear = layer.cpu_linear

    join, receive = NCCLWeightTransferEngine.init_transfer_engine, NCCLWeightTransferEngine.receive_weights

    def init_transfer_engine(self: Any, init_info: Any) -> None:
        self.shutdown()  # else the communicator of the group before would keep its memory of the GPU
        join(self, init_info)

    def receive_weights(self: Any, update_info: Any) -> None:
        if (group := self.model_update_group) is None:
            receive(self, update_info)  # which says so
            return
        try:
            with WatchedBroadcasts(group, partial(current_platform.set_device, self.device)) as self.model_update_group:
                receive(self, update_info)
        finally:
            self.model_update_group = group

    NCCLWeightTransferEngine.init_transfer_engine = init_transfer_engine
    NCCLWeightTransferEngine.receive_weights = receive_weights
    UnquantizedEmbeddingMethod.tie_weights = tie_weights
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading


_install()
