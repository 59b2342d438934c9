"""The whole learner against the real replay stage in memory, an actor that answers orders, and an engine over HTTP."""

import contextlib
import itertools
import threading
import time
from collections import Counter
from functools import partial
from hashlib import sha256
from pathlib import Path

import anyio
import numpy as np
import orjson
import pytest
import torch
from aiohttp import web
from filelock import FileLock
from safetensors.torch import load_file

from learner.checkpoints.best import BestKeeper
from learner.checkpoints.checkpoint import find_checkpoints, read_state
from learner.models.info import ModelInfo
from learner.policy.policy import Policy
from learner.process.recorder import MetricsLog
from learner.process.role import serve as serve_learner
from learner.training import trainer as trainer_module
from learner.training.trainer import Trainer
from learner.weights import nccl_transfer, vllm_transfer, weight_pass
from learner.weights import publisher as publisher_module
from learner.weights.device_weights import DeviceWeights
from pipeline.config import RunConfig
from pipeline.errors import DamagedFiles
from pipeline.runtime.metrics import PHASES
from pipeline.runtime.process import ExitCode, RoleContext, _explain
from pipeline.runtime.progress import RoleState
from pipeline.runtime.run_directory import RunDirectory
from pipeline.runtime.weights import WITHDRAWN
from pipeline.schema import SCHEMA_VERSION, FinishReason, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema import Message as ChatMessage
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import Order, decode_request
from pipeline.stage.role import serve as serve_stage
from pipeline.store.evaluation_results import read_results
from pipeline.store.ledger import read_ledger
from pipeline.supervisor.history import describe_disk, disk_usage, remove_published
from pipeline.transport.messages import EventKind, Kind, WireMessage
from tests.support.damage import flip
from tests.support.http_server import serving
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryNetwork
from tests.support.nccl_endpoint import BroadcastEndpoint, NcclPeer, work_of


class Engine:
    """Control routes of an engine; ``versions`` is every stamp it was given, ``weights_of`` what it held under each."""

    digest = "initial"

    def __init__(self):
        self.version, self.versions, self.loaded, self.weights_of = "default", [], [], {}

    async def handle(self, request):
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/is_paused":
            return web.json_response({"is_paused": False})
        if request.path == "/get_world_size":
            return web.json_response({"world_size": 1})
        body = await request.json() if request.can_read_body else {}
        if request.path == "/collective_rpc":
            self.loaded.append(body["kwargs"]["weights_path"])
            folder = Path(self.loaded[-1])
            read = sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            self.digest = "initial" if folder.name == "model" else read
        if request.path == "/update_weight_version":
            self.version = body["new_version"]
            if self.version != WITHDRAWN:
                self.versions.append(int(self.version))
                self.weights_of.setdefault(self.version, set()).add(self.digest)
        return web.json_response({})


def config_of(tmp_path, url, **sections) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": str(tmp_path), "name": "r", "total_steps": sections.pop("total_steps", 3)},
            "model": {"source": "tiny", "max_length": 64, "tiny": {"hidden_size": 16, "layers": 1, "heads": 2}},
            "sampling": {"max_tokens": 8},
            "engine": {"kind": "external", "urls": [url], **sections.pop("engine", {})},
            "environments": {"toy": {"name": "arithmetic"}},
            "groups": {"n_rollout": 2, "groups_per_step": 2},
            "learner": {
                "device": "cpu",
                "compute_dtype": "float32",
                "learning_rate": 1e-3,
                **sections.pop("learner", {}),
            },
            "checkpoint": {"every": 2, **sections.pop("checkpoint", {})},
            "stage": {"synchronous": "NORMAL"},
            **sections,
        }
    )


