"""The side of TRL: ``GRPOTrainer`` fed with the rows of the benchmark in place of what it would generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learner_step.case import Case, make_rows
from learner.data.rows import Row


def trl_train(case: Case, started: Callable[[], None], ended: Callable[[], None], directory: Path) -> None:
    """``case.steps + 1`` optimizer steps of ``GRPOTrainer``, with the same budget of padded tokens for a forward pass,
    as far as whole rows allow."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = make_rows(case, AutoConfig.from_pretrained(case.model).vocab_size)
    fed = batch_of(rows, case.device)
    width, budget = fed["prompt_ids"].shape[1] + fed["completion_ids"].shape[1], case.tokens_per_microbatch
    at_once = max(n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and (n == 1 or n * width <= budget))

    class Fed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in fed.items()}

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            started()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended()

    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    trainer = Fed(
        model=case.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(directory),
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(rows) // at_once,
            num_generations=case.rollouts,
            max_completion_length=fed["completion_ids"].shape[1],
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            max_grad_norm=1.0,
            max_steps=case.steps + 1,
            bf16=case.compute_dtype == "bfloat16",
            use_cpu=case.device == "cpu",
            gradient_checkpointing=case.checkpointing,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * (case.groups * (case.steps + 2))),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[PAD]"),
        callbacks=[Timed()],
    )
    trainer.train()


def batch_of(rows: tuple[Row, ...], device: str) -> dict[str, torch.Tensor]:
    """The batch as TRL's generation would hand it on: prompts padded on the left, completions on the right."""
    prompts = [np.flatnonzero(row.loss_mask)[0] for row in rows]
    longest, most = max(prompts), max(len(row) - p for row, p in zip(rows, prompts, strict=True))
    ids = {n: torch.zeros((len(rows), w), dtype=torch.int64) for n, w in (("prompt", longest), ("completion", most))}
    masks = {name: torch.zeros_like(tensor) for name, tensor in ids.items()}
    for b, (row, p) in enumerate(zip(rows, prompts, strict=True)):
        tokens = torch.from_numpy(row.token_ids.astype(np.int64))
        ids["prompt"][b, longest - p :], masks["prompt"][b, longest - p :] = tokens[:p], 1
        ids["completion"][b, : len(row) - p], masks["completion"][b, : len(row) - p] = tokens[p:], 1
    batch = {f"{name}_ids": tensor for name, tensor in ids.items()}
    batch |= {f"{name}_mask": tensor for name, tensor in masks.items()}
    batch["advantages"] = torch.tensor([float(row.advantages[0]) for row in rows])
    batch["num_items_in_batch"] = masks["completion"].sum()
    return {name: tensor.to(device) for name, tensor in batch.items()}
