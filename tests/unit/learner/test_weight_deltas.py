"""Weight deltas: what an engine serves after them is bit for bit what it serves after whole loads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.servers.deltas import patch, read_base
from learner.weights.delta_loader import DeltaLoader, bits_of
from learner.weights.engine_keeper import Target
from learner.weights.publisher import CheckedLoader, FolderLoader, published_versions
from pipeline.config import RunConfig
from pipeline.errors import DeltaMismatch, EngineRefused
from pipeline.runtime.folders import find_damage
from pipeline.runtime.run_directory import RunDirectory
from pipeline.runtime.weights import UNSTAMPED, WITHDRAWN, Weight, apply_deltas, read_delta, write_delta, write_stamp
from pipeline.supervisor.history import remove_published
from tests.support.damage import DAMAGES

SHAPES = {"a.weight": (40, 30), "b.weight": (7,), "c.scale": (), "d.empty": (0, 3)}


def random_weights(seed: int, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def stepped(tensors, seed: int, share: float):
    """A copy in which about ``share`` of the elements have other bits, of any distance."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.reshape(-1).view(torch.uint16).numpy().copy()
        change = rng.integers(0, 1 << 16, bits.shape, dtype=np.uint16) >> rng.integers(0, 16, dtype=np.uint16)
        bits += np.where(rng.random(bits.shape) < share, change, np.uint16(0)).astype(np.uint16)
        found[name] = torch.from_numpy(bits).view(tensor.dtype).reshape(tensor.shape)
    return found


