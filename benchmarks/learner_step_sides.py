"""The sides of ``benchmarks/learner_step``: one process trains the same rows for some steps in one way, and prints what
it measured as a line of JSON.

* ``learner``: :class:`learner.trainer.Trainer` as a run file without ``learner.packing`` has it; ``learner_padded``,
  ``learner_packed`` and ``learner_shared`` lay the rows out in one way.
* ``bare``: what a short script does with transformers: padded micro-batches of rows of similar length, autocast forward
  with labels, backward, gradient clipping, AdamW. ``bare_rows``: the same one row at a time, so no padding at all.
  ``bare_selecting``: as ``bare``, and only positions with a label pass the output layer.
* ``trl``: ``GRPOTrainer.train`` of TRL with its generation replaced by these rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from learner.batching import plan_microbatches
from learner.policy import Policy
from learner.rows import Batch, Row
from learner.trainer import Trainer
from pipeline.config import RunConfig

LEARNER: dict[str, dict[str, Any]] = {
    "learner": {},
    "learner_padded": {"packing": "padded"},
    "learner_packed": {"packing": "packed", "share_prefixes": False},
    "learner_shared": {"packing": "packed", "share_prefixes": True},
}
BARE = ("bare", "bare_rows", "bare_selecting")
SIDES = (*LEARNER, *BARE, "trl")


@dataclass(frozen=True, slots=True)
class Case:
    """What all sides train. Lengths are in tokens."""

    model: str
    """Folder."""
    groups: int
    rollouts: int
    prompt: int
    """Median length of a group's prompt (log-normal, sigma 0.5)."""
    response: int
    """Median length of a response (log-normal, sigma 1: a long tail)."""
    longest: int
    """Of a row; longer ones are cut."""
    steps: int
    """Timed, after one that is not."""
    tokens_per_microbatch: int
    compute_dtype: str
    device: str
    threads: int
    checkpointing: bool
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    side: str
    seconds: float
    """Median of a step."""
    cpu_seconds: float
    """Median of a step, all threads: what a busy machine changes less."""
    peak_mib: float
    """During the timed steps, weights and optimizer included: resident memory, or memory of the GPU."""
    tokens: int
    """Of the rows, prompts included, padding not."""
    sampled: int
    stages: dict[str, float]
    """Seconds of the learner's last step by stage."""


def make_rows(case: Case, vocabulary: int) -> tuple[Row, ...]:
    """Random tokens; the rollouts of a group share a prompt, every row has an advantage."""
    rng = np.random.default_rng(case.seed)
    rows = []
    for g in range(case.groups):
        length = int(np.clip(rng.lognormal(np.log(case.prompt), 0.5), 2, case.longest // 2))
        prompt = rng.integers(2, vocabulary, length)
        for r in range(case.rollouts):
            answer = int(np.clip(rng.lognormal(np.log(case.response), 1.0), 1, case.longest - length))
            mask = np.arange(length + answer) >= length
            rows.append(
                Row(
                    trajectory_id=f"{g}.{r}",
                    sequence=g * case.rollouts + r,
                    environment="none",
                    token_ids=np.concatenate([prompt, rng.integers(2, vocabulary, answer)]).astype(np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    temperatures=np.ones(len(mask), dtype=np.float32),
                    turns=np.zeros(len(mask), dtype=np.int32),
                    advantages=np.full(answer, 1.0 if r % 2 else -1.0, dtype=np.float32),
                )
            )
    return tuple(rows)


def run_config(case: Case, **learner: Any) -> RunConfig:
    options = {
        "device": case.device,
        "compute_dtype": case.compute_dtype,
        "learning_rate": 1e-6,
        "tokens_per_microbatch": case.tokens_per_microbatch,
        "gradient_checkpointing": case.checkpointing,
    }
    return RunConfig.model_validate({"run": {"total_steps": 1000}, "learner": {**options, **learner}})


def learner_steps(case: Case, side: str, stages: dict[str, float]) -> Iterator[None]:
    config = run_config(case, **LEARNER[side])
    trainer = Trainer(Policy.load(Path(case.model), config.learner), config)
    rows = make_rows(case, trainer.policy.model.config.vocab_size)
    yield
    while True:
        stages.update(trainer.step(Batch(trainer.updates, (), rows), policy_version=0).seconds)
        yield


def bare_steps(case: Case, side: str) -> Iterator[None]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).to(case.device)
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    rows = make_rows(case, model.config.vocab_size)
    budget = 1 if side == "bare_rows" else case.tokens_per_microbatch
    yield
    while True:
        for chosen in plan_microbatches([len(row) for row in rows], budget):
            ids, labels, attention = (
                torch.from_numpy(a).to(case.device) for a in _padded([rows[i] for i in chosen], right=True)
            )
            inputs = {"input_ids": ids, "use_cache": False} | (
                {} if len(chosen) == 1 else {"attention_mask": attention}
            )
            with torch.autocast(case.device, torch.bfloat16, enabled=case.compute_dtype == "bfloat16"):
                if side == "bare_selecting":
                    hidden = model.base_model(**inputs).last_hidden_state
                    labelled = labels[:, 1:] != -100
                    logits = model.lm_head(hidden[:, :-1][labelled])
                    loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][labelled])
                else:
                    loss = model(**inputs, labels=labels).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def _padded(rows: list[Row], *, right: bool) -> tuple[npt.NDArray[np.int64], ...]:
    """Token ids, labels (-100 where not sampled) and attention mask, ``[rows, longest]``."""
    width = max(len(row) for row in rows)
    ids, attention = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), -100, np.int64)
    for b, row in enumerate(rows):
        at = slice(0, len(row)) if right else slice(width - len(row), width)
        ids[b, at], attention[b, at] = row.token_ids, 1
        labels[b, at] = np.where(row.loss_mask, row.token_ids, -100)
    return ids, labels, attention


