"""Rows about the engines: the metrics that vLLM exports, and how weights reach it."""

from __future__ import annotations

from grafana.names import VLLM_UPDATE
from grafana.promql import metric, rate
from grafana.queries import by_label, largest, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW

ENGINE = RowSpec(
    "Engines (vLLM's own metrics)",
    (
        PanelSpec(
            "Requests",
            "short",
            (
                Query(f"sum by (instance) ({metric('vllm:num_requests_running')})", "running {{instance}}"),
                Query(f"sum by (instance) ({metric('vllm:num_requests_waiting')})", "waiting {{instance}}"),
            ),
            "running near engine.max_sequences, few waiting.",
            "many waiting: more engines or less concurrency. None running: actors wait for something else.",
        ),
        PanelSpec(
            "Generated tokens",
            "cps",
            (by_label("instance", "vllm:generation_tokens_total"),),
            "steady, with short dips at weight updates.",
            "dips that last: see weight update time.",
        ),
        PanelSpec(
            "Prefix cache hits",
            "percentunit",
            (
                Query(
                    f"sum by (instance) ({rate('vllm:prefix_cache_hits_total')}) / "
                    f"(sum by (instance) ({rate('vllm:prefix_cache_queries_total')}) > 0)",
                    "{{instance}}",
                ),
            ),
            "high for multi-turn environments; whole KV blocks only.",
            "low with many turns: sessions move between engines, or engine.block_size is larger than a turn.",
        ),
        PanelSpec(
            "KV cache use",
            "percentunit",
            (largest("instance", "vllm:kv_cache_usage_perc"),),
            "below 90 %.",
            "full: requests are preempted; raise engine.kv_cache_gib or lower engine.max_sequences.",
        ),
        PanelSpec(
            "Preemptions",
            "cps",
            (by_label("instance", "vllm:num_preemptions_total"),),
            "0.",
            "the KV cache is too small for the requests in flight.",
        ),
        PanelSpec(
            "Weight publication",
            "s",
            p50_p95("learner_weight_publish_duration_seconds"),
            "about a second per billion parameters on disk, from writing to the last engine that resumed.",
            "generation pauses for a part of it at every version: faster storage, or NCCL/IPC transfer on GPU.",
            runbook="WeightUpdateFailing",
        ),
        PanelSpec(
            "Weight transfer operations",
            "s",
            (
                Query(
                    f"sum by (operation) ({rate(VLLM_UPDATE + '_sum', window=WINDOW)}) / "
                    f"sum by (operation) ({rate(VLLM_UPDATE + '_count', window=WINDOW)})",
                    "{{operation}}",
                ),
            ),
            "empty with engine.weight_transfer: files; with nccl or ipc, update takes most of the time.",
            "init or start that takes long: trainer and engines wait for each other, look at both logs.",
            runbook="WeightUpdateFailing",
        ),
    ),
)
