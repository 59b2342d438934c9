"""The publisher against small real HTTP servers that behave like engines, and like failing ones."""

from functools import partial

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.metrics import LearnerMetrics
from learner.weights import engine_keeper, vllm_transfer
from learner.weights import publisher as publisher_module
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import Target, WeightProbe, load_needed
from learner.weights.publisher import Publisher, make_publisher, published_versions, write_weights
from pipeline.config import RunConfig
from pipeline.config.learner import PublishConfig
from pipeline.errors import EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime import progress
from pipeline.runtime.engine_keys import make_key_files
from pipeline.runtime.folders import find_damage, write_contents
from pipeline.runtime.http import HttpClient
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.run_directory import RunDirectory
from tests.support.damage import DAMAGES
from tests.support.fake_engine import FakeEngine, running


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("learner.weights.engine_keeper.WATCH_SECONDS", 0.05)
    monkeypatch.setattr("learner.weights.engine_keeper.RETRY_SECONDS", 0.02)


@pytest.fixture
async def engines():
    started = [await FakeEngine().start() for _ in range(2)]
    yield started
    for engine in started:
        await engine.stop()


@pytest.fixture
def weights(kit):
    policy = kit.tiny_policy()
    return policy.model, policy.snapshot("bfloat16")


def publisher_of(urls, tmp_path, model, timeout=5.0, keep=2, **more):
    directory = RunDirectory(tmp_path).create()
    return Publisher(
        urls, directory, PublishConfig(timeout_seconds=timeout, keep=keep), partial(write_weights, model), **more
    ), directory


async def test_every_engine_serves_the_published_version_and_runs_on(engines, weights, tmp_path):
    publisher, directory = publisher_of([e.url for e in engines], tmp_path, weights[0])
    async with running(publisher):
        done = await publisher.publish(1, weights[1])
    assert sorted(done.live) == sorted(e.url for e in engines)
    assert done.n_bytes > 0
    for engine in engines:
        assert (engine.version, engine.paused) == ("1", False)
        assert engine.loaded == [str(directory.weights(1).absolute())]


async def test_initial_version_is_only_stamped_on_engines_that_hold_it_already(engines, weights, tmp_path):
    engines[1].version = "37"
    publisher, directory = publisher_of([e.url for e in engines], tmp_path, weights[0])
    async with running(publisher):
        await publisher.publish(0, None)
    assert [e.version for e in engines] == ["0", "0"]
    assert engines[0].loaded == []
    assert engines[1].loaded == [str(directory.model.absolute())]


async def test_an_engine_that_is_down_does_not_delay_the_others(engines, weights, tmp_path):
    await engines[1].stop()
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1000)
    async with running(publisher):
        with anyio.fail_after(60):
            done = await publisher.publish(1, weights[1])
        assert done.live == (engines[0].url,)
        assert "failed" in done.lagging[engines[1].url]


@pytest.mark.parametrize(("path", "fault"), [("/pause", 500), ("/pause", 404), ("/pause", "hang"),
                                             ("/collective_rpc", 404)])  # fmt: skip
async def test_an_engine_whose_weights_are_whole_goes_on_with_them(engines, weights, tmp_path, path, fault):
    engine = engines[1]
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1.0)
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(0, None)
            engine.faults[path] = fault
            done = await publisher.publish(1, weights[1])
            assert done.live == (engines[0].url,)
            await publisher.keepers[engine.url].until_attempted(1)
            assert (engine.paused, engine.version) == (False, "0")
            engine.faults.clear()
            await publisher.keepers[engine.url].until_served(1)
    assert engine.version == "1"


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version"])
@pytest.mark.parametrize("fault", [500, "hang"])
async def test_a_half_loaded_engine_stays_paused_and_withdrawn_until_a_load_is_whole(
    engines, weights, tmp_path, path, fault
):
    engine = engines[1]
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1.0)
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(0, None)
            resumed = engine.calls.count("/resume")
            engine.faults[path] = fault
            done = await publisher.publish(1, weights[1])
            assert engine.url not in done.live
            await publisher.keepers[engines[0].url].until_served(1)
            await publisher.keepers[engine.url].until_attempted(1)
            assert engine.paused
            assert engine.calls.count("/resume") == resumed
            if path == "/collective_rpc":
                assert engine.version == "withdrawn"
            engine.faults.clear()
            await publisher.keepers[engine.url].until_served(1)
    assert (engine.version, engine.paused, engine.broken) == ("1", False, [])


