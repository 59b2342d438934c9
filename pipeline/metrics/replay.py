"""Metrics of the replay stage. Attribute names are the metric names without ``afterplay_replay_``."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.metrics.base import AGE, LAG, LAT, LONG, REW, SAMPLES, TOK, CollectorRegistry, counter, gauge, histogram

DROPS = ("stale", "capacity", "duplicate", "corrupt", "schema")
OPERATIONS = ("insert", "sample", "ack", "stats")
PEERS = ("actor", "learner")
TERMINAL_STATES = ("trained", "error", "aborted", "unscored", "cancelled", "refused", "dropped", "baseline",
                   "evaluated", "uninformative")  # fmt: skip
GROUP_OUTCOMES = ("trained", "cancelled", "rolled_back", "dropped", "uninformative")
EQUAL_GROUPS = ("kept", "dropped", "refilled")
ORDER_OUTCOMES = ("completed", "error", "aborted", "expired", "cancelled")
DIFFICULTIES = ("unseen", "hard", "medium", "easy", "solved")
POPULATIONS = ("sampled", "stored", "trained", "replayed", "uninformative")
SAVED_FROM = ("rollout", "import")
LEFT = ("full", "capacity", "retired", "age")
GUARD = ("shrink", "recover")
SCORE_FAILURES = ("raised", "timeout", "crashed", "missing", "type", "nonfinite", "unavailable", "refused", "protocol")
TASK_ROWS = ("used", "filtered", "bad", "held_out", "unused")
EVALUATIONS = ("complete", "timed_out", "abandoned", "skipped")
EVALUATED_ROLLOUTS = ("scored", "truncated", "failed", "missing")
LESSON_SEARCHES = ("found", "none", "error", "dropped")
LESSON_GROUPS = ("written", "nothing", "timeout", "error", "dropped")
_P = "afterplay_replay_"


class ReplayMetrics:
    """The sequences are the label values to initialise."""

    def __init__(
        self,
        registry: CollectorRegistry,
        environments: Sequence[str] = (),
        terminal_states: Sequence[str] = TERMINAL_STATES,
        group_outcomes: Sequence[str] = GROUP_OUTCOMES,
        order_outcomes: Sequence[str] = ORDER_OUTCOMES,
        score_functions: Sequence[str] = ("environment",),
        pass_at: Sequence[int] = (1,),
        split: str = "eval",
    ) -> None:
        self._build_contents(registry, environments)
        self._build_sampling(registry)
        self._build_service(registry)
        self._build_accounts(registry, terminal_states, group_outcomes, order_outcomes)
        self._build_scoring(registry, score_functions)
        self._build_curriculum(registry)
        self._build_mixing(registry)
        self._build_audit(registry)
        self._build_evaluation(registry, environments, pass_at, split)
        self._build_lessons(registry)

    def _build_contents(self, r: CollectorRegistry, environments: Sequence[str]) -> None:
        self.trajectories = gauge(r, _P + "trajectories", "Trajectories held.")
        self.capacity_trajectories = gauge(r, _P + "capacity_trajectories", "Configured capacity.")
        self.memory_bytes = gauge(r, _P + "memory_bytes", "Payload bytes held.")
        self.inserted_trajectories_total = counter(
            r, _P + "inserted_trajectories_total", "Trajectories accepted.", {"env": tuple(environments)}
        )
        self.sampled_trajectories_total = counter(
            r, _P + "sampled_trajectories_total", "Trajectories handed to a learner (repeats counted)."
        )
        self.dropped_trajectories_total = counter(
            r,
            _P + "dropped_trajectories_total",
            "Trajectories not kept or evicted; reason = stale, capacity, duplicate, corrupt or schema.",
            {"reason": DROPS},
        )
        self.oldest_policy_version = gauge(r, _P + "oldest_policy_version", "Smallest behaviour version still held.")

        self.task_rows = gauge(
            r,
            _P + "task_rows",
            "Rows of tasks_from when it was opened; kind = used, filtered, bad (skipped), held_out (asked in another "
            "split too) or unused (in no split, or over the limit).",
            {"env": tuple(environments), "kind": TASK_ROWS},
        )

    def _build_sampling(self, r: CollectorRegistry) -> None:
        self.staleness_versions = histogram(
            r,
            _P + "staleness_versions",
            "Learner version minus behaviour version; at = insert or sample.",
            LAG,
            {"at": ("insert", "sample")},
        )
        self.item_age_seconds = histogram(r, _P + "item_age_seconds", "Time from insertion to sampling.", AGE)
        self.item_samples = histogram(
            r, _P + "item_samples", "Times one trajectory was sampled before it left.", SAMPLES
        )
        self.sample_wait_seconds = histogram(
            r, _P + "sample_wait_seconds", "Time a sample request waited for enough data.", LAT
        )
        self.share_ratio = gauge(
            r, _P + "share_ratio", "Replayed tokens among trained response tokens of the last update; 0 to 1."
        )

    def _build_service(self, r: CollectorRegistry) -> None:
        self.rpc_duration_seconds = histogram(
            r,
            _P + "rpc_duration_seconds",
            "Service time; op = insert, sample, ack or stats; result = ok or error.",
            LAT,
            {"op": OPERATIONS, "result": ("ok", "error")},
        )
        self.connected_peers = gauge(r, _P + "connected_peers", "Live peers; peer = actor or learner.", {"peer": PEERS})
        self.peers_dropped_total = counter(
            r, _P + "peers_dropped_total", "Peers that fell silent; peer = actor or learner.", {"peer": PEERS}
        )

    def _build_accounts(
        self, r: CollectorRegistry, terminal_states: Sequence[str], groups: Sequence[str], orders: Sequence[str]
    ) -> None:
        self.terminal_trajectories_total = counter(
            r,
            _P + "terminal_trajectories_total",
            "Trajectories by the state they ended in.",
            {"state": terminal_states},
        )
        self.groups_total = counter(r, _P + "groups_total", "Groups by how they ended.", {"outcome": groups})
        self.equal_groups_total = counter(
            r,
            _P + "equal_groups_total",
            "Finished groups whose rewards were all equal; action = kept (trained), dropped or refilled.",
            {"action": EQUAL_GROUPS},
        )
        self.orders_issued_total = counter(r, _P + "orders_issued_total", "Orders given to actors.")
        self.orders_total = counter(r, _P + "orders_total", "Orders by how they ended.", {"outcome": orders})
        self.orders_inflight = gauge(r, _P + "orders_inflight", "Orders that actors hold.")
        self.groups_open = gauge(r, _P + "groups_open", "Groups that still wait for a trajectory or a score.")
        self.groups_ready = gauge(r, _P + "groups_ready", "Complete groups that the learner has not taken.")
        self.admission_capacity_trajectories = gauge(
            r, _P + "admission_capacity_trajectories", "Trajectories that the staleness bound still admits."
        )

    def _build_scoring(self, r: CollectorRegistry, functions: Sequence[str]) -> None:
        self.score_duration_seconds = histogram(
            r, _P + "score_duration_seconds", "Time of one score function.", LAT, {"function": functions}
        )
        self.score_failures_total = counter(
            r,
            _P + "score_failures_total",
            "Parts of a reward that gave no number; reason = raised, timeout, crashed, missing, type, nonfinite, or of "
            "a server unavailable, refused, protocol.",
            {"function": functions, "reason": SCORE_FAILURES},
        )
        self.score_retries_total = counter(
            r, _P + "score_retries_total", "Requests to a judge or reward model tried again.", {"function": functions}
        )
        self.score_value = histogram(
            r, _P + "score_value", "Parts of rewards as they were given, unweighted.", REW, {"function": functions}
        )

    def _build_curriculum(self, r: CollectorRegistry) -> None:
        self.difficulty_tasks = gauge(
            r,
            _P + "difficulty_tasks",
            "Tasks known to the pool by the success rate of their latest group; bucket = unseen, hard (below a third), "
            "medium, easy (above two thirds) or solved (retired).",
            {"bucket": DIFFICULTIES},
        )
        self.retired_tasks = gauge(
            r, _P + "retired_tasks", "Tasks that are only played to see that they still succeed."
        )
        self.experience_pool_entries = gauge(r, _P + "experience_pool_entries", "Trajectories in the experience pool.")
        self.experience_pool_bytes = gauge(r, _P + "experience_pool_bytes", "Payload bytes of the experience pool.")
        self.experience_pool_capacity = gauge(r, _P + "experience_pool_capacity", "Most trajectories it may hold.")
        self.experience_oldest_version = gauge(
            r, _P + "experience_oldest_version", "Smallest behaviour version in the experience pool."
        )
        self.experience_saved_total = counter(
            r,
            _P + "experience_saved_total",
            "Trajectories that entered the experience pool; origin = rollout or import.",
            {"origin": SAVED_FROM},
        )
        self.experience_left_total = counter(
            r,
            _P + "experience_left_total",
            "Trajectories that left the experience pool; reason = full (of one task), capacity, retired or age.",
            {"reason": LEFT},
        )

    def _build_mixing(self, r: CollectorRegistry) -> None:
        self.planned_share_ratio = gauge(
            r, _P + "planned_share_ratio", "Groups planned with replays, of all: task_ratio times the guard's factor."
        )
        self.guard_factor_ratio = gauge(
            r, _P + "guard_factor_ratio", "What the guard of the effective sample size leaves of task_ratio; 0 to 1."
        )
        self.guard_actions_total = counter(
            r,
            _P + "guard_actions_total",
            "Changes of that factor; direction = shrink, recover.",
            {"direction": GUARD},
        )
        self.replays_trained_total = counter(r, _P + "replays_trained_total", "Stored trajectories trained again.")
        self.rescued_groups_total = counter(
            r, _P + "rescued_groups_total", "Groups that failed altogether and were given a stored success."
        )
        self.choice_failures_total = counter(
            r, _P + "choice_failures_total", "Groups whose replays the learner could not choose with today's policy."
        )

    def _build_audit(self, r: CollectorRegistry) -> None:
        population = {"population": POPULATIONS}
        note = (
            "; population = sampled (all that were played), stored, trained (fresh), replayed or uninformative (left "
            "out because the rewards of its group were equal)."
        )
        self.audit_tokens = histogram(r, _P + "audit_tokens", "Sampled tokens of a trajectory" + note, TOK, population)
        self.audit_duration_seconds = histogram(
            r, _P + "audit_duration_seconds", "Wall time of an episode" + note, LONG, population
        )
        self.audit_reward = histogram(r, _P + "audit_reward", "Reward of a trajectory" + note, REW, population)
        self.audit_age_versions = histogram(
            r, _P + "audit_age_versions", "Versions since its oldest token was sampled" + note, LAG, population
        )

    def _build_evaluation(
        self, r: CollectorRegistry, environments: Sequence[str], pass_at: Sequence[int], split: str
    ) -> None:
        env = {"env": tuple(environments), "split": (split,)}
        self.evaluation_score = gauge(
            r,
            _P + "evaluation_score",
            "Mean reward of the last evaluation: of tasks, each the mean of its rollouts.",
            env,
        )
        self.evaluation_pass_ratio = gauge(
            r,
            _P + "evaluation_pass_ratio",
            "pass@k of the last evaluation: the chance that one of k rollouts of a held-out task succeeds.",
            {**env, "k": tuple(map(str, pass_at))},
        )
        self.evaluation_rollouts = gauge(
            r,
            _P + "evaluation_rollouts",
            "Rollouts of the last evaluation; outcome = scored, truncated (scored too), failed (tries) or missing.",
            {**env, "outcome": EVALUATED_ROLLOUTS},
        )
        self.evaluation_updates = gauge(
            r, _P + "evaluation_updates", "Updates in the weights that were evaluated last."
        )
        self.evaluation_policy_version = gauge(
            r, _P + "evaluation_policy_version", "Policy version of the weights that were evaluated last."
        )
        self.evaluations_total = counter(
            r,
            _P + "evaluations_total",
            "Evaluations by how they ended; outcome = complete, timed_out, abandoned or skipped (one still played).",
            {"outcome": EVALUATIONS},
        )

    def _build_lessons(self, r: CollectorRegistry) -> None:
        self.lessons = gauge(r, _P + "lessons", "Lessons in the memory.")
        self.lessons_written_total = counter(r, _P + "lessons_written_total", "New lessons, repetitions left out.")
        self.lesson_groups_total = counter(
            r,
            _P + "lesson_groups_total",
            "Finished groups that lessons were asked of; outcome = written, nothing, timeout, error or dropped.",
            {"outcome": LESSON_GROUPS},
        )
        self.lesson_searches_total = counter(
            r,
            _P + "lesson_searches_total",
            "Searches of actors; outcome = found, none, error or dropped (too many waited).",
            {"outcome": LESSON_SEARCHES},
        )
        self.lesson_search_duration_seconds = histogram(
            r, _P + "lesson_search_duration_seconds", "From a question of an actor to its answer.", LAT
        )
