"""The expressions that panels and alerts share, so that a panel shows exactly what its alert judges."""

from __future__ import annotations

from grafana.thresholds import GROUPS_WINDOW, WINDOW

SELECTOR = 'job=~"$job",instance=~"$instance"'
ENVIRONMENT = 'env=~"$environment"'
RATE = "$__rate_interval"
CORRUPT = 'reason=~"corrupt|schema"'


def metric(name: str, *matchers: str, panel: bool = True) -> str:
    """A selector of ``afterplay_<name>`` (``vllm:`` names are taken as they are).

    ``panel=True`` adds the dashboard's variables; alerts see every series.

    >>> metric("learner_steps_total", panel=False)
    'afterplay_learner_steps_total'
    """
    full = name if ":" in name or name.startswith("process_") or name == "up" else f"afterplay_{name}"
    inside = ",".join([*((SELECTOR,) if panel else ()), *matchers])
    return f"{full}{{{inside}}}" if inside else full


def rate(name: str, *matchers: str, window: str = RATE, panel: bool = True) -> str:
    return f"rate({metric(name, *matchers, panel=panel)}[{window}])"


def quantile(q: float, name: str, *matchers: str, by: str = "", window: str = WINDOW, panel: bool = True) -> str:
    """Quantile ``q`` of a histogram over ``window``, by the labels ``by`` as well as ``le``."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q}, sum by ({labels}) ({rate(name + '_bucket', *matchers, window=window, panel=panel)}))"
    )


def buckets(name: str, *matchers: str, window: str = WINDOW) -> str:
    """Heatmap input: observations per bucket within ``window``."""
    return f"sum by (le) (increase({metric(name + '_bucket', *matchers)}[{window}]))"


def ess(level: str, *matchers: str, panel: bool = True) -> str:
    """Effective sample size over the window and over every learner: rate(Σw)² / (rate(N)·rate(Σw²)). NaN without
    observations, which no threshold takes for low."""
    match = f'level="{level}"'

    def total(name: str) -> str:
        return f"sum({rate(name, match, *matchers, window=WINDOW, panel=panel)})"

    return (
        f"{total('learner_importance_ratio_sum')}^2 / ({total('learner_importance_ratio_count')} * "
        f"{total('learner_importance_ratio_squared_total')})"
    )


def ratio_mean(panel: bool = True) -> str:
    match = 'level="token"'
    return (
        f"sum({rate('learner_importance_ratio_sum', match, window=WINDOW, panel=panel)}) / "
        f"sum({rate('learner_importance_ratio_count', match, window=WINDOW, panel=panel)})"
    )


def ratio_tail(panel: bool = True) -> str:
    """Share of tokens with π/μ outside (0.5, 2]; both are bucket bounds of the histogram."""

    name, token = "learner_importance_ratio", 'level="token"'

    def upto(bound: str) -> str:
        return f"sum({rate(name + '_bucket', token, bound, window=WINDOW, panel=panel)})"

    high, low = upto('le="2.0"'), upto('le="0.5"')
    return f"1 - ({high} - {low}) / sum({rate(name + '_count', token, window=WINDOW, panel=panel)})"


def engine_mismatch(panel: bool = True) -> str:
    """p99 of the log-probability difference at lag 0: over the window, or the learner's life where the window has none.

    An asynchronous run in its steady state trains every token at lag 1 or more and so sees lag 0 only after its starts.
    """
    name = "learner_logprob_diff_nats"
    ever = f"histogram_quantile(0.99, sum by (le) ({metric(name + '_bucket', panel=panel)}))"
    return f"{quantile(0.99, name, panel=panel)} >= 0 or {ever}"


def idle_share(panel: bool = True, window: str = WINDOW) -> str:
    return rate("learner_wait_seconds_total", window=window, panel=panel)


def actor_error_share(panel: bool = True) -> str:
    """Share of finished trajectories that ended in an error; 0 while none finished."""
    bad = rate("actor_trajectories_total", 'outcome="error"', window=WINDOW, panel=panel)
    every = rate("actor_trajectories_total", window=WINDOW, panel=panel)
    return f"sum({bad}) / (sum({every}) > 0) or vector(0)"


def actor_blocked_share(panel: bool = True) -> str:
    return rate("actor_send_blocked_seconds_total", window=WINDOW, panel=panel)


def heartbeat_age(role: str = "", panel: bool = True) -> str:
    return f"time() - {metric('heartbeat_timestamp_seconds', *job(role), panel=panel)}"


def job(role: str) -> tuple[str, ...]:
    """Matcher of the scrape job of a role; none for all of them."""
    return (f'job="afterplay-{role}"',) if role else ()


def policy_lag(panel: bool = True) -> str:
    return (
        f"max({metric('learner_policy_version', panel=panel)}) - "
        f"min({metric('actor_policy_version', panel=panel)} >= 0)"
    )


def equal_groups(*matchers: str, panel: bool = True) -> str:
    """Finished groups whose rewards were all equal, of all that finished (those that were replaced too). Nothing while
    none finishes."""
    of, equal = "replay_groups_total", "replay_equal_groups_total"
    trained = rate(of, 'outcome="trained"', window=GROUPS_WINDOW, panel=panel)
    left_out = rate(equal, 'action=~"dropped|refilled"', window=GROUPS_WINDOW, panel=panel)
    share = f"sum({rate(equal, *matchers, window=GROUPS_WINDOW, panel=panel)})"
    return f"{share} / (sum({trained}) + sum({left_out}) > 0)"


def stale_drop_share(panel: bool = True) -> str:
    drops = rate("replay_dropped_trajectories_total", 'reason="stale"', window=WINDOW, panel=panel)
    inserts = rate("replay_inserted_trajectories_total", window=WINDOW, panel=panel)
    return f"sum({drops}) / (sum({inserts}) > 0)"


def replay_fill(panel: bool = True) -> str:
    return f"{metric('replay_trajectories', panel=panel)} / ({metric('replay_capacity_trajectories', panel=panel)} > 0)"


def corrupt_drops(panel: bool = True) -> str:
    """Within the window, by reason and stage."""
    return f"increase({metric('replay_dropped_trajectories_total', CORRUPT, panel=panel)}[{WINDOW}])"


def nonfinite_steps(panel: bool = True) -> str:
    """Within the window, by what was not finite."""
    return f"increase({metric('learner_nonfinite_steps_total', panel=panel)}[{WINDOW}])"


def weight_update_failures(panel: bool = True) -> str:
    """Within ten minutes."""
    return f"sum(increase({metric('learner_weight_publish_failures_total', panel=panel)}[10m]))"


def checkpoint_age(panel: bool = True) -> str:
    return f"time() - ({metric('learner_checkpoint_timestamp_seconds', panel=panel)} > 0)"