def same(one, other) -> bool:
    """Bit for bit: -0.0 is not 0.0, and NaN is itself."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].reshape(-1).view(torch.uint16), other[name].reshape(-1).view(torch.uint16))
        for name in one
    )


def arrays(dtype):
    return st.lists(st.integers(0, np.iinfo(dtype).max), min_size=1, max_size=600).map(lambda v: np.array(v, dtype))


@given(data=st.data(), dtype=st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
@settings(max_examples=60, deadline=None)
def test_any_two_bit_patterns_are_connected_by_a_delta(data, dtype):
    new = data.draw(arrays(dtype))
    keep = data.draw(st.integers(0, 1 << 30).map(lambda s: np.random.default_rng(s).random(len(new)) < 0.9))
    old = np.where(keep, new, data.draw(st.integers(0, np.iinfo(dtype).max).map(dtype)))
    weights = [{"w": Weight(bits, "any", bits.shape)} for bits in (old, new)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delta"
        size = write_delta(path, 1, 2, *weights)
        assert (size.elements, size.changed) == (len(new), int((old != new).sum()))
        assert size.n_bytes == path.stat().st_size
        found = {"w": old.copy()}
        apply_deltas(found, [read_delta(path)])
        assert np.array_equal(found["w"], new)
        if size.changed:  # the weights before it are others now
            with pytest.raises(DeltaMismatch, match="digest"):
                apply_deltas(found, [read_delta(path)])
            assert np.array_equal(found["w"], new)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_delta_changes_nothing(tmp_path, damage):
    old = random_weights(0)
    path = tmp_path / "delta"
    write_delta(path, 1, 2, bits_of(old), bits_of(stepped(old, 1, 0.3)))
    DAMAGES[damage](path)
    held = {name: tensor.clone() for name, tensor in old.items()}
    with pytest.raises(DeltaMismatch):
        patch(held, [path])
    assert same(held, old)


def test_no_flipped_bit_of_a_delta_goes_unnoticed(tmp_path):
    old = random_weights(0)
    new = stepped(old, 1, 0.05)
    path = tmp_path / "delta"
    write_delta(path, 1, 2, bits_of(old), bits_of(new))
    data = path.read_bytes()
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        held = {name: tensor.clone() for name, tensor in old.items()}
        try:
            patch(held, [path])
        except DeltaMismatch:
            assert same(held, old), at
        else:
            assert same(held, new), at


def test_weights_in_another_type_are_patched_through_the_published_one(tmp_path):
    """A float32 engine holds every bfloat16 exactly."""
    old = random_weights(0)
    new = stepped(old, 1, 0.02)
    new = {name: torch.where(tensor.isfinite(), tensor, old[name]) for name, tensor in new.items()}
    write_delta(tmp_path / "delta", 1, 2, bits_of(old), bits_of(new))
    held = {name: tensor.float() for name, tensor in old.items()} | {"other": torch.ones(3)}
    patch(held, [tmp_path / "delta"])
    assert all(torch.equal(held[name], new[name].float()) for name in new)
    save_file({name: tensor.float() for name, tensor in old.items()}, tmp_path / "model.safetensors")
    base = read_base(tmp_path, tmp_path / "delta")
    assert same(base, old)


def test_versions_of_other_shapes_have_no_delta(tmp_path):
    old = random_weights(0)
    with pytest.raises(DeltaMismatch, match="differ in the names"):
        write_delta(tmp_path / "delta", 1, 2, bits_of(old), bits_of({**old, "b.weight": torch.zeros(8)}))


class FakeEngine:
    """Engine in memory that applies deltas as the real ones do. ``url`` and methods as ``EngineControl``."""

    def __init__(self, url: str, initial):
        self.url = url
        self.initial = initial
        self.read = {"whole": 0, "delta": 0}
        self.restart()

    def restart(self):
        self.stamp = UNSTAMPED
        self.tensors = {name: tensor.clone() for name, tensor in self.initial.items()}

    async def version(self):
        return self.stamp

    async def reload(self, folder: Path):
        assert find_damage(folder) == "", "an engine may not read damaged weights"
        self.tensors = load_file(folder / "model.safetensors")
        self.read["whole"] += 1

    async def load_deltas(self, files):
        try:
            patch(self.tensors, files)
        except DeltaMismatch as error:
            raise EngineRefused(str(error)) from error
        self.read["delta"] += len(files)


class History:
    """A learner that publishes, and engines that follow when they are there."""

    def __init__(self, folder: Path, engines: int):
        self.directory = RunDirectory(folder).create()
        self.tensors = random_weights(0)
        self.version = 0
        self.engines = [FakeEngine(f"http://{i}", self.tensors) for i in range(engines)]
        self.start_learner()

    def start_learner(self):
        def write(folder, tensors):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), folder / "model.safetensors")
            return sum(t.nbytes for t in tensors.values())

        initial = CheckedLoader(FolderLoader(), write)
        self.loader = DeltaLoader(self.directory.weights, write, initial)

    def publish(self, seed: int, share: float):
        self.tensors = stepped(self.tensors, seed, share)
        self.version += 1
        self.bytes = self.loader.write(self.directory.weights(self.version), self.tensors)

    def target(self):
        folder = self.directory.weights(self.version)
        return Target(self.version, folder, folder, tensors=self.tensors, run="r")

    def load(self, engine):
        """As a keeper does."""
        if engine.stamp == UNSTAMPED:
            engine.stamp = WITHDRAWN
        anyio.run(self.loader.load, engine, self.target())
        engine.stamp = write_stamp("r", self.version)
        assert same(engine.tensors, self.tensors)


EVENTS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1 << 20), st.sampled_from([0.0, 0.01, 0.05, 0.9]),
              st.sets(st.integers(0, 2))),
    st.tuples(st.just("restart engine"), st.integers(0, 2)),
    st.tuples(st.just("restart learner")),
    st.tuples(st.just("damage"), st.sampled_from(sorted(DAMAGES)), st.integers(0, 5)),
    st.tuples(st.just("other weights"), st.integers(0, 2)),
)  # fmt: skip


@given(events=st.lists(EVENTS, min_size=1, max_size=14), every=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_every_history_ends_with_the_weights_of_whole_loads(events, every):
    with tempfile.TemporaryDirectory() as folder, mock.patch("learner.weights.delta_loader.WHOLE_EVERY", every):
        history = History(Path(folder), 3)
        for event in events:
            match event:
                case ("publish", seed, share, present):
                    history.publish(seed, share)
                    for i in sorted(present):
                        history.load(history.engines[i])
                case ("restart engine", i):
                    history.engines[i].restart()
                case ("restart learner",):
                    history.start_learner()
                case ("damage", how, i):
                    files = sorted((history.directory.path / "weights").rglob("*.safetensors"))
                    if files:
                        DAMAGES[how](files[i % len(files)])
                case ("other weights", i):  # under the stamp of its version
                    history.engines[i].tensors = random_weights(99)
        history.publish(1, 0.01)
        for engine in history.engines:
            history.load(engine)
        deltas = list((history.directory.path / "weights").glob("delta-*"))
        assert len(deltas) <= 2 * every


def test_an_engine_that_follows_reads_one_delta_for_each_version(tmp_path):
    history = History(tmp_path, 1)
    engine = history.engines[0]
    for seed in range(5):
        history.publish(seed, 0.01)
        history.load(engine)
    assert engine.read == {"whole": 1, "delta": 4}
    assert published_versions(history.directory) == [1, 2, 3, 4, 5]
    assert not history.directory.weights(5).exists()


def test_an_engine_that_missed_versions_reads_their_deltas_and_one_that_starts_the_newest_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("learner.weights.delta_loader.WHOLE_EVERY", 4)
    history = History(tmp_path, 2)
    late, fresh = history.engines
    for seed in range(8):
        history.publish(seed, 0.01)
        if not seed:
            history.load(late)
    history.load(late)
    history.load(fresh)
    assert late.read == {"whole": 1, "delta": 7}
    assert fresh.read == {"whole": 1, "delta": 3}


def test_a_refused_delta_is_told_once_and_the_version_is_loaded_whole(tmp_path, caplog):
    history = History(tmp_path, 1)
    engine = history.engines[0]
    history.publish(0, 0.01)
    history.load(engine)
    for seed in (1, 2):
        history.publish(seed, 0.01)
        engine.tensors = random_weights(99)
        history.load(engine)
    told = [record.message for record in caplog.records if "gets version" in record.message]
    assert len(told) == 1
    assert "not those of this version" in told[0]
    assert engine.read == {"whole": 3, "delta": 0}


def test_a_delta_that_saves_too_little_is_not_written(tmp_path, caplog):
    history = History(tmp_path, 1)
    history.publish(0, 0.01)
    history.publish(1, 0.95)
    assert history.directory.weights(2).is_dir()
    assert "published whole" in caplog.text
    assert list((tmp_path / "weights").glob("delta-*")) == []
    history.publish(2, 0.01)
    assert history.loader.path(3).exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"kind": "external", "urls": ["http://a:1"]}}, "external engines"),
        ({"publish": {"dtype": "float32"}}, "publish.dtype: bfloat16"),
        ({"learner": {"compute_dtype": "float32"}}, "learner.compute_dtype: bfloat16"),
        ({"engine": {"dtype": "float16"}}, "cannot hold"),
        ({"checkpoint": {"at_end": False}}, "checkpoint.at_end: true"),
        ({"learner": {"lora": {"rank": 2}}, "publish": {"lora": "adapter"}}, "weight_transfer to files"),
        ({"engine": {"kind": "embedded", "colocate": "sleep", "sleep_level": 2}}, "sleep_level: 1"),
    ],
)
def test_what_deltas_cannot_serve_is_refused_with_the_remedy(sections, words):
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({**sections, "engine": {**sections.get("engine", {}), "weight_transfer": "delta"}})


def test_a_finished_run_leaves_no_delta(tmp_path):
    history = History(tmp_path, 1)
    for seed in range(3):
        history.publish(seed, 0.01)
    assert remove_published(RunConfig(), history.directory) == []
    assert list((tmp_path / "weights").iterdir()) == [history.directory.weights(1)]
