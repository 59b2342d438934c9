"""Names of series that other programs export; ours are collected from the classes of ``pipeline.metrics``."""

from __future__ import annotations

VLLM_UPDATE = "vllm:rl_weight_update_operation_duration_seconds"

TRANSFER_ONLY = frozenset({f"{VLLM_UPDATE}_sum", f"{VLLM_UPDATE}_count"})
"""What vLLM exports only once weights travel through its own transfer engines (``engine.weight_transfer`` nccl or
ipc)."""

VLLM_ONLY = TRANSFER_ONLY | {"vllm:num_preemptions_total"}
"""What vLLM exports and the embedded engine does not."""

ENGINE = VLLM_ONLY | {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:kv_cache_usage_perc",
}
"""What either engine exports."""

TOOLS_ONLY = frozenset({"afterplay_actor_tool_duration_seconds_bucket", "afterplay_actor_tool_duration_seconds_sum"})
"""What an actor exports only once a tool was called."""

RUNTIME = frozenset({"up", "ALERTS", "process_start_time_seconds"})
"""What Prometheus and its client library make."""

NOT_SHOWN = {
    "afterplay_actor_leaked_tasks_total": "0 unless an environment is broken, and the actor's log then says so",
    "afterplay_build_info": "identifies a build: to be joined in ad-hoc queries",
    "afterplay_run_info": "identifies a run: to be joined in ad-hoc queries",
    "afterplay_learner_evaluation_score": "what the learner was told of the replay stage's score, which is shown",
    "afterplay_replay_score_retries_total": "to look at when a judge or reward model is slow; what fails in spite of "
    "retries is in the panel of score failures",
    "afterplay_replay_score_value": "one part of a reward: to be drawn by hand for the parts that a run has",
    "afterplay_replay_task_rows": "fixed when the data is opened: to look at once, after a start",
}
"""Metrics of ours that are in no panel and in no rule, and why. ``process_*`` is shown as far as it helps."""
