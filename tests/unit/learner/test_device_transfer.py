"""Weights that go from the learner's device to engines, one at a time, with a double of vLLM's sender."""

import errno
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import anyio
import anyio.to_thread
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from learner.data.rows import Batch
from learner.distributed.ranks import Ranks
from learner.training.trainer import Trainer
from learner.weights import nccl_transfer, publisher, vllm_transfer, weight_pass
from learner.weights.device_weights import DeviceWeights
from learner.weights.publisher import Publisher, published_versions, write_weights
from learner.weights.vllm_transfer import VllmTransferLoader
from pipeline.config.learner import PublishConfig
from pipeline.errors import EngineRefused, EngineUnavailable
from pipeline.runtime.run_directory import RunDirectory
from tests.support.fake_engine import FakeEngine, running
from tests.support.nccl_endpoint import BroadcastEndpoint, NcclPeer, work_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("learner.weights.engine_keeper.WATCH_SECONDS", 0.05)
    monkeypatch.setattr("learner.weights.engine_keeper.RETRY_SECONDS", 0.02)


@pytest.fixture
def impatient(monkeypatch):
    """No engine holds up the others for long."""
    monkeypatch.setattr(vllm_transfer, "HOLD_SECONDS", 5.0)  # far more than a busy machine takes


class World:
    """Engines, a policy and the publisher between them."""

    def __init__(self, kit, tmp_path, engines, timeout=60.0):
        self.engines = engines
        self.peers = {engine.url: NcclPeer() for engine in engines}
        self.trainer = Trainer(kit.tiny_policy(), kit.run_config({"learning_rate": 0.1}))
        self.policy = self.trainer.policy
        self.rows = kit.make_rows(4)
        self.directory = RunDirectory(tmp_path).create()
        loader = VllmTransferLoader("nccl", timeout, self.write, device=CPU)
        self.publisher = Publisher(
            [engine.url for engine in engines], self.directory, PublishConfig(timeout_seconds=timeout, keep=2),
            partial(write_weights, self.policy.model), loader,
        )  # fmt: skip
        self.writes = 0

    def write(self, folder, tensors):
        self.writes += 1
        return write_weights(self.policy.model, folder, tensors)

    def weights(self):
        return DeviceWeights(self.policy, "bfloat16")

    def update(self):
        self.trainer.step(Batch(self.trainer.updates, (), self.rows), policy_version=self.trainer.updates)

    def peer(self, i):
        return self.peers[self.engines[i].url]

    def keeper(self, i):
        return self.publisher.keepers[self.engines[i].url]

    def files(self):
        return [path for path in self.directory.weights(0).parent.rglob("*") if path.is_file()]


@pytest.fixture
async def world(request, kit, tmp_path, monkeypatch):
    """Two engines, or as many as the test asks for (indirectly), and the time that an attempt may take."""
    n, timeout = getattr(request, "param", (2, 60.0))
    engines = [await FakeEngine().start() for _ in range(n)]
    w = World(kit, tmp_path, engines, timeout)
    monkeypatch.setattr(vllm_transfer, "_client", lambda url, *_: w.peers[url])
    monkeypatch.setattr(
        nccl_transfer, "nccl_endpoint",
        lambda client, source, urls, workers: BroadcastEndpoint(client, source, [w.peers[url] for url in urls]),
    )  # fmt: skip
    monkeypatch.setattr(weight_pass, "work_of", work_of)
    monkeypatch.setattr(weight_pass, "STALL_SECONDS", 1000)
    yield w
    for engine in engines:
        await engine.stop()


@asynccontextmanager
async def working(world):
    with anyio.fail_after(120):
        async with running(world.publisher):
            yield


@contextmanager
def passing(policy, read, n=1):
    """The sends of a pass that runs."""
    weights = weight_pass.WeightPass(policy.description("bfloat16"), read, n, 1000)
    thread = threading.Thread(target=weights.run, args=(CPU,), daemon=True)
    thread.start()
    yield weights.sends
    thread.join(30)
    assert not thread.is_alive()


def same(received, snapshot):
    return received.keys() == snapshot.keys() and all(torch.equal(received[n], t) for n, t in snapshot.items())


async def until(look):
    while not look():
        await anyio.sleep(0.005)