async def test_a_half_loaded_engine_that_refuses_the_next_load_does_not_resume(engines, weights, tmp_path):
    engine = engines[0]
    publisher, _ = publisher_of([engine.url], tmp_path, weights[0])
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(0, None)
            keeper = publisher.keepers[engine.url]
            for fault in (500, 404):
                engine.faults["/collective_rpc"] = fault
                before = keeper.state.failures
                await publisher.publish(1, weights[1])
                while keeper.state.failures < before + 2:
                    await keeper._changed.wait()
                assert (engine.paused, engine.version) == (True, "withdrawn")
            engine.faults.clear()
            await keeper.until_served(1)
    assert (engine.paused, engine.broken) == (False, [])


async def test_an_engine_that_does_not_resume_is_not_live_and_is_tried_until_it_does(engines, weights, tmp_path):
    engine = engines[1]
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0])
    async with running(publisher):
        with anyio.fail_after(60):
            engine.faults["/resume"] = 500
            done = await publisher.publish(1, weights[1])
            assert done.live == (engines[0].url,)
            assert "/resume" in done.lagging[engine.url]
            keeper = publisher.keepers[engine.url]
            while keeper.state.failures < 3:
                await keeper._changed.wait()
            assert engine.paused and keeper.state.live is None
            engine.faults.clear()
            await keeper.until_served(1)
    assert not engine.paused


@pytest.mark.parametrize(("path", "fault", "timeout"), [("/collective_rpc", "for ever", 5.0), ("/pause", "hang", 1.0)])
async def test_an_engine_that_cannot_load_or_pause_any_more_is_ended_and_loads_after_its_restart(
    engines, weights, tmp_path, path, fault, timeout
):
    engine = engines[1]
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=timeout)
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(0, None)
            engine.faults[path] = fault
            await publisher.publish(1, weights[1])
            await publisher.keepers[engine.url].until_served(1)
    assert (engine.ended, engine.version, engine.broken) == (1, "1", [])


async def test_a_learner_that_died_in_a_load_leaves_no_engine_for_the_next_to_mistake(engines, weights, tmp_path):
    """The engine had restarted, so its weights had no stamp when the load began; the next learner has version 0."""
    engine = engines[0]
    publisher, _ = publisher_of([engine.url], tmp_path, weights[0])
    engine.faults["/collective_rpc"] = "hang"
    async with running(publisher):
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(publisher.publish, 1, weights[1])
                while "/collective_rpc" not in engine.calls:
                    await anyio.sleep(0.01)
                engine.faults["/update_weight_version"] = 500
                group.cancel_scope.cancel()
    engine.faults.clear()
    successor, _ = publisher_of([engine.url], tmp_path / "next", weights[0])
    async with running(successor):
        with anyio.fail_after(60):
            await successor.publish(0, None)
            await successor.until_live(0)
    assert engine.loaded == [str((tmp_path / "next" / "model").absolute())]
    assert (engine.version, engine.paused, engine.broken) == ("0", False, [])


async def test_a_load_that_a_dead_learner_began_is_undone_and_the_engine_need_not_end(engines, weights, tmp_path):
    """It refuses every load until then, although its health is good."""
    engine = engines[0]
    engine.version, engine.paused, engine.half_loaded = "withdrawn", True, True
    publisher, _ = publisher_of([engine.url], tmp_path, weights[0])
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(1, weights[1])
            await publisher.keepers[engine.url].until_served(1)
    assert (engine.version, engine.paused, engine.ended, engine.broken) == ("1", False, 0, [])


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def probe(registry):
    return WeightProbe([3, 1, 4, 1, 5], 0.5, LearnerMetrics(registry))


async def until(look):
    with anyio.fail_after(60):
        while not look():
            await anyio.sleep(0.01)


def probes(registry, result):
    return registry.get_sample_value("afterplay_learner_weight_probes_total", {"result": result})