async def play(network, engine):
    """An actor: every order is answered at once by two sampled tokens, worth 1 or 0."""
    rng = np.random.default_rng(0)
    async with MemoryLink(network, "actor-0") as link:
        link.describe({"role": "actor", "name": "actor-0", "schema_version": SCHEMA_VERSION, "slots": 4, "holding": []})
        while True:
            event = await link.receive()
            if event.kind is not EventKind.MESSAGE or event.message.kind is not Kind.ORDER:
                continue
            order = decode_request(Order, event.message.header)
            turn = Turn(
                TokenSpan.context([1, 2]), TokenSpan.sampled(rng.integers(3, 9, 2), [-1.0, -2.0], engine.versions[-1]),
                (ChatMessage("user", "u"),), ChatMessage("assistant", "a"), FinishReason.STOP, 1.0, {"right": 1.0},
            )  # fmt: skip
            trajectory = Trajectory(
                order.order_id, order.group_id, order.task, (turn,), TrajectoryStatus.COMPLETE,
                rewards={"environment": float(rng.integers(0, 2))},
            )  # fmt: skip
            header = {"trajectory_id": order.order_id}
            await link.send(WireMessage(Kind.TRAJECTORY, header, encode_trajectory(trajectory)))


class World:
    """Stage, actor and engine that live on while learners come and go."""

    def __init__(self, config, engine):
        self.config, self.engine, self.network = config, engine, MemoryNetwork()
        self.directory = RunDirectory(config.run.path).create()
        self.written = anyio.Event()

    async def run(self, tasks):
        stage = RoleContext("replay", 0, self.config, self.directory)
        tasks.start_soon(serve_stage, stage, MemoryHub(self.network))
        tasks.start_soon(play, self.network, self.engine)

    def learner(self):
        ctx = RoleContext("learner", 0, self.config, self.directory)
        return ctx, partial(serve_learner, ctx, MemoryLink(self.network, "learner"))

    async def learn(self):
        """A learner from its start to its end; its context."""
        ctx, run = self.learner()
        await run()
        return ctx

    async def until_step(self, step):
        """Wait until the line of ``step`` was written."""
        while not self.directory.metrics_file.exists() or len(self.lines()) < step:
            await self.written.wait()

    def wrote(self):
        written, self.written = self.written, anyio.Event()
        written.set()

    def lines(self):
        return [orjson.loads(line) for line in self.directory.metrics_file.read_bytes().splitlines()]


@contextlib.asynccontextmanager
async def world_of(folder, monkeypatch, seconds_max=60, **sections):
    engine = Engine()
    async with serving(engine.handle) as url:
        w = World(config_of(folder, url, **sections), engine)
        write = MetricsLog.write
        monkeypatch.setattr(MetricsLog, "write", lambda log, line: (write(log, line), w.wrote()))
        with anyio.fail_after(seconds_max):
            async with anyio.create_task_group() as tasks:
                await w.run(tasks)
                yield w
                tasks.cancel_scope.cancel()


@pytest.fixture
def world(tmp_path, monkeypatch):
    return partial(world_of, tmp_path, monkeypatch)


async def test_a_run_ends_with_every_step_recorded_published_and_saved(world):
    async with world() as w:
        ctx = await w.learn()
        assert ctx.status.state == "finished"
    lines = w.lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["policy_version"] for line in lines] == [0, 1, 2]
    assert all(line["n_trajectories"] == 4 and line["signals"] == {"right": 1.0} for line in lines)
    assert max(line["staleness_max"] for line in lines) <= 1
    assert {"wait", "prepare", "forward", "backward", "optimize", "publish"} <= set(lines[0]["seconds"])
    assert w.engine.versions == [0, 1, 2, 3]
    assert len(w.engine.loaded) == 3
    assert read_state(find_checkpoints(w.directory.checkpoints)[0]).updates == 3
    text = ctx.registry.get_sample_value
    assert text("afterplay_learner_updates_total") == 3
    assert text("afterplay_learner_importance_ratio_count", {"level": "token", "source": "fresh"}) == 24