async def test_engines_get_what_is_trained_and_no_file_is_on_the_way(world):
    async with working(world):
        for version in (1, 2):
            weights = world.weights()
            done = await world.publisher.publish(version, weights)
            assert len(done.live) == 2 and done.n_bytes == sum(
                t.nbytes for t in world.policy.snapshot("bfloat16").values()
            )
            for peer in world.peers.values():
                assert len(peer.received) == version and same(peer.received[-1], world.policy.snapshot("bfloat16"))
            await weights.retire()
            world.update()
    assert not same(world.peer(0).received[0], world.peer(0).received[1]), "the update changed the weights"
    assert [engine.version for engine in world.engines] == ["2", "2"]
    assert [peer.joined for peer in world.peers.values()] == [1, 1], "the groups stay"
    assert world.files() == [] and world.writes == 0 and all(not engine.loaded for engine in world.engines)
    assert published_versions(world.directory) == [1, 2], "a learner that dies now takes another number"


async def test_a_disk_that_fails_for_a_moment_ends_no_publication(world, monkeypatch):
    make, refused = Path.mkdir, []

    def refuse_once(path, *args, **options):
        if path.name == "v000001" and not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *args, **options)

    def unreadable(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "mkdir", refuse_once)
    monkeypatch.setattr(publisher, "_versions", unreadable)
    async with working(world):
        assert len((await world.publisher.publish(1, world.weights())).live) == 2 and refused


def test_three_whole_weights_exist_at_most_and_one_is_made_while_another_is_sent(kit):
    policy = kit.tiny_policy()
    alive, most, made = weakref.WeakSet(), [], threading.Semaphore(0)
    read = policy.weights

    def weights():
        for name, tensor in read("bfloat16"):
            alive.add(tensor)
            most.append(len(alive))
            made.release()
            yield name, tensor
            del tensor

    total = len(policy.description("bfloat16"))
    with passing(policy, weights) as (send,):
        for i, _ in enumerate(send.pairs(CPU)):
            for _ in range(1 if i and i < total - 1 else 2 if not i else 0):
                assert made.acquire(timeout=30), "the next is made while this one is sent"
    assert i == total - 1 and max(most) <= weight_pass.AHEAD + 1 == 3, "the loop here holds one too"


async def test_an_update_waits_for_the_transfers_under_way_and_none_begins_before_the_next_version(world):
    """Else an engine would get some weights of one version and some of the next."""
    first, second = world.engines
    second.faults["/weight_info"] = 503
    async with working(world):
        weights = world.weights()
        await world.publisher.publish(1, weights)
        world.peer(1).goes_on.clear()
        world.peer(1).began.clear()
        second.faults.clear()
        await anyio.to_thread.run_sync(world.peer(1).began.wait, 30)
        before = world.policy.snapshot("bfloat16")
        async with anyio.create_task_group() as group:
            updated = []

            async def update():
                await weights.retire()
                updated.append(world.update())

            group.start_soon(update)
            await anyio.wait_all_tasks_blocked()
            assert not updated
            world.peer(1).goes_on.set()
        assert updated and same(world.peer(1).received[-1], before)
        first.version, first.paused, loads = "default", False, len(world.peer(0).received)
        await until(lambda: "next version" in world.keeper(0).state.reason)
        pauses = first.calls.count("/pause")
        calls = len(first.calls)
        await until(lambda: first.calls[calls:].count("/weight_info") >= 3)
        assert first.calls.count("/pause") == pauses, "it is not paused in vain"
        await world.publisher.publish(2, world.weights())
        await world.keeper(0).until_served(2)
    assert len(world.peer(0).received) == loads + 1
    assert same(world.peer(0).received[-1], world.policy.snapshot("bfloat16"))


@pytest.mark.parametrize("fault", ["start", "dies", "update", "finish"])
async def test_an_engine_that_fails_half_way_is_withdrawn_at_once_and_loads_in_a_new_group(world, fault):
    """At once: not after ``publish.timeout_seconds``, although a broadcast whose peer is gone never ends."""
    failing, whole = world.engines
    world.peer(0).fault = fault
    world.publisher._config = PublishConfig(timeout_seconds=1000)
    async with working(world):
        for keeper in world.publisher.keepers.values():
            keeper._timeout_seconds = 1000
        done = await world.publisher.publish(1, world.weights())
        assert done.live == (whole.url,)
        assert failing.version == "withdrawn" and failing.paused
        assert same(world.peer(1).received[-1], world.policy.snapshot("bfloat16"))
        assert world.peer(0).closed >= 1, "its communicator is aborted"
        world.peer(0).fault = ""
        await world.keeper(0).until_served(1)
    assert world.peer(0).joined > 1
    assert (failing.version, failing.paused, failing.broken) == ("1", False, [])
    assert same(world.peer(0).received[-1], world.policy.snapshot("bfloat16"))


