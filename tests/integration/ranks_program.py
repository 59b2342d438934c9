"""One rank of ``test_ranks.py``: runs the cases of a file; rank 0 writes what it found beside it."""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors.torch import load_file, save_file

from learner.checkpoints import model_files
from learner.checkpoints.checkpoint import CheckpointState, restore_training, save_checkpoint
from learner.data.rows import Batch
from learner.distributed.collectives import RankGroup, join, leave, process_rank
from learner.distributed.ranks import Interrupt, local_part
from learner.process.build import make_trainer
from learner.process.device_turn import Offload
from learner.process.rank_processes import execute_commands, shard_writer
from learner.training.optimizer import bit_sums
from learner.training.trainer import Trainer
from learner.weights import nccl_transfer, vllm_transfer, weight_pass
from pipeline.errors import EngineUnavailable
from pipeline.runtime.folders import find_damage
from tests.support.nccl_endpoint import BroadcastEndpoint, NcclPeer, work_of
from tests.support.shared_memory_endpoint import RecordingClient, SharedMemoryEndpoint
from tests.unit.learner.conftest import make_rows, run_config
from tests.unit.packing.conftest import branching_rows


def config_of(case):
    return run_config({"tokens_per_microbatch": 40, "ranks_timeout_seconds": 60, **case.get("learner", {})},
                      **case.get("sections", {}))  # fmt: skip


def rows_of(case, update):
    if "groups" in case:
        replayed = case.get("replayed", 0)
        return tuple(replace(r, replayed=r.trajectory_index < replayed) for r in branching_rows(case["groups"], update))
    rows = make_rows(case.get("rows", 9), seed=update, replayed=[i % 3 == 0 for i in range(case.get("rows", 9))])
    for i in case.get("without_signal", []):
        rows[i].advantages[:] = 0
    if case.get("recorded"):
        draw = np.random.default_rng(update).permuted
        choices = [draw(np.tile(np.arange(6, dtype=np.uint8), (len(row), 2, 1)), axis=-1)[..., :2] for row in rows]
        rows = tuple(replace(row, experts=chosen) for row, chosen in zip(rows, choices, strict=True))
    if case.get("poison") == update:
        rows[0].advantages[:] = np.inf
    return rows


def train(trainer: Trainer, case, updates) -> dict:
    """Reports of the updates, as JSON."""
    found, offload = [], Offload(trainer)
    for update in updates:
        if case.get("turns"):
            take_turns(offload)
        rows = rows_of(case, update)
        scores = trainer.token_scores(rows)
        if scores.values is not None:
            scores = replace(scores, returns=np.sin(np.arange(len(scores.values))).astype(np.float32))
        report = trainer.step(Batch(update, (), rows), policy_version=update, scores=scores)
        s = report.statistics
        found.append({
            "loss": report.loss, "grad_norm": report.grad_norm, "entropy": s.all.entropy.value,
            "tokens": s.all.tokens, "ratio": s.all.ratio.mean, "steps": report.optimizer_steps,
            "nonfinite": report.nonfinite, "kl": report.kl_loss, "guard": report.guard_lr_factor,
            "critic": None if report.critic is None else report.critic.loss,
            "microbatches": report.n_microbatches,
            "router_entropy": report.router_entropy, "expert_imbalance": report.expert_imbalance,
            "critic_norm": None if report.critic is None else report.critic.grad_norm,
        })  # fmt: skip
    return {"updates": found}


@torch.no_grad()
def take_turns(offload: Offload) -> None:
    """Everything leaves the device and comes back. What was left behind holds no number, so that using it is seen."""
    for move in (offload.to_host, offload.to_device):
        left = [local_part(tensor).data for tensor in offload._tensors()]
        assert move() > 0
        for tensor in left:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def run(folder: Path, cases: dict, group: RankGroup | None, layout: str = "1") -> None:
    """Every case with a trainer of its own."""
    rank = 0 if group is None else group.rank
    for name, case in cases.items():
        torch.manual_seed(case.get("seed", 0))
        source = None if "load" not in case else folder / case["load"] / "u000002"
        model = folder / case.get("model", "model")
        trainer = make_trainer(config_of(case), model, source, group)
        if source is not None:
            restore_training(source, trainer)
        if rank:
            obey(trainer, group)
            draws(group)
            differing_replicas(trainer, group)
            continue
        if case.get("transfer"):
            (folder / "transfer.json").write_bytes(orjson.dumps(transfers(trainer, group)))
            (folder / "broadcast.json").write_bytes(orjson.dumps(broadcasts(trainer, group)))
            group.end()
            draws(group)
            differing_replicas(trainer, group)
            continue
        before = between_replicas(group)
        resumed = source is None or holds(source, trainer.policy.snapshot("float32"))
        # The second update has the weights and the moments of the first. One more goes on from a checkpoint, or after a
        # step that is not finite.
        last = 3 if {"save", "load", "poison"} & case.keys() else 2
        found = train(trainer, case, range(trainer.updates, 2 if "save" in case else last))
        if "save" in case:
            state = CheckpointState(trainer.updates, trainer.updates, {})
            expected = trainer.policy.snapshot("float32")
            path = save_checkpoint(folder / case["save"], trainer, state, model, keep=3)
            files = len(list((path / "model").glob("*.safetensors")))
            found |= {"same": holds(path, expected), "files": files, "damage": find_damage(path),
                      "names": sorted(file.name for file in path.iterdir())}  # fmt: skip
            found = {**found, "updates": found["updates"] + train(trainer, case, range(2, last))["updates"]}
        weights = trainer.policy.snapshot("float32")
        found["between"] = between_replicas(group) - before
        if group is not None:
            group.end()
        found |= {"random": draws(group), "resumed": resumed}
        found["differing"] = differing_replicas(trainer, group)
        out = folder / f"ranks{layout}"
        out.mkdir(exist_ok=True)
        save_file(weights, out / f"{name}.safetensors")
        (out / f"{name}.json").write_bytes(orjson.dumps(found))