async def test_a_run_whose_weights_leave_the_device_writes_no_folder_and_no_update_changes_what_is_sent(
    world, monkeypatch
):
    peer, sent, steps = NcclPeer(), [], []
    monkeypatch.setattr(
        nccl_transfer, "nccl_endpoint", lambda client, source, *_: BroadcastEndpoint(client, source, [peer])
    )
    monkeypatch.setattr(weight_pass, "work_of", work_of)
    monkeypatch.setattr(vllm_transfer, "_client", lambda *_: peer)
    make = vllm_transfer.VllmTransferLoader
    monkeypatch.setattr(
        vllm_transfer, "VllmTransferLoader", lambda *args, **more: make(*args, **more, device=torch.device("cpu"))
    )
    step, read = Trainer.step, Policy.weights
    retire, retired = DeviceWeights.retire, []

    async def retiring(weights):
        retired.append(len(steps))
        await retire(weights)

    def weights(policy, dtype):
        sent.append([len(steps)])
        yield from read(policy, dtype)
        sent[-1].append(len(steps))

    monkeypatch.setattr(Policy, "weights", weights)
    monkeypatch.setattr(DeviceWeights, "retire", retiring)
    monkeypatch.setattr(Trainer, "step", lambda *args, **more: (steps.append(1), step(*args, **more))[1])
    async with world(engine={"weight_transfer": "nccl"}) as w:
        await w.learn()
        assert [p for p in w.directory.weights(0).parent.rglob("*") if p.is_file()] == [] and w.engine.loaded == []
        assert w.engine.versions == [0, 1, 2, 3]
    assert sent == [[1, 1], [2, 2], [3, 3]], "no update began meanwhile"
    assert retired == [0, 1, 2], "before each update, those that it changes"
    assert len(peer.received) == 3
    last = load_file(find_checkpoints(w.directory.checkpoints)[0] / "model" / "model.safetensors")
    assert all(torch.equal(last[name], tensor) for name, tensor in peer.received[-1].items())


async def test_the_learner_says_which_step_it_skips_and_goes_on(world, monkeypatch, caplog):
    real = trainer_module.with_advantages

    def poison(batch, *rest):
        batch, scores = real(batch, *rest)
        if batch.update == 1:
            batch.rows[0].advantages[:] = np.nan
        return batch, scores

    monkeypatch.setattr(trainer_module, "with_advantages", poison)
    async with world(total_steps=3) as w:
        await w.learn()
    assert [line["nonfinite"]["loss"] for line in w.lines()] == [0, 1, 0]
    assert "steps of step 2 are skipped, a value is not finite: {'loss': 1}" in caplog.text


@pytest.mark.slow
async def test_the_folder_of_a_run_is_bounded_by_kind_however_many_steps_it_makes(world):
    async with world(total_steps=9, checkpoint={"every": 2}) as w:
        await w.learn()
    config, directory = w.config, w.directory
    parameters = ModelInfo.load(directory.model).parameters
    files = 40_000  # configuration, tokenizer, counters and random state of one folder
    used = disk_usage(directory)
    assert used["weights"] <= config.publish.keep * (2 * parameters + files)
    assert used["checkpoints"] <= config.checkpoint.keep * (12 * parameters + files)
    assert used["traces"] <= config.traces.bytes_max
    assert used["logs"] == used["evaluations"] == 0
    assert used["other"] <= 9 * 8_000
    assert remove_published(config, directory) == ["v000008", "v000009"]
    assert disk_usage(directory)["weights"] == 0
    assert "removed: 9 versions of the weights, 3 checkpoints" in describe_disk(directory, w.lines(), ["v000009"])


async def test_a_learner_that_is_stopped_while_another_prepares_the_model_ends(world):
    async with world() as w:
        ctx, run = w.learner()
        with FileLock(w.directory.path / ".model.lock"):
            ctx.stopping.set()
            await run()
    assert not w.directory.model.exists()