async def test_an_engine_that_serves_other_weights_is_withdrawn_until_it_serves_those_published(
    engines, weights, tmp_path, probe, registry
):
    good, bad = engines
    good.score, bad.score = -1.5, -3.0
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], probe=probe)
    expected = np.full(4, -1.4, np.float32)
    async with running(publisher):
        await publisher.publish(1, weights[1], expected)
        await until(lambda: probes(registry, "refuted"))
        await until(lambda: publisher.keepers[bad.url].state.reason)
        assert "other weights" in publisher.reason()[bad.url]
        assert publisher.live(1) == (good.url,)
        assert good.version == "1"
        bad.score = -1.5
        await until(lambda: probes(registry, "proven") == 2)
        await until(lambda: set(publisher.live(1)) == {good.url, bad.url})
    assert bad.loaded[0] == bad.loaded[-1] and len(bad.loaded) > 1
    assert good.calls.count("/inference/v1/generate") == 1
    assert registry.get_sample_value("afterplay_learner_weight_probe_diff_nats") == pytest.approx(0.1)


async def test_an_engine_that_cannot_answer_the_probe_serves_on(engines, weights, tmp_path, probe, registry):
    publisher, _ = publisher_of([engines[0].url], tmp_path, weights[0], probe=probe)
    async with running(publisher):
        await publisher.publish(1, weights[1], np.zeros(4, np.float32))
        await until(lambda: probes(registry, "unanswered"))
        assert publisher.live(1) == (engines[0].url,)


async def test_a_stamp_names_the_run_and_another_runs_is_replaced(engines, weights, tmp_path):
    engines[0].version = "other/1"
    publisher, directory = publisher_of([engines[0].url], tmp_path, weights[0], run="mine")
    async with running(publisher):
        await publisher.publish(1, weights[1])
    assert engines[0].version == "mine/1"
    assert engines[0].loaded == [str(directory.weights(1).absolute())]


async def test_every_control_call_shows_the_learners_key_to_engines_that_are_external_too(engines, kit, tmp_path):
    make_key_files(tmp_path)
    keys = {f"{role}_key": f"file:{tmp_path}/engine_{role}.secret" for role in ("actor", "learner")}
    engine = {"kind": "external", "urls": [engines[0].url], **keys}
    config = RunConfig.model_validate({"engine": engine, "publish": {"probe_nats_max": None}})
    policy, directory = kit.tiny_policy(), RunDirectory(tmp_path).create()
    async with running(make_publisher(config, directory, policy, LearnerMetrics(CollectorRegistry()))) as publisher:
        await publisher.publish(1, policy.snapshot("bfloat16"))
    assert engines[0].authorizations == {f"Bearer {(tmp_path / 'engine_learner.secret').read_text().strip()}"}


async def timed(publication):
    """Result and seconds."""
    begun = anyio.current_time()
    return await publication, anyio.current_time() - begun


async def test_a_slow_engine_delays_one_publication_only(engines, weights, tmp_path):
    engines[1].faults["/collective_rpc"] = "hang"
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1.5)
    async with running(publisher):
        _, late = await timed(publisher.publish(1, weights[1]))
        second, seconds = await timed(publisher.publish(2, weights[1]))
    assert late > 1.25 > seconds
    assert second.live == (engines[0].url,)


@pytest.fixture
def quickly(monkeypatch):
    """Silence is too long after 0.5 s at least."""
    monkeypatch.setattr(progress, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.05)
    for name, seconds in (("TICK_SECONDS", 0.05), ("PROBE_SECONDS", 0.1)):
        monkeypatch.setattr(engine_keeper, name, seconds)


@pytest.mark.parametrize("path", ["/weight_info", "/pause", "/collective_rpc", "/update_weight_version", "/resume"])
async def test_an_engine_that_hangs_delays_a_publication_by_seconds_and_serves_when_it_goes_on(
    engines, weights, tmp_path, path, quickly
):
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1000)
    async with running(publisher):
        with anyio.fail_after(100):
            await publisher.publish(0, None)
            engines[1].hangs_at = path
            (first, late), (second, later) = [await timed(publisher.publish(n, weights[1])) for n in (1, 2)]
            assert first.live == second.live == (engines[0].url,)
            assert "hangs, or cannot be reached" in second.lagging[engines[1].url]
            engines[1].proceed()
            await publisher.keepers[engines[1].url].until_served(2)
    assert max(late, later) < 15, "not the 1,000 s of publish.timeout_seconds, nor the 30 s of a shielded call"
    assert (engines[1].version, engines[1].paused, engines[1].broken) == ("2", False, [])