def between_replicas(group: RankGroup | None) -> int:
    """Collectives so far between this rank and those with the same shard, as gloo counts them."""
    return 0 if group is None else group._replicas._get_sequence_number_for_group()


def holds(checkpoint: Path, weights: dict[str, torch.Tensor]) -> bool:
    """True where the model of a checkpoint has these bits."""
    saved = {k: t for file in (checkpoint / "model").glob("*.safetensors") for k, t in load_file(file).items()}
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], t) for name, t in weights.items())


def transfers(trainer: Trainer, group: RankGroup) -> list[dict]:
    """Publications by IPC in which the engine fails at one call after another, then at none, then one given up."""
    client, gone = RecordingClient(), threading.Event()
    sender = vllm_transfer.IpcGroup(client, group, trainer.policy.device)
    found = []
    for fault in ("start", "update", "finish", "", "given up"):
        client.faults, client.calls, client.update, error = {fault}, [], {}, ""
        weights = trainer.policy.snapshot("bfloat16")
        if fault == "given up":
            gone.set()
        try:
            sender.send(weights, gone)
        except ConnectionError as raised:
            error = str(raised)
        digests = {n: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in weights.items()}
        handles = dict(zip(client.update.get("names", ()), client.update.get("ipc_handles", ()), strict=True))
        found.append({"calls": client.calls, "error": error, "digests": digests, "handles": handles})
        trainer.step(Batch(trainer.updates, (), rows_of({}, trainer.updates)), policy_version=trainer.updates)
    return found


def broadcasts(trainer: Trainer, group: RankGroup) -> list[dict]:
    """Publications by NCCL to two engines, gathered once, one weight at a time, in which one dies or hangs, and
    whole ones; an update follows each."""
    peers = {"http://bad": NcclPeer(), "http://whole": NcclPeer()}
    bad, policy, found = peers["http://bad"], trainer.policy, []
    nccl_transfer.nccl_endpoint = lambda client, source, urls, workers: BroadcastEndpoint(
        client, source, [peers[url] for url in urls]
    )
    weight_pass.work_of = work_of
    for fault in ("", "dies", "hangs", ""):
        bad.fault, errors = fault, []
        expected, alive, most = policy.snapshot("bfloat16"), weakref.WeakSet(), [0]

        def read(alive=alive, most=most):
            for name, tensor in policy.weights("bfloat16"):
                alive.add(tensor)
                most.append(len(alive))
                yield name, tensor
                del tensor

        def send(group, send, errors=errors):
            try:
                group.send(send)
            except (ConnectionError, EngineUnavailable) as raised:
                errors.append(str(raised))

        weights = weight_pass.WeightPass(policy.description("bfloat16"), read, 2, hold_seconds=0.2)
        threads = []
        for (url, peer), part in zip(peers.items(), weights.sends, strict=True):
            peer.received = []
            member = nccl_transfer.Member(url, peer.workers, peer)
            group = nccl_transfer.NcclGroup([member], policy.device, failed=lambda url, error: None)
            threads.append(threading.Thread(target=send, args=(group, part)))
            threads[-1].start()
        weights.run(policy.device)
        for thread in threads:
            thread.join()
        same = [
            bool(peer.received) and peer.received[0].keys() == expected.keys()
            and all(torch.equal(peer.received[0][name], tensor) for name, tensor in expected.items())
            for peer in peers.values()
        ]  # fmt: skip
        found.append({"fault": fault, "error": ", ".join(errors), "same": same, "most": max(most)})
        trainer.step(Batch(trainer.updates, (), rows_of({}, trainer.updates)), policy_version=trainer.updates)
    return found


def obey(trainer: Trainer, group: RankGroup) -> None:
    with shard_writer(trainer) as image:
        execute_commands(trainer, group, image)


def draws(group: RankGroup | None) -> list[float]:
    """The next random number of every rank."""
    own = float(torch.rand(()))
    return [own] if group is None else [facts["own"] for facts, _ in group.everyones({"own": own}, {})]


def differing_replicas(trainer: Trainer, group: RankGroup | None) -> int:
    """Ranks whose shards of weights and moments have other bits than those of the first replica."""
    if group is None:
        return 0
    moments = [m for p in trainer.optimizer.state.values() for m in p.values() if torch.is_tensor(m) and m.ndim]
    own = bit_sums([*trainer.policy.parameters, *moments]).tolist()
    found = [facts["own"] for facts, _ in group.everyones({"own": own}, {})]
    return sum(bits != found[rank % group.mesh.size()] for rank, bits in enumerate(found))


def main(folder: Path, layout: str) -> None:
    torch.set_num_threads(1)
    vllm_transfer.ipc_endpoint = SharedMemoryEndpoint
    model_files.FILE_BYTES_MAX = 4096
    config = run_config({"ranks_timeout_seconds": 60})
    process = process_rank(config.learner)
    device = join(process, config.learner)
    cases = orjson.loads((folder / f"cases{layout}.json").read_bytes())
    replicas = process.world_size // int(layout.rpartition("x")[2])
    sizes = {name: case.get("learner", {}).get("context_ranks", 1) for name, case in cases.items()}
    for size in sorted(set(sizes.values())):
        group = RankGroup(device, Interrupt(), 60.0, replicas, size)
        run(folder, {name: case for name, case in cases.items() if sizes[name] == size}, group, layout)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
