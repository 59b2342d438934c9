"""Metrics of an actor: episodes, engines, tools and sends."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.runtime.metrics import (
    LAG,
    LAT,
    LONG,
    REW,
    TOK,
    CollectorRegistry,
    MetricSet,
    counter,
    gauge,
    histogram,
    latest,
)

ENGINE_REQUESTS = ("running", "waiting")
TOOL_OUTCOMES = (
    "ok",
    "refused",
    "unreadable",
    "unknown",
    "bad_arguments",
    "too_many",
    "timeout",
    "raised",
    "wrong_value",
    "release_failed",
)


class ActorMetrics(MetricSet):
    """Episodes, sending, routing, lessons and tools of an actor."""

    prefix = "afterplay_actor_"

    def __init__(
        self, registry: CollectorRegistry, environments: Sequence[str] = (), engines: Sequence[str] = ()
    ) -> None:
        super().__init__(registry, environments=environments, engines=engines)

    policy_version = latest("Policy version of the weights that generate; NaN while no engine is known to have any.")
    trajectories_total = counter(
        "Finished trajectories; outcome = complete, truncated, aborted or error.",
        env="environments",
        outcome=("complete", "truncated", "aborted", "error"),
    )
    tokens_total = counter(
        "Tokens of episodes; kind = prompt, generated or discarded.", kind=("prompt", "generated", "discarded")
    )
    episode_duration_seconds = histogram("Wall time of one episode.", LONG, env="environments")
    episode_tokens = histogram("Generated tokens per episode.", TOK, env="environments")
    episode_reward = histogram("Undiscounted episode reward.", REW, env="environments")
    trajectory_span_versions = histogram(
        "Newest minus oldest policy version in one trajectory (in-flight weight updates).", LAG
    )
    generate_duration_seconds = histogram("Latency of one generation request.", LAT, backend=("vllm", "embedded"))
    env_step_duration_seconds = histogram("Latency of one environment or reward step.", LAT, env="environments")
    inflight_requests = gauge("Generation requests in flight.")
    inflight_episodes = gauge("Episodes in progress.")
    engine_errors_total = counter(
        "Generation requests that failed; kind = unavailable, busy (HTTP 429 or 503), refused or protocol.",
        kind=("unavailable", "busy", "refused", "protocol"),
    )

    send_queue_trajectories = gauge("Trajectories that wait to be sent to the replay stage.")
    send_blocked_seconds_total = counter("Time blocked by back-pressure of the replay stage.")
    send_failures_total = counter(
        "Sends of trajectories that failed; reason = rejected or disconnected.", reason=("rejected", "disconnected")
    )

    sticky_placements_total = counter(
        "Generation requests by choice of engine; kind = first (new session), sticky (same engine), moved, or "
        "elsewhere (another engine for one request, because it failed at its own or tries one that failed).",
        kind=("first", "sticky", "moved", "elsewhere"),
    )
    sticky_moves_total = counter(
        "Sessions that changed or lost their engine; reason = died (down, or too many failures), lagging (old "
        "weights), left (the run), returned (to an engine that came back or joined), busier (than another engine, by "
        "more than the prefix is worth) or evicted (session table full).",
        reason=("died", "lagging", "left", "returned", "busier", "evicted"),
    )
    sticky_sessions = gauge("Sessions that are bound to an engine.")
    engines = gauge("Engines; state = fit (takes requests, weights stamped) or unfit.", state=("fit", "unfit"))
    engine_requests = gauge(
        "Requests at an engine, as it reports; state = running (in its batch) or waiting.",
        engine="engines",
        state=ENGINE_REQUESTS,
    )
    engine_kv_used_ratio = gauge(
        "Share of an engine's KV cache that requests hold, as it reports; 0 to 1.", engine="engines"
    )
    concurrency = gauge("Episodes that the actor plays at once at most.")
    prefix_cache_hit_ratio = gauge("Share of prompt tokens found in prefix caches, as the replies report; 0 to 1.")
    prefix_tokens_total = counter("Prompt tokens by prefix cache; result = hit or miss.", result=("hit", "miss"))

    lesson_searches_total = counter(
        "Searches for lessons; outcome = found, none, timeout, error or no_room (too long for the context).",
        outcome=("found", "none", "timeout", "error", "no_room"),
    )
    lesson_search_duration_seconds = histogram("Time an episode waited for lessons.", LAT)
    lessons_episodes_total = counter(
        "Finished episodes with lessons in the prompt; train = keep (trained with them) or discard (without).",
        train=("keep", "discard"),
    )
    lessons_reward = histogram(
        "Undiscounted episode reward while lessons are enabled; lessons = yes (lessons in the prompt) or no.",
        REW,
        lessons=("yes", "no"),
    )

    sandboxes_total = counter(
        "Sandboxes of agent programs; outcome = started, failed (to start) or ended (both kinds). started + failed - "
        "ended are live.",
        env="environments",
        outcome=("started", "failed", "ended"),
    )

    tool_calls_total = counter(
        "Tool calls; outcome = ok, refused (by the tool), unreadable, unknown, bad_arguments, too_many, "
        "timeout, raised, wrong_value or release_failed.",
        tool=("unknown",),
        outcome=TOOL_OUTCOMES,
    )
    tool_duration_seconds = histogram("Time of one tool call.", LAT, tool=())

    door_calls_total = counter(
        "Calls of agent programs to the gateway; route = chat, messages, responses, generate, count (tokens of a "
        "prompt), models, lease (ask for a task) or finish; outcome = ok, repeated (the request came before, and has "
        "that reply), limit (of the episode), refused (wrong call), too_many, engine (no answer) or hung_up (the "
        "program did not wait).",
        env="environments",
        route=("chat", "messages", "responses", "generate", "count", "models", "lease", "finish"),
        outcome=("ok", "repeated", "limit", "refused", "too_many", "engine", "hung_up"),
    )
    hung_calls = gauge(
        "Blocking calls of an environment, its tools or programs that hang: nobody waits for them, and they do not "
        "return.",
        env="environments",
    )
    leaked_tasks_total = counter(
        "asyncio tasks that an episode left running and that were cancelled.", env="environments"
    )