async def test_an_engine_that_hangs_delays_one_publication_and_no_update_for_ever(monkeypatch, impatient, world):
    monkeypatch.setattr(weight_pass, "STALL_SECONDS", 0.5)
    hung, whole = world.engines
    world.peer(0).fault = "hangs"
    async with working(world):
        weights = world.weights()
        done = await world.publisher.publish(1, weights)
        assert done.live == (whole.url,) and hung.version == "withdrawn" and hung.paused
        await weights.retire()
        await until(lambda: world.peer(0).closed >= 1)


def test_a_sender_that_takes_no_weight_is_given_up_and_the_ranks_are_free(kit, monkeypatch):
    monkeypatch.setattr(weight_pass, "STALL_SECONDS", 0.05)
    policy, read = kit.tiny_policy(), []
    ended = threading.Event()

    def weights():
        try:
            for pair in policy.weights("bfloat16"):
                read.append(pair[0])
                yield pair
        finally:
            ended.set()

    with passing(policy, weights) as (send,):
        pairs = send.pairs(CPU)
        next(pairs)
        assert ended.wait(30) and len(read) == weight_pass.AHEAD
        with pytest.raises(EngineUnavailable, match="taken no weight"):
            list(pairs)


async def test_an_engine_that_cannot_join_gets_a_folder_that_is_written_for_it_alone(world):
    stranger, joined = world.engines
    world.peer(0).fault = "refuses"
    async with working(world):
        for version in (1, 2):
            weights = world.weights()
            assert len((await world.publisher.publish(version, weights)).live) == 2
            snapshot = world.policy.snapshot("bfloat16")
            folder = world.directory.weights(version)
            assert stranger.loaded[-1] == str(folder.absolute()) and world.writes == version
            assert same(load_file(folder / "model.safetensors"), snapshot)
            assert same(world.peer(1).received[-1], snapshot) and joined.loaded == []
            await weights.retire()
            world.update()
        stranger.version = joined.version = "default"  # both start again while the learner trains
        for i in (0, 1):
            world.keeper(i).look_soon()
        await until(lambda: stranger.loaded.count(str(folder.absolute())) == 2)
        await until(lambda: joined.loaded == [str(folder.absolute())])
    assert world.writes == 2 and len(world.peer(1).received) == 2


async def test_an_engine_at_an_address_of_ipv6_gets_folders(world, monkeypatch):
    """vLLM 0.32 binds the place at which a group meets by IPv4."""
    first = world.engines[0]
    endpoint = nccl_transfer.nccl_endpoint

    def addressed(client, source, urls, workers):
        for url in urls:
            nccl_transfer.address_towards("http://[::1]:8100" if url == first.url else url)
        return endpoint(client, source, urls, workers)

    monkeypatch.setattr(nccl_transfer, "nccl_endpoint", addressed)
    async with working(world):
        assert len((await world.publisher.publish(1, world.weights())).live) == 2
    assert len(first.loaded) == 1 and not world.engines[1].loaded and len(world.peer(1).received) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_for_an_engine_on_the_same_gpu_are_given_back_before_it_wakes_its_cache(monkeypatch, rank):
    """On every rank. What torch keeps for later is memory that the engine's cache lacks."""
    events, ranks = [], Ranks()
    ranks.rank, ranks.summed = rank, lambda values: events.append("all") or values

    def endpoint(client, source, rank):
        return SimpleNamespace(send_weights=lambda: events.append([name for name, _ in source]))

    monkeypatch.setattr(vllm_transfer, "ipc_endpoint", endpoint)
    monkeypatch.setattr(vllm_transfer, "free_cached", lambda device: events.append(device))
    if rank:
        vllm_transfer.follow(ranks, CPU, [("w", "bfloat16", [2])])
    else:
        vllm_transfer.IpcGroup(None, ranks, CPU).send({"w": torch.zeros(2)}, threading.Event())
    assert events == [["w"], CPU, "all"]


