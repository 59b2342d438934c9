"""Lessons in a whole run of real processes: written from groups, found, put into prompts, trained, accounted for; and
every dashboard over that run."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from actors.rollout import lessons as memory_prompt
from grafana.dashboard_lint import EVALUATED_ONLY, EXPERTS_ONLY, TOOLS_ONLY, VLLM_ONLY
from grafana.prometheus_process import Api, PrometheusProcess
from grafana.prove import EVERY_DASHBOARD, load, prove_within
from grafana.targets import targets_of_run
from pipeline.config.lessons import LessonsConfig
from pipeline.schema import Trajectory
from pipeline.schema.codec import decode_trajectory
from tests.support.repeated import repeated
from tests.support.run_handle import RunHandle

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
SECONDS_MAX = 240
LESSONS = ["lessons.enabled=true", "lessons.template='{lessons} {prompt}'", "lessons.top_k=4"]
HYBRID = [
    *LESSONS, "lessons.keep_ratio=0.5", "replay.enabled=true", "replay.mode=mix", "replay.start_ratio=0",
    "replay.ess_guard.enabled=true", "checkpoint.every=5",
]  # fmt: skip
"""Some rollouts with lessons are trained on the prompt with them, some on the prompt without."""


def guided_of_both_kinds(run: RunHandle, least: int) -> list[Trajectory] | None:
    """The rollouts with lessons in the store; None while fewer than ``least`` of them are trained in either way."""
    with closing(sqlite3.connect(f"file:{run.directory.store_file}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT header, token_ids, logprobs, spans FROM payloads").fetchall()
    found = [t for t in map(decode_trajectory, rows) if t.lessons is not None]
    kept = sum(t.lessons.keep for t in found)
    return found if min(kept, len(found) - kept) >= least else None


@pytest.fixture(scope="module")
def live(forked_run: partial, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    """A run that replays and has played with lessons of both kinds. The last test that uses it stops it."""
    overrides = [*HYBRID, "run.total_steps=100000"]
    with forked_run(TINY, tmp_path_factory.mktemp("lessons"), "lessons", overrides) as run:
        for mode in ("keep", "discard"):
            run.until(
                f"with lessons to {mode}",
                lambda mode=mode: run.metric("actor-0", "actor_lessons_episodes_total", mode) >= 64,
                SECONDS_MAX,
            )
        run.until_step(len(run.steps()) + 4, SECONDS_MAX)
        yield run


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus binary on PATH")
def test_every_query_of_the_dashboards_returns_data_from_a_run_that_replays_and_learns_from_lessons(
    live: RunHandle,
) -> None:
    targets = targets_of_run(live.directory.path)
    assert {t.job for t in targets} == {f"afterplay-{role}" for role in ("replay", "learner", "actor", "engine")}
    assert sum(t.job == "afterplay-replay" for t in targets) == 1
    with PrometheusProcess(targets, rules=ROOT / "grafana" / "prometheus" / "alerts.yml") as prometheus:
        api = Api(prometheus.url)
        for uid in EVERY_DASHBOARD:
            exempt = VLLM_ONLY | TOOLS_ONLY | EVALUATED_ONLY | EXPERTS_ONLY
            assert prove_within(load(uid), api, 90, exempt, pause_seconds=0.3) == [], uid


def test_lessons_are_written_found_put_into_prompts_and_the_accounts_add_up(live: RunHandle) -> None:
    assert live.metric("replay", "replay_lessons_written_total") >= 1
    assert live.metric("replay", "replay_lesson_searches_total", "found") >= 64
    assert live.metric("actor-0", "actor_lesson_searches_total", "timeout") == 0
    assert live.metric("actor-0", "actor_lessons_reward_count", 'lessons="yes"') >= 64
    assert live.metric("actor-0", "actor_lessons_reward_count", 'lessons="no"') >= 64
    with_lessons = live.until("32 stored rollouts of each kind", lambda: guided_of_both_kinds(live, 32), SECONDS_MAX)
    assert live.interrupt() < 15
    assert live.ledger(rows=True).audit() == []
    with closing(sqlite3.connect(live.directory.lessons_file)) as memory:
        written = {str(number): text for number, text in memory.execute("SELECT id, lesson FROM lessons")}
    assert written and all(text.startswith("Worked: ") for text in written.values())
    config = LessonsConfig(enabled=True, keep_ratio=0.5)
    for trajectory in with_lessons:
        lessons = trajectory.lessons
        assert lessons.query == "guess"
        (lesson,) = lessons.ids
        shown = " ".join(written[lesson].split())
        assert trajectory.turns[0].context_messages[0].content == f"{shown} guess"
        slot = int(trajectory.trajectory_id.split(".")[1])
        assert memory_prompt.gets_lessons(config, trajectory.group_id, slot)
        assert lessons.keep == memory_prompt.trains_with_lessons(config, trajectory.group_id, slot)
        if not lessons.keep:
            assert set(lessons.plain_contexts) == {0}
            assert len(lessons.plain_contexts[0]) < len(trajectory.turns[0].context)


def test_a_run_with_lessons_resumes_and_ends_with_its_accounts_in_order(live: RunHandle, forked_run: partial) -> None:
    if live.process.poll() is None:
        live.interrupt()
    steps = len(live.steps()) + 4
    overrides = [*HYBRID, f"run.total_steps={steps}", "checkpoint.keep=1000"]  # that of the stop stays
    with forked_run(TINY, live.directory.path.parent, live.directory.path.name, overrides) as run:
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == [] and ledger.updates == steps
    again = repeated(run.directory.path)
    assert {steps - 3, steps} <= {*again} and not any(again.values()), "made with lessons, before the stop and after it"


@contextmanager
def lesson_service() -> Iterator[tuple[str, list[dict]]]:
    """A small ReMe: one memory for each success it is told of."""
    told: list[dict] = []
    memories: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/summary_task_memory":
                told.append(body)
                made = [
                    {"memory_id": f"m{len(told)}-{n}", "content": f"say {t['messages'][-1]['content']}"}
                    for n, t in enumerate(body["trajectories"])
                    if t["score"] >= 1
                ]
                memories.extend(made)
            else:
                assert self.path == "/retrieve_task_memory" and body["query"] == "guess"
                made = memories[-body["top_k"] :]
            answer = orjson.dumps({"answer": "", "success": True, "metadata": {"memory_list": made}})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_external_service_is_told_of_groups_and_asked_for_lessons(tmp_path: Path, forked_run: partial) -> None:
    with lesson_service() as (url, told):
        source = ["lessons.source=actors.adapters.reme:RemeSource", f"lessons.source_options.url={url}"]
        overrides = [*LESSONS, *source, "run.total_steps=1000"]
        with forked_run(TINY, tmp_path, "reme", overrides) as run:
            run.until(
                "with lessons",
                lambda: run.metric("actor-0", "actor_lessons_episodes_total") >= 64,
                SECONDS_MAX,
            )
            run.interrupt()
            assert run.ledger(rows=True).audit() == []
            assert not run.directory.lessons_file.exists()
    assert {body["workspace_id"] for body in told} == {"afterplay"}
    for body in told:
        assert all(t["messages"][0] == {"role": "user", "content": "guess"} for t in body["trajectories"])
