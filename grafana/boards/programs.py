"""Rows of the actors' dashboard about what episodes use beside an engine: tools, and the door for agent programs."""

from __future__ import annotations

from grafana import promql as q
from grafana.promql import rate
from grafana.queries import by_label, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW

ENV = q.ENVIRONMENT
TOOL_FAULTS = 'outcome=~"timeout|raised|wrong_value|release_failed"'
"""Of the outcomes of a call: what the policy cannot help."""
UNANSWERED = 'outcome=~"refused|too_many|engine|hung_up"'
"""Of the door's outcomes: what a program did not get although its episode went on."""

TOOLS = RowSpec(
    "Tools",
    (
        PanelSpec(
            "Tool calls",
            "cps",
            (by_label("tool", "actor_tool_calls_total"),),
            "0 without tools; else as many as the policy likes to make.",
            "falls to 0 while the policy learns: calls do not pay, or cost too many tokens. unknown: no such tool.",
            stacked=True,
        ),
        PanelSpec(
            "Tool calls by outcome",
            "cps",
            (by_label("outcome", "actor_tool_calls_total"),),
            "mostly ok; refused is a tool that said no (a division by zero).",
            "unreadable, unknown and bad_arguments are the policy's faults and fall as it learns; timeout, raised, "
            "wrong_value and release_failed are the tool's: see the next panel and the actor's log.",
            stacked=True,
        ),
        PanelSpec(
            "Tool calls that failed",
            "cps",
            (
                Query(
                    f"sum by (tool, outcome) ({rate('actor_tool_calls_total', TOOL_FAULTS)})", "{{tool}}, {{outcome}}"
                ),
            ),
            "0.",
            "the actor's log has the traceback, once for each kind; the episode was told that the call failed.",
        ),
        PanelSpec(
            "Time of a tool call",
            "s",
            p50_p95("actor_tool_duration_seconds", by="tool", legend=" {{tool}}"),
            "steady, far below loop.options.tool_seconds_max; empty without tools.",
            "p95 near tool_seconds_max: the tool is overloaded, or its limit too low for what it does.",
        ),
        PanelSpec(
            "Calls being answered",
            "short",
            (
                Query(
                    f"sum by (tool) ({rate('actor_tool_duration_seconds_sum', window=WINDOW)})",
                    "{{tool}}",
                ),
            ),
            "seconds of tool per second: how many calls run at once on average; empty without tools.",
            "near its number of workers, where it has them: give it more, or lower actor.concurrency.",
            stacked=True,
        ),
    ),
)

DOOR = RowSpec(
    "The door for agent programs",
    (
        PanelSpec(
            "Calls by route",
            "cps",
            (by_label("route", "actor_door_calls_total", ENV),),
            "0 without agent programs; else chat or generate as often as programs take turns.",
            "lease without chat: programs ask for tasks and do nothing with them; see docs/GATEWAY.md.",
            stacked=True,
        ),
        PanelSpec(
            "Calls by outcome",
            "cps",
            (by_label("outcome", "actor_door_calls_total", ENV),),
            "mostly ok; limit ends episodes that may not take more turns or tokens.",
            "refused: the program asks for what the door does not do, its log says what. engine: see the engines.",
            stacked=True,
        ),
        PanelSpec(
            "Calls that got no answer",
            "cps",
            (Query(f"sum by (env, route) ({rate('actor_door_calls_total', UNANSWERED, ENV)})", "{{env}}, {{route}}"),),
            "0; some while an engine restarts.",
            "hung_up: the program's own timeout is shorter than a generation. too_many: it calls more at once than "
            "loop.options.max_concurrent_calls.",
        ),
    ),
)