@pytest.mark.slow
async def test_the_stages_of_every_update_add_up_to_the_time_since_the_line_before(world):
    clock = []
    async with world(total_steps=6, checkpoint={"every": 2}) as w:
        ctx, run = w.learner()
        wrote = w.wrote
        w.wrote = lambda: (clock.append(time.perf_counter()), wrote())
        await run()
    lines = w.lines()
    for (before, after), line in zip(itertools.pairwise(clock), lines[1:], strict=True):
        stages = {name: seconds for name, seconds in line["seconds"].items() if name != "step"}
        assert set(stages) == set(PHASES)
        assert sum(stages.values()) == pytest.approx(line["seconds"]["step"], abs=1e-6)
        assert line["seconds"]["step"] == pytest.approx(after - before, abs=0.25)
        assert min(stages.values()) >= 0.0
    assert [line["seconds"]["save"] > 0 for line in lines] == [False, False, True, False, True, False]
    by_phase = [
        ctx.registry.get_sample_value("afterplay_learner_step_duration_seconds_sum", {"phase": s}) for s in PHASES
    ]
    assert sum(by_phase) == pytest.approx(sum(line["seconds"]["step"] for line in lines), abs=1e-6)
    assert lines[-1]["saved"]["updates"] in (2, 4)


@pytest.mark.parametrize("entropy", ["current", "stored"])
async def test_stored_successes_are_trained_in_place_of_fresh_rollouts(world, entropy):
    replay = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 0.5, "entropy": entropy, "max_age": 50}
    async with world(total_steps=8, replay=replay) as w:
        ctx = await w.learn()
    lines = w.lines()
    assert sum(line["n_replayed"] for line in lines) > 0
    for line in lines:
        assert line["n_trajectories"] == 4
        assert line["sampled_tokens_fresh"] == 2 * (4 - line["n_replayed"])
        assert line["choice_failed"] == 0
        assert (line["ess_replay"] is None) == (line["n_replayed"] == 0)
        assert line["reward_mean_replayed"] == (1.0 if line["n_replayed"] else None)
    assert max(line["staleness_max"] for line in lines) <= 1
    replayed = ctx.registry.get_sample_value("afterplay_learner_trained_trajectories_total", {"source": "replay"})
    assert replayed == sum(line["n_replayed"] for line in lines)


async def kill_after(w, steps):
    """A learner that is torn away after some lines, as by SIGKILL: no drain, no checkpoint of what came last."""
    _, run = w.learner()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await w.until_step(steps)
        tasks.cancel_scope.cancel()


async def stop_after(w, steps):
    """A learner that is asked to stop after some lines, and does."""
    ctx, run = w.learner()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await w.until_step(steps)
        ctx.stopping.set()


async def test_a_killed_learner_makes_the_lost_updates_again_under_new_versions(world):
    async with world(total_steps=6) as w:
        await kill_after(w, 3)
        await w.learn()
    lines = w.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert w.engine.versions == sorted(w.engine.versions)
    assert {version: len(weights) for version, weights in w.engine.weights_of.items() if len(weights) > 1} == {}


async def test_the_best_checkpoint_is_in_place_when_a_run_ends_however_late_its_keeper_acts(world, monkeypatch):
    monkeypatch.setattr(BestKeeper, "run", lambda keeper: anyio.sleep_forever())
    sections = {
        "environments": {"toy": {"name": "arithmetic", "held_out": {"eval": 4}}},
        "evaluation": {"every": 1, "keep_best": "score"},
    }
    async with world(total_steps=1, checkpoint={"at_end": False}, **sections) as w:
        await w.learn()
    results = read_results(w.directory.evaluations_file)
    assert [r["updates"] for r in results] == [0, 1]
    best = max(results, key=lambda r: (r["score"], -r["updates"]))
    assert read_state(w.directory.checkpoints / "best").updates == best["updates"]


