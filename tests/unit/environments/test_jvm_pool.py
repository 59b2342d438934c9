"""A Java process that hangs takes nobody with it: neither the threads that wait for it, nor the games after it."""

import gc
import signal
import threading
import time

import psutil
import pytest

from actors.environments import Reply


@pytest.mark.slow
def test_a_java_process_that_hangs_is_ended_and_replaced(kit, monkeypatch):
    environment = kit.build("textworld_express", game="coin")
    try:
        episode = environment.start(kit.task(1))
        java = environment._pool._processes[0].main._gateway.java_process
        java.send_signal(signal.SIGSTOP)
        while psutil.Process(java.pid).status() != psutil.STATUS_STOPPED:  # else it may still answer the step
            time.sleep(0.001)
        collecting = threading.Thread(target=gc.collect, daemon=True)
        collecting.start()
        collecting.join(20)
        assert not collecting.is_alive(), "Python's garbage collector waits for Java"
        failures = []

        def step():
            try:
                episode.step(Reply("look around"))
            except Exception as error:
                failures.append(repr(error))

        hanging = threading.Thread(target=step, daemon=True)
        hanging.start()
        while not episode._process._lock.locked():
            hanging.join(0.01)
        with monkeypatch.context() as patch:
            patch.setattr("actors.adapters.jvm_pool.CALL_SECONDS_MAX", 0.05)
            with pytest.raises(TimeoutError, match="did not answer"):
                environment.start(kit.task(2))
        hanging.join(60)
        assert failures and java.wait(10) is not None
        episode.close()
        environment.start(kit.task(2)).close()
        assert [process.games for process in environment._pool._processes] == [0]
    finally:
        environment.close()


@pytest.mark.slow
def test_a_closed_game_leaves_nothing_in_java_for_the_garbage_collector(kit):
    """py4j tells Java what Python's collector found, and waits for the answer on whatever thread the collector ran."""
    environment = kit.build("textworld_express", game="coin")
    from py4j.finalizer import ThreadSafeFinalizer

    try:
        environment.start(kit.task(1)).close()
        gc.collect()
        gc.disable()
        before = set(ThreadSafeFinalizer.finalizers)
        for seed in range(5):
            environment.expert(kit.task(seed))
            kit.play(environment, seed, ["look around"])
        assert set(ThreadSafeFinalizer.finalizers) == before
    finally:
        environment.close()
