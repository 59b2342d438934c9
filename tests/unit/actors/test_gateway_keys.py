"""Keys of messages, by which the gateway knows a reply again."""

from __future__ import annotations

import json

import pytest

from actors.gateway.conversation import key_of, read_call
from actors.gateway.reply import ChatReply
from actors.tools.parsing.base import call


@pytest.mark.parametrize(
    "arguments", ['{"a": 1.0, "b": [2.5, 1e30]}', f'{{"a": {10**30}}}', f'{{"a": {"[" * 600 + "]" * 600}}}']
)
def test_every_call_that_a_policy_may_write_has_the_key_of_the_same_call_as_a_program_states_it(arguments: str) -> None:
    stated = {"id": "1", "type": "function", "function": {"name": "f", "arguments": call("f", arguments).arguments}}
    reply = ChatReply("text", (stated,), "tool_calls")
    told = read_call("1", "f", json.dumps(json.loads(arguments)).replace("1.0", "1"), "messages")
    assert reply.key == key_of("assistant", "text", [{**stated, "function": told["function"]}])
