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

RUNTIME = frozenset({"up", "ALERTS", "process_start_time_seconds"})
"""What Prometheus and its client library make."""