async def test_an_engine_that_loads_for_longer_than_its_silence_may_last_is_waited_for(
    engines, weights, tmp_path, quickly
):
    """Its server answers meanwhile."""
    engines[1].faults["/collective_rpc"] = "hang"
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=1000)
    async with running(publisher), anyio.create_task_group() as group:

        async def load_slowly():
            keeper = publisher.keepers[engines[1].url]
            while engines[1].calls.count("/collective_rpc") == 0:
                await anyio.sleep(0.01)
            for _ in range(60):
                await anyio.sleep(0.05)
                assert not keeper.state.failures
            engines[1].faults.clear()
            engines[1].released.set()

        group.start_soon(load_slowly)
        with anyio.fail_after(100):
            done = await publisher.publish(1, weights[1])
        assert sorted(done.live) == sorted(e.url for e in engines)


@pytest.mark.parametrize("path", ["/weight_info", "/is_paused"])
async def test_an_engine_that_answers_late_is_not_loaded_again(engines, weights, tmp_path, path):
    """A load costs it the KV cache of its requests: one that is too slow would never finish any."""
    engine = engines[1]
    publisher, directory = publisher_of([e.url for e in engines], tmp_path, weights[0], timeout=0.2)
    async with running(publisher):
        keeper = publisher.keepers[engine.url]
        with anyio.fail_after(60):
            await publisher.publish(1, weights[1])
            await keeper.until_served(1)
            # several loads, on a machine so slow that one of them was late
            loaded, failures = list(engine.loaded), keeper.state.failures
            engine.faults[path] = "hang"
            while keeper.state.failures < failures + 2:
                await keeper._changed.wait()
            engine.faults.clear()
            await keeper.until_served(1)
    assert engine.loaded == loaded
    assert set(loaded) == {str(directory.weights(1).absolute())}


async def test_an_engine_that_restarts_gets_the_newest_version(engines, weights, tmp_path):
    publisher, directory = publisher_of([e.url for e in engines], tmp_path, weights[0])
    async with running(publisher):
        await publisher.publish(0, None)
        await publisher.publish(1, weights[1])
        port = engines[1].port
        await engines[1].stop()
        keeper = publisher.keepers[engines[1].url]
        with anyio.fail_after(60):
            while keeper.state.live is not None:
                await keeper._changed.wait()
            reborn = await FakeEngine().start(port)
            try:
                await keeper.until_served(1)
            finally:
                await reborn.stop()
    assert reborn.version == "1"
    assert reborn.loaded == [str(directory.weights(1).absolute())]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "contents.json"])
async def test_an_engine_that_restarts_gets_damaged_weights_written_again_at_once(
    engines, weights, tmp_path, file, damage, caplog
):
    """Whatever the learner does meanwhile: the publisher has the weights in memory."""
    publisher, directory = publisher_of([engines[0].url], tmp_path, weights[0])
    async with running(publisher):
        await publisher.publish(1, weights[1])
        keeper, engine = publisher.keepers[engines[0].url], engines[0]
        written = (directory.weights(1) / "model.safetensors").read_bytes()
        DAMAGES[damage](directory.weights(1) / file)
        engine.version = "default"  # as of one that has restarted
        await until(lambda: len(engine.loaded) == 2 and engine.version == "1")
        await until(lambda: keeper.state.live == 1)
    assert f"{directory.weights(1)} are damaged ({file} " in caplog.text
    assert (directory.weights(1) / "model.safetensors").read_bytes() == written
    assert find_damage(directory.weights(1)) == ""


async def test_an_engine_whose_initial_weights_are_damaged_gets_those_of_the_learner(engines, weights, tmp_path):
    publisher, directory = publisher_of([engines[0].url], tmp_path, weights[0])
    write_weights(weights[0], directory.model, weights[1])
    write_contents(directory.model)
    DAMAGES["flip"](directory.model / "model.safetensors")
    engine = engines[0]
    engine.version = "another"
    async with running(publisher):
        await publisher.publish(0, weights[1], initial=True)
        await until(lambda: engine.version == "0")
    assert engine.loaded == [str(directory.weights(0).absolute())]
    assert find_damage(directory.weights(0)) == ""


