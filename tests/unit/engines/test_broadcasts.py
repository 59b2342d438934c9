"""A worker that waits for weights: it takes all, or gives up where none comes, and never waits without end."""

import threading
from types import SimpleNamespace

import pytest

from actors.servers.broadcasts import WatchedBroadcasts


class Group:
    """A communicator."""

    def __init__(self):
        self.begun, self.destroyed = 0, threading.Event()

    def broadcast(self, tensor, src, stream):
        self.begun += 1

    def destroy(self):
        self.destroyed.set()


class Work:
    """A device that has done a broadcast when ``done`` is set, or the group is aborted."""

    def __init__(self, group):
        self.group, self.done = group, threading.Event()

    def query(self):
        return self.done.is_set() or self.group.destroyed.is_set()

    def synchronize(self):
        while not self.query():
            self.done.wait(0.01)


@pytest.fixture
def group():
    return Group()


@pytest.fixture
def stream(group):
    works = []
    return SimpleNamespace(works=works, record_event=lambda: works.append(Work(group)) or works[-1])


def nothing():
    pass


def test_the_device_is_chosen_in_the_thread_that_watches(group):
    """CUDA has a current device for each thread, GPU 0 at first, and takes memory there at its first call."""
    threads = []
    with WatchedBroadcasts(group, lambda: threads.append(threading.get_ident()), 30, 0.001):
        pass
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_weights_that_come_one_after_another_are_all_taken(group, stream):
    with WatchedBroadcasts(group, nothing, stall_seconds=30, look_seconds=0.001) as watched:
        for _ in range(20):
            watched.broadcast(None, src=0, stream=stream)
            stream.works[-1].done.set()
    assert group.begun == 20 and not group.destroyed.is_set()


def test_a_worker_whose_peer_is_gone_aborts_and_says_so(group, stream):
    with (
        pytest.raises(RuntimeError, match="is gone"),
        WatchedBroadcasts(group, nothing, stall_seconds=0.05, look_seconds=0.001) as watched,
    ):
        watched.broadcast(None, src=0, stream=stream)
        stream.works[0].done.set()
        watched.broadcast(None, src=0, stream=stream)
    assert group.destroyed.is_set()


def test_an_error_of_the_load_ends_the_watch_and_stays_the_error(group, stream):
    with pytest.raises(ValueError, match="shape"), WatchedBroadcasts(group, nothing, 30, 0.001) as watched:
        watched.broadcast(None, src=0, stream=stream)
        raise ValueError("shape")
    assert not group.destroyed.is_set()


@pytest.mark.slow  # vLLM takes seconds to import
def test_vllm_s_own_worker_gives_up_where_no_weight_comes(group, stream, monkeypatch):
    """The class of vLLM 0.32; a double only for its communicator and stream."""
    torch = pytest.importorskip("torch")
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    vllm_worker = pytest.importorskip("actors.servers.vllm_worker")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    quick = lambda group, device: WatchedBroadcasts(group, device, stall_seconds=0.05, look_seconds=0.001)  # noqa: E731
    monkeypatch.setattr(vllm_worker, "WatchedBroadcasts", quick)
    devices = []
    monkeypatch.setattr(type(vllm_worker.current_platform), "set_device", devices.append)
    engine = object.__new__(nccl_engine.NCCLWeightTransferEngine)
    loaded = []
    engine.packed, engine.model_update_group, engine.device = False, group, torch.device("cpu")
    engine.model = SimpleNamespace(load_weights=loaded.extend)
    info = nccl_engine.NCCLWeightTransferUpdateInfo(["a", "b"], ["float32"] * 2, [[2], [2]])
    with pytest.raises(RuntimeError, match="is gone"):
        engine.receive_weights(info)
    assert [name for name, _ in loaded] == ["a", "b"] and group.begun == 2 and engine.model_update_group is group
    assert devices == [engine.device], "in the thread that watches"


@pytest.mark.slow
def test_vllm_s_own_worker_leaves_its_group_before_it_joins_another(monkeypatch):
    """The class of vLLM 0.32, which forgets a communicator without freeing its memory."""
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    pytest.importorskip("actors.servers.vllm_worker")
    groups, engine = [], object.__new__(nccl_engine.NCCLWeightTransferEngine)
    engine.model_update_group = engine.parallel_config = None

    def join(info, parallel_config):
        assert all(group.destroyed.is_set() for group in groups)
        groups.append(Group())
        return groups[-1]

    monkeypatch.setattr(nccl_engine, "worker_init_process_group", join)
    info = nccl_engine.NCCLWeightTransferInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2
    )
    for _ in range(2):
        engine.init_transfer_engine(info)
    assert engine.model_update_group is groups[1] and not groups[1].destroyed.is_set()
