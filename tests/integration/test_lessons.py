"""Lessons in a whole run of real processes: written from groups, found, put into prompts, trained, accounted for."""

from __future__ import annotations

import re
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from actors.rollout import memory_prompt
from pipeline.config.replay import LessonsConfig
from pipeline.transport.codec import decode_trajectory
from tests.support.run_handle import RunHandle, start_run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SECONDS_MAX = 240
LESSONS = ["lessons.enabled=true", "lessons.template='{lessons} {prompt}'", "lessons.top_k=1"]


def value(run: RunHandle, role: str, name: str, label: str = "") -> float:
    """Sum of a metric's series that have ``label``; 0 where the process does not answer."""
    port = run.metrics_port(role)
    if port is None:
        return 0.0
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return 0.0
    rows = re.findall(rf"^afterplay_{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return sum(float(number) for labels, number in rows if label in labels)


def trajectories(run: RunHandle):
    with closing(sqlite3.connect(f"file:{run.directory.store_file}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT header, token_ids, logprobs, spans FROM payloads").fetchall()
    return [decode_trajectory(row) for row in rows]


@pytest.mark.parametrize("train_mode", ["keep", "discard"])
def test_lessons_are_written_found_put_into_prompts_and_the_accounts_add_up(tmp_path: Path, train_mode: str) -> None:
    overrides = [*LESSONS, f"lessons.train_mode={train_mode}", "run.total_steps=1000", "checkpoint.every=1000"]
    with start_run(TINY, tmp_path, "lessons", overrides) as run:
        run.until(
            "guided episodes",
            lambda: value(run, "actor-0", "actor_guided_episodes_total", train_mode) >= 64,
            SECONDS_MAX,
        )
        step = len(run.steps())
        run.until_step(step + 4, SECONDS_MAX)
        assert value(run, "replay", "replay_lessons_written_total") >= 1
        assert value(run, "replay", "replay_lesson_searches_total", "found") >= 64
        assert value(run, "actor-0", "actor_lesson_searches_total", "timeout") == 0
        assert value(run, "actor-0", "actor_guidance_reward_count", 'guided="yes"') >= 64
        assert value(run, "actor-0", "actor_guidance_reward_count", 'guided="no"') >= 64
        run.interrupt()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == []
        with closing(sqlite3.connect(run.directory.lessons_file)) as memory:
            written = {str(number): text for number, text in memory.execute("SELECT id, lesson FROM lessons")}
        assert all(text.startswith("Worked: ") for text in written.values())
        guided = [t for t in trajectories(run) if t.guidance is not None]
        assert len(guided) >= 32
        for trajectory in guided:
            guidance = trajectory.guidance
            assert guidance is not None and guidance.query == "guess"
            (lesson,) = guidance.lessons
            shown = " ".join(re.sub(r"<\|\w+\|>", " ", written[lesson]).split())
            assert trajectory.turns[0].context_messages[0].content == f"{shown} guess"
            slot = int(trajectory.trajectory_id.split(".")[1])
            assert memory_prompt.gets_lessons(LessonsConfig(enabled=True), trajectory.group_id, slot)
            assert guidance.keep == (train_mode == "keep")
            if not guidance.keep:
                assert set(guidance.plain_contexts) == {0}
                assert len(guidance.plain_contexts[0]) < len(trajectory.turns[0].context)


def test_a_hybrid_run_fills_its_memory_and_ends_with_its_accounts_in_order(tmp_path: Path) -> None:
    overrides = [*LESSONS, "lessons.train_mode=hybrid", "run.total_steps=8", "checkpoint.every=1000"]
    with start_run(TINY, tmp_path, "hybrid", overrides) as run:
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == [] and ledger.updates == 8
        with closing(sqlite3.connect(run.directory.lessons_file)) as memory:
            assert memory.execute("SELECT count(*) FROM lessons").fetchone()[0] >= 1


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


def test_an_external_service_is_told_of_groups_and_asked_for_lessons(tmp_path: Path) -> None:
    with lesson_service() as (url, told):
        source = ["lessons.source=actors.rollout.reme:RemeSource", f"lessons.source_options.url={url}"]
        overrides = [*LESSONS, *source, "run.total_steps=1000"]
        with start_run(TINY, tmp_path, "reme", overrides) as run:
            run.until(
                "guided episodes", lambda: value(run, "actor-0", "actor_guided_episodes_total") >= 64, SECONDS_MAX
            )
            run.interrupt()
            assert run.ledger(rows=True).audit() == []
            assert not run.directory.lessons_file.exists()
    assert {body["workspace_id"] for body in told} == {"afterplay"}
    for body in told:
        assert all(t["messages"][0] == {"role": "user", "content": "guess"} for t in body["trajectories"])