async def test_damaged_weights_that_nobody_has_are_not_given_to_an_engine(engines, weights, tmp_path):
    publisher, directory = publisher_of([engines[0].url], tmp_path, weights[0])
    write_weights(weights[0], directory.model, weights[1])
    write_contents(directory.model)
    DAMAGES["flip"](directory.model / "model.safetensors")
    engines[0].version = "another"
    async with running(publisher):
        assert "are damaged (model.safetensors " in (await publisher.publish(0, None)).lagging[engines[0].url]
    assert engines[0].loaded == []


async def test_an_engine_that_is_still_starting_is_asked_at_short_intervals(engines, weights, tmp_path, monkeypatch):
    """With the back-off for failing engines a dozen attempts would take minutes."""
    monkeypatch.setattr(engine_keeper, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(engine_keeper, "RETRY_SECONDS_MAX", 300.0)
    engines[0].faults["/weight_info"] = 503
    publisher, _ = publisher_of([engines[0].url], tmp_path, weights[0])
    async with running(publisher):
        keeper = publisher.keepers[engines[0].url]
        with anyio.fail_after(30):
            await publisher.publish(0, None)
            while keeper.state.failures < 15:
                await keeper._changed.wait()
            engines[0].faults.clear()
            await keeper.until_served(0)


async def test_an_engine_counts_as_failed_only_once_it_takes_connections(engines, weights, tmp_path):
    for engine in engines:
        await engine.stop()
    failures = []
    urls = [engine.url for engine in engines]
    publisher, _ = publisher_of(urls, tmp_path, weights[0], on_failure=lambda: failures.append(1))
    async with running(publisher):
        with anyio.fail_after(30):
            assert not (await publisher.publish(0, None)).live
            assert not failures
            engines[0].faults["/weight_info"] = 404  # it has started, without the control routes
            await engines[0].start(engines[0].port)
            while not failures:
                await anyio.sleep(0.01)
            await publisher.publish(1, weights[1])
            await publisher.keepers[urls[0]].until_attempted(1)
            assert len(failures) == 2
            engines[0].faults.clear()
            await publisher.keepers[urls[0]].until_served(1)
            await engines[0].stop()  # it has served, and is gone
            await publisher.publish(2, weights[1])
            await publisher.keepers[urls[0]].until_attempted(2)
    assert len(failures) == 3


@pytest.mark.parametrize(("sections", "files"), [({}, []), ({"checkpoint": {"at_end": False}}, ["model.safetensors"])])
def test_weights_that_travel_between_gpus_pass_through_no_file(kit, weights, tmp_path, monkeypatch, sections, files):
    """Unless the run shall leave them."""
    config = kit.run_config(engine={"weight_transfer": "nccl"}, **sections)
    directory = RunDirectory(tmp_path).create()
    monkeypatch.setattr(vllm_transfer, "VllmTransferLoader", lambda *args, **more: None)
    _, write = publisher_module._transfer(config, directory, kit.tiny_policy(), None, None)
    assert write(directory.weights(7), weights[1]) > 0
    assert [path.name for path in directory.weights(7).glob("*.safetensors")] == files
    assert published_versions(directory) == [7]


async def test_until_live_waits_for_the_first_engine(engines, weights, tmp_path):
    engines[0].faults["/weight_info"] = engines[1].faults["/weight_info"] = 503
    publisher, _ = publisher_of([e.url for e in engines], tmp_path, weights[0])
    async with running(publisher):
        done = await publisher.publish(0, None)
        assert done.live == ()
        assert len(publisher.reason()) == 2
        engines[1].faults.clear()
        with anyio.fail_after(60):
            await publisher.until_live(0)
    assert engines[1].version == "0"


async def test_only_the_newest_folders_are_kept(engines, weights, tmp_path):
    publisher, directory = publisher_of([e.url for e in engines], tmp_path, weights[0], keep=2)
    async with running(publisher):
        for version in range(1, 5):
            await publisher.publish(version, weights[1])
    assert published_versions(directory) == [3, 4]


def test_published_folder_loads_in_transformers_with_tied_weights_once(kit, tmp_path):
    policy = kit.tiny_policy()
    n_bytes = write_weights(policy.model, tmp_path / "v000001", policy.snapshot("bfloat16"))
    stored = load_file(tmp_path / "v000001" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert all(t.dtype == torch.bfloat16 for t in stored.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v000001")
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(
        model.get_output_embeddings().weight, policy.model.get_output_embeddings().weight.to(torch.bfloat16)
    )
    assert n_bytes == sum(p.stat().st_size for p in (tmp_path / "v000001").iterdir())


def test_a_killed_write_leaves_no_folder_that_an_engine_could_take(kit, tmp_path, monkeypatch):
    policy = kit.tiny_policy()

    def dies(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(policy.model, "save_pretrained", dies)
    with pytest.raises(KeyboardInterrupt):
        write_weights(policy.model, tmp_path / "v000001", policy.snapshot("bfloat16"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("served", "initial", "known", "needed"),
    [
        ("default", True, False, False),
        ("default", False, True, True),
        ("7", False, True, False),
        ("7", False, False, True),
        ("6", False, True, True),
        ("6", True, True, True),
    ],
)
def test_load_is_needed_unless_the_engine_surely_has_the_weights(served, initial, known, needed, tmp_path):
    assert load_needed(served, Target(7, tmp_path, tmp_path, initial), seen=known) is needed


async def test_control_errors_say_what_came(engines):
    engine = engines[0]
    async with HttpClient() as http:
        control = EngineControl(engine.url, http, 0.2)
        for fault, kind, words in (
            ("garbage", EngineProtocolError, "html"),
            (404, EngineRefused, "VLLM_SERVER_DEV_MODE"),
            (500, EngineProtocolError, "500"),
            ("hang", EngineUnavailable, "within 0.2 s"),
        ):
            engine.faults["/weight_info"] = fault
            with pytest.raises(kind, match=words):
                await control.version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_vllm_transfer_without_a_gpu_names_the_remedy():
    from learner.weights.vllm_transfer import VllmTransferLoader
    from pipeline.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="weight_transfer=files"):
        VllmTransferLoader("nccl", 10.0, lambda folder, tensors: 0)


async def test_an_engine_that_joins_is_proved_before_it_is_labelled_and_one_that_leaves_delays_nothing(
    engines, weights, tmp_path, probe, registry
):
    first, second = engines
    first.score = second.score = -1.5
    publisher, directory = publisher_of([first.url], tmp_path, weights[0], probe=probe, timeout=1000)
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(1, weights[1], np.full(4, -1.4, np.float32))
            publisher.set_engines([first.url, second.url])
            await publisher.keepers[second.url].until_served(1)
            assert (second.version, second.paused) == ("1", False)
            assert second.loaded == [str(directory.weights(1).absolute())]
            proof = second.calls.index("/inference/v1/generate")
            stamps = [i for i, path in enumerate(second.calls) if path == "/update_weight_version"]
            assert stamps[0] < second.calls.index("/collective_rpc") < proof < stamps[1], "withdrawn, loaded, proved"
            await second.stop()
            async with anyio.create_task_group() as group:
                first.faults["/collective_rpc"] = "hang"
                group.start_soon(publisher.publish, 2, weights[1])
                await until(lambda: first.calls.count("/collective_rpc") == 2)
                publisher.set_engines([])
            assert publisher.keepers == {}
            async with anyio.create_task_group() as group:
                group.start_soon(publisher.until_live, 2)
                first.faults.clear()
                publisher.set_engines([first.url])
                await anyio.lowlevel.checkpoint()
                first.released.set()
    assert first.version == "2"


async def test_an_engine_that_joins_with_other_weights_is_never_labelled(engines, weights, tmp_path, probe, registry):
    good, bad = engines
    good.score, bad.score = -1.5, -3.0
    publisher, _ = publisher_of([good.url], tmp_path, weights[0], probe=probe)
    async with running(publisher):
        with anyio.fail_after(60):
            await publisher.publish(1, weights[1], np.full(4, -1.4, np.float32))
            publisher.set_engines([good.url, bad.url])
            await until(lambda: (probes(registry, "refuted") or 0) >= 2)
            assert bad.version == "withdrawn" and publisher.live(1) == (good.url,)
            bad.score = -1.5
            await publisher.keepers[bad.url].until_served(1)
    assert bad.version == "1"
