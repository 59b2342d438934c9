"""Metrics of an actor. Attribute names are the metric names without ``afterplay_actor_``."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.metrics.base import LAG, LAT, LONG, REW, TOK, CollectorRegistry, counter, gauge, histogram

OUTCOMES = ("complete", "truncated", "aborted", "error")
TOKEN_KINDS = ("prompt", "generated", "discarded")
SEND_FAILURES = ("timeout", "rejected", "disconnected")
BACKENDS = ("vllm", "embedded")
PLACEMENTS = ("first", "sticky", "moved")
MOVES = ("died", "lagging", "evicted")
ENGINE_ERRORS = ("unavailable", "refused", "protocol")
LESSON_SEARCHES = ("found", "none", "timeout", "error", "no_room")
GUIDED = ("yes", "no")
DOOR_ROUTES = ("chat", "generate", "models", "lease", "finish")
DOOR_OUTCOMES = ("ok", "limit", "refused", "too_many", "engine", "hung_up")
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
_P = "afterplay_actor_"


class ActorMetrics:
    """``environments`` and ``backends`` are the label values to initialise."""

    def __init__(
        self, registry: CollectorRegistry, environments: Sequence[str] = (), backends: Sequence[str] = BACKENDS
    ) -> None:
        env = {"env": tuple(environments)}
        r = registry
        self.policy_version = gauge(r, _P + "policy_version", "Policy version of the weights now generating.")
        self.trajectories_total = counter(
            r,
            _P + "trajectories_total",
            "Finished trajectories; outcome = complete, truncated, aborted or error.",
            {**env, "outcome": OUTCOMES},
        )
        self.tokens_total = counter(
            r, _P + "tokens_total", "Tokens; kind = prompt, generated or discarded.", {"kind": TOKEN_KINDS}
        )
        self.episode_duration_seconds = histogram(
            r, _P + "episode_duration_seconds", "Wall time of one episode.", LONG, env
        )
        self.episode_tokens = histogram(r, _P + "episode_tokens", "Generated tokens per episode.", TOK, env)
        self.episode_reward = histogram(r, _P + "episode_reward", "Undiscounted episode reward.", REW, env)
        self.trajectory_span_versions = histogram(
            r,
            _P + "trajectory_span_versions",
            "Newest minus oldest policy version inside one trajectory (in-flight weight updates).",
            LAG,
        )
        self.generate_duration_seconds = histogram(
            r, _P + "generate_duration_seconds", "Latency of one generation request.", LAT, {"backend": tuple(backends)}
        )
        self.env_step_duration_seconds = histogram(
            r, _P + "env_step_duration_seconds", "Latency of one environment or reward step.", LAT, env
        )
        self.inflight_requests = gauge(r, _P + "inflight_requests", "Generation requests in flight.")
        self.inflight_episodes = gauge(r, _P + "inflight_episodes", "Episodes being played.")
        self.engine_errors_total = counter(
            r,
            _P + "engine_errors_total",
            "Generation requests that failed; kind = unavailable, refused or protocol.",
            {"kind": ENGINE_ERRORS},
        )
        self._build_sending(r)
        self._build_routing(r)
        self._build_lessons(r)
        self._build_tools(r)
        self.door_calls_total = counter(
            r,
            _P + "door_calls_total",
            "Calls of agent programs; route = chat, generate, models, lease (a program asks for a task) or finish; "
            "outcome = ok, limit (of the episode), refused (the call is wrong), too_many, engine (it did not answer) "
            "or hung_up (the program did not wait for the answer).",
            {"env": tuple(environments), "route": DOOR_ROUTES, "outcome": DOOR_OUTCOMES},
        )
        self.leaked_tasks_total = counter(
            r, _P + "leaked_tasks_total", "asyncio tasks that an episode's steps left running; they are cancelled.", env
        )

    def _build_sending(self, r: CollectorRegistry) -> None:
        self.send_queue_trajectories = gauge(
            r, _P + "send_queue_trajectories", "Trajectories waiting to be sent to replay."
        )
        self.send_blocked_seconds_total = counter(
            r, _P + "send_blocked_seconds_total", "Time blocked on replay back-pressure."
        )
        self.send_failures_total = counter(
            r,
            _P + "send_failures_total",
            "Trajectory sends that failed; reason = timeout, rejected or disconnected.",
            {"reason": SEND_FAILURES},
        )

    def _build_routing(self, r: CollectorRegistry) -> None:
        self.sticky_placements_total = counter(
            r,
            _P + "sticky_placements_total",
            "Requests by how their engine was found; kind = first (new session), sticky (same engine) or moved.",
            {"kind": PLACEMENTS},
        )
        self.sticky_moves_total = counter(
            r,
            _P + "sticky_moves_total",
            "Sessions that lost their engine; reason = died, lagging (old weights) or evicted (session table full).",
            {"reason": MOVES},
        )
        self.sticky_sessions = gauge(r, _P + "sticky_sessions", "Sessions with a placement.")
        self.engines = gauge(r, _P + "engines", "Engines; state = fit or unfit.", {"state": ("fit", "unfit")})
        self.prefix_cache_hit_ratio = gauge(
            r, _P + "prefix_cache_hit_ratio", "Prompt tokens found in prefix caches, as the replies told; 0 to 1."
        )
        self.prefix_tokens_total = counter(
            r,
            _P + "prefix_tokens_total",
            "Prompt tokens by what the prefix cache did; result = hit or miss.",
            {"result": ("hit", "miss")},
        )

    def _build_lessons(self, r: CollectorRegistry) -> None:
        self.lesson_searches_total = counter(
            r,
            _P + "lesson_searches_total",
            "Searches for lessons; outcome = found, none, timeout, error or no_room (found, too long for the context).",
            {"outcome": LESSON_SEARCHES},
        )
        self.lesson_search_duration_seconds = histogram(
            r, _P + "lesson_search_duration_seconds", "Time an episode waited for lessons.", LAT
        )
        self.guided_episodes_total = counter(
            r,
            _P + "guided_episodes_total",
            "Finished episodes with lessons in the prompt; train = keep (as played) or discard (without them).",
            {"train": ("keep", "discard")},
        )
        self.guidance_reward = histogram(
            r,
            _P + "guidance_reward",
            "Undiscounted episode reward while lessons are on; guided = yes (in the prompt) or no.",
            REW,
            {"guided": GUIDED},
        )

    def _build_tools(self, r: CollectorRegistry) -> None:
        """Label values of ``tool`` are the names of the run file's and environments' tools, and ``unknown``."""
        self.tool_calls_total = counter(
            r,
            _P + "tool_calls_total",
            "Tool calls; outcome = ok, refused (the tool said no), unreadable, unknown, bad_arguments, too_many, "
            "timeout, raised, wrong_value or release_failed.",
            {"tool": ("unknown",), "outcome": TOOL_OUTCOMES},
        )
        self.tool_duration_seconds = histogram(
            r, _P + "tool_duration_seconds", "Time of one tool call.", LAT, {"tool": ()}
        )