async def test_an_engine_without_the_route_is_not_asked_to_join(world):
    world.engines[0].faults["/get_world_size"] = 404
    async with working(world):
        assert len((await world.publisher.publish(1, world.weights())).live) == 2
    assert world.peer(0).joined == 0 and len(world.engines[0].loaded) == 1


async def test_weights_that_have_changed_are_not_written_under_the_old_version(world, tmp_path):
    weights = world.weights()
    await weights.retire()
    with pytest.raises(EngineRefused, match="next version"):
        await weights.write(tmp_path / "v000001", 1, world.write)
    assert world.writes == 0


async def test_an_engine_that_joins_late_gets_the_newest_version_without_a_folder(world):
    first, late = world.engines
    world.publisher._addresses = (first.url,)
    async with working(world):
        await world.publisher.publish(1, world.weights())
        world.publisher.set_engines([first.url, late.url])
        await world.keeper(1).until_served(1)
    assert same(world.peer(1).received[-1], world.policy.snapshot("bfloat16")) and world.files() == []


async def test_copies_in_host_memory_go_the_same_way(world):
    """As with ``checkpoint.at_end: false``, where each version is a folder too."""
    world.publisher._write = world.write
    snapshot = world.policy.snapshot("bfloat16")
    async with working(world):
        assert len((await world.publisher.publish(1, snapshot)).live) == 2
    assert all(same(peer.received[-1], snapshot) for peer in world.peers.values()) and world.writes == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_description_and_weights_agree(kit, rank):
    policy = kit.tiny_policy(lora={"rank": rank})
    pairs = {name: tensor.clone() for name, tensor in policy.weights("bfloat16")}
    assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs.items()] == policy.description("bfloat16")
    assert same(pairs, policy.snapshot("bfloat16"))


class PostingClient:
    """The part of vLLM's client that our own calls."""

    def __init__(self, base_url, timeout):
        self.base_url, self.timeout = base_url.rstrip("/"), timeout

    def start_weight_update(self):
        self._post("start_weight_update")


async def test_transfers_show_the_key_to_the_engine_and_to_no_proxy(monkeypatch, tmp_path):
    names = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.clients"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].HTTPVLLMWeightSyncClient = PostingClient
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else")
    for name, value in {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NETRC": str(tmp_path / "netrc")}.items():
        monkeypatch.setenv(name, value)
    came = []

    async def note(request):
        came.append((request.path, request.headers["Authorization"]))
        return web.Response()

    app = web.Application()
    app.router.add_post("/start_weight_update", note)
    async with TestServer(app) as server:
        client = vllm_transfer._client(str(server.make_url("")), 10, "secret")
        await anyio.to_thread.run_sync(client.start_weight_update)
    assert came == [("/start_weight_update", "Bearer secret")]


@pytest.mark.slow  # vLLM takes seconds to import
def test_vllm_s_own_sender_takes_a_group_for_source_and_client(kit, monkeypatch):
    """The class of vLLM 0.32; a double only for its communicator."""
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    policy, peer, other, infos = kit.tiny_policy(), NcclPeer(), NcclPeer(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(weight_pass, "work_of", work_of)
    members = [nccl_transfer.Member(f"http://127.0.0.1:{port}", 2, peer) for port, peer in ((8, other), (9, peer))]
    both = SimpleNamespace(
        broadcast=lambda *args, **more: [p.broadcast(*args, **more) for p in (peer, other)],
        destroy=lambda: [p.destroy() for p in (peer, other)],
    )
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: infos.append(info) or both)
    group = nccl_transfer.NcclGroup(members, CPU, failed=lambda url, error: None)
    assert (infos[0].world_size, infos[0].packed, infos[0].is_sender) == (5, False, True)
    assert [p.places for p in (other, peer)] == [[(1, 5)], [(3, 5)]], "each engine has a place of its own"
    read = partial(policy.weights, "bfloat16")
    for _ in range(2):
        with passing(policy, read) as (send,):
            group.send(send)
        assert all(same(p.received[-1], policy.snapshot("bfloat16")) for p in (peer, other))
    peer.fault = "dies"
    with passing(policy, read) as (send,), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(group.send, send)
        assert isinstance(sending.exception(30), ConnectionError)
    assert (peer.closed, group.culprit) == (1, members[1].url) and len(peer.received) == 2
