"""Model folders: config, safetensors, tokenizer and chat template that engine and learner load alike."""

from learner.models.info import MANIFEST, ModelInfo
from learner.models.prepare import prepare_model

__all__ = ["MANIFEST", "ModelInfo", "prepare_model"]