def trl_train(case: Case, started: Callable[[], None], ended: Callable[[], None], directory: Path) -> None:
    """``case.steps + 1`` optimizer steps of ``GRPOTrainer``, with the same budget of padded tokens for a forward pass,
    as far as whole rows allow."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = make_rows(case, AutoConfig.from_pretrained(case.model).vocab_size)
    fed = _trl_batch(rows, case.device)
    width = fed["prompt_ids"].shape[1] + fed["completion_ids"].shape[1]
    at_once = max(n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and (n == 1 or n * width <= _budget(case)))

    class Fed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in fed.items()}

    class Clock(TrainerCallback):  # type: ignore[misc]
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
        callbacks=[Clock()],
    )
    trainer.train()


def _budget(case: Case) -> int:
    return case.tokens_per_microbatch


def _trl_batch(rows: tuple[Row, ...], device: str) -> dict[str, torch.Tensor]:
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


class Clock:
    """Wall and processor seconds of steps, and the peak of memory since the first one ended."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def start(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._from = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - self._from[0])
        self.cpu.append(time.process_time() - self._from[1])
        if len(self.wall) == 1:
            self._forget_peak()

    def peak_mib(self) -> float:
        if self._cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def _forget_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            print("the peak of memory counts loading too: this system does not let it be reset", flush=True)


def measure(case: Case, side: str, directory: Path) -> Measured:
    torch.set_num_threads(case.threads)
    clock, stages = Clock(case.device), dict[str, float]()
    if side == "trl":
        trl_train(case, clock.start, clock.stop, directory)
    else:
        steps = learner_steps(case, side, stages) if side in LEARNER else bare_steps(case, side)
        next(steps)
        for _ in range(case.steps + 1):
            clock.start()
            next(steps)
            clock.stop()
    rows = make_rows(case, json.loads((Path(case.model) / "config.json").read_text())["vocab_size"])
    return Measured(
        side=side,
        seconds=statistics.median(clock.wall[1:]),
        cpu_seconds=statistics.median(clock.cpu[1:]),
        peak_mib=clock.peak_mib(),
        tokens=sum(len(row) for row in rows),
        sampled=sum(row.n_sampled for row in rows),
        stages={name: round(value, 4) for name, value in stages.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("case", help="JSON of Case")
    parser.add_argument("--directory", type=Path, default=Path("runs/learner_step"))
    arguments = parser.parse_args()
    measured = measure(Case(**json.loads(arguments.case)), arguments.side, arguments.directory)
    print("MEASURED " + json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