@pytest.mark.slow
async def test_a_learner_killed_before_its_first_checkpoint_starts_over(world):
    async with world(total_steps=3, checkpoint={"every": 100}) as w:
        await kill_after(w, 1)
        await w.learn()
    assert [line["step"] for line in w.lines()] == [1, 2, 3]
    assert w.engine.versions == sorted(w.engine.versions)
    assert all(len(weights) == 1 for weights in w.engine.weights_of.values())


async def test_lost_connections_lose_no_update(world):
    async with world(total_steps=5) as w:
        _, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            for steps in (1, 2, 3):
                await w.until_step(steps)
                w.network.disconnect("learner")
    assert [line["step"] for line in w.lines()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps", [0, 2])
async def test_stopping_returns_at_once_and_leaves_a_run_that_can_go_on(world, steps):
    async with world(total_steps=1000, checkpoint={"every": 1}) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            if steps:
                await w.until_step(steps)
            tasks.cancel_scope.deadline = anyio.current_time() + 5
            ctx.stopping.set()
        assert not tasks.cancel_scope.cancel_called
        if steps:
            assert read_state(find_checkpoints(w.directory.checkpoints)[0]).updates >= steps - 1


async def test_a_learner_without_engines_says_what_it_waits_for(world, monkeypatch):
    async with world() as w:
        closed = w.config.model_copy(
            update={"engine": w.config.engine.model_copy(update={"urls": ("http://127.0.0.1:9",)})}
        )
        w.config = closed
        ctx, run = w.learner()
        reported, report = anyio.Event(), ctx.report

        def listening(*args, **details):
            nonlocal reported
            report(*args, **details)
            reported.set()
            reported = anyio.Event()

        monkeypatch.setattr(ctx, "report", listening)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            with anyio.fail_after(60):
                while "version 0" not in ctx.status.reason or not ctx.status.details["engines"]:
                    await reported.wait()
            ctx.stopping.set()


async def test_a_publication_lasts_until_an_engine_serves_it(world, monkeypatch):
    monkeypatch.setattr("learner.weights.engine_keeper.RETRY_SECONDS_MAX", 0.1)
    handle, until_live, began, waits = Engine.handle, publisher_module.Publisher.until_live, anyio.Event(), []

    async def failing(engine, request):
        if request.path == "/pause" and not began.is_set():
            return web.json_response({}, status=503)
        return await handle(engine, request)

    async def timed(publisher, version):
        start = time.perf_counter()
        began.set()
        await until_live(publisher, version)
        waits.append(time.perf_counter() - start)

    monkeypatch.setattr(Engine, "handle", failing)
    monkeypatch.setattr(publisher_module.Publisher, "until_live", timed)
    async with world(total_steps=2, staleness={"max": 0}) as w:
        ctx = await w.learn()
    [waited] = waits
    published = w.lines()[1]["published"]
    assert published["policy_version"] == 1 and published["seconds"] >= waited
    assert ctx.registry.get_sample_value("afterplay_learner_weight_load_duration_seconds_count") == 2


@pytest.mark.slow
async def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(world):
    """The replay stage has freed the groups of updates 3 and 4, which the damaged checkpoint had: others are played."""
    async with world(total_steps=8, checkpoint={"every": 2}) as w:
        await stop_after(w, 5)
        newest, older = find_checkpoints(w.directory.checkpoints)
        flip(newest / "training.pt")
        ctx = await w.learn()
        assert ctx.status.state == "finished"
    [sentence] = ctx.health()[1]["notices"]
    lost = int(newest.name[1:]) - int(older.name[1:])
    assert f"{newest.name} is damaged" in sentence and f"{older.name}; updates to make again: {lost}" in sentence
    assert ctx.registry.get_sample_value("afterplay_learner_damaged_checkpoints") == 1
    assert [line["step"] for line in w.lines()] == list(range(1, 9))
    assert w.engine.versions == sorted(w.engine.versions)
    assert {version: len(weights) for version, weights in w.engine.weights_of.items() if len(weights) > 1} == {}
    ledger = read_ledger(w.directory.store_file)
    assert ledger.audit() == [] and ledger.updates == 8


async def test_a_restarted_engine_gets_damaged_weights_written_again_while_the_learner_waits(world, monkeypatch):
    """The engine restarts when everything that could be played is trained: no next version would come."""
    monkeypatch.setattr("learner.weights.engine_keeper.WATCH_SECONDS", 0.02)
    handle, send, loaded_again, looks = Engine.handle, MemoryLink.send, anyio.Event(), itertools.count(1)

    async def restarting(engine, request):
        folder = w.directory.weights(2)
        published = engine.version == "2" and (folder / "contents.json").exists()
        if request.path == "/weight_info" and published and next(looks) == 5:  # by then the publication is over
            flip(folder / "model.safetensors")
            engine.version, engine.digest = "default", "initial"
        answer = await handle(engine, request)
        if engine.versions[-2:] == [2, 2]:
            loaded_again.set()
        return answer

    async def hold(link, message):
        if message.kind is Kind.TRAJECTORY and w.engine.versions[-1] == 2:
            await loaded_again.wait()
        return await send(link, message)

    monkeypatch.setattr(Engine, "handle", restarting)
    monkeypatch.setattr(MemoryLink, "send", hold)
    async with world(total_steps=3, staleness={"max": 0}) as w:
        await w.learn()
    assert w.engine.versions == [0, 1, 2, 2, 3]
    assert {version: len(weights) for version, weights in w.engine.weights_of.items()} == dict.fromkeys("0123", 1)


async def test_a_learner_without_an_intact_checkpoint_ends_with_one_sentence(world, capsys):
    async with world(total_steps=2, checkpoint={"every": 1, "at_end": False, "keep": 1}) as w:
        await w.learn()
        for path in find_checkpoints(w.directory.checkpoints):
            flip(path / "model" / "model.safetensors")
        _, run = w.learner()
        with pytest.raises(DamagedFiles) as caught:
            await run()
    assert _explain("learner", caught.value) == ExitCode.CONFIGURATION, "the supervisor does not start it again"
    assert capsys.readouterr().err.count("\n") == 1


async def until_unwell(ctx, state):
    """Wait until the role counts as stuck in ``state``; there is no event for what does not happen."""
    with anyio.fail_after(60):
        while ctx.health()[1]["state"] != f"stuck while {state}":
            await anyio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "state"),
    [(Trainer, "step", RoleState.TRAINING), (publisher_module, "write_weights", RoleState.PUBLISHING)],
)
async def test_a_thread_that_hangs_is_noticed_although_the_event_loop_lives(world, monkeypatch, place, name, state):
    released, real = threading.Event(), getattr(place, name)

    def hang(*args, **options):
        released.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(place, name, hang)
    async with world(supervisor={"progress_seconds_max": 0.1}, publish={"timeout_seconds": 0.5}) as w:
        ctx, run = w.learner()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await until_unwell(ctx, state)
                released.set()
                ctx.stopping.set()
        finally:
            released.set()


async def test_every_layer_of_a_pass_is_progress_and_waiting_for_rollouts_is_too(world, monkeypatch):
    async with world(supervisor={"progress_seconds_max": 0.1}) as w:
        ctx, run = w.learner()
        beats, beat = Counter(), ctx.beat
        monkeypatch.setattr(ctx, "beat", lambda: (beats.update([ctx.status.state]), beat()))
        await run()
    assert beats[RoleState.TRAINING] >= 3 * 2, "one layer, forward and backward, in three updates"
    assert beats[RoleState.WAITING_FOR_ROLLOUTS] >= 3
    assert ctx.registry.get_sample_value("afterplay_run_finished_timestamp_seconds") > 0
