"""The engine's metrics as Prometheus text, under vLLM's names so that one dashboard shows either engine."""

from __future__ import annotations

from collections.abc import Mapping

_HELP = {
    "num_requests_running": "Requests in the current batch.",
    "num_requests_waiting": "Requests that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the KV cache in use, 0 to 1.",
    "prompt_tokens_total": "Prompt tokens of finished requests.",
    "generation_tokens_total": "Sampled tokens of finished requests.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
}


def exposition(model: str, values: Mapping[str, float], finished: Mapping[str, int]) -> str:
    """Text format 0.0.4."""
    labels = f'engine="0",model_name="{model}"'
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP vllm:{name} {_HELP[name]}", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {value}"]
    lines += ["# HELP vllm:request_success_total Finished requests.", "# TYPE vllm:request_success_total counter"]
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
        for reason, count in finished.items()
    ]
    return "\n".join(lines) + "\n"
