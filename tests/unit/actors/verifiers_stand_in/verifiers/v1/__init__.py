"""The part of verifiers that configs/programs/verifiers_rollout.py uses."""

from dataclasses import dataclass


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class TrainClientConfig(EvalClientConfig):
    renderer_model_name: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


ClientConfig = EvalClientConfig
