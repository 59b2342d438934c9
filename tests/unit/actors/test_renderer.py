"""A conversation is extended by exactly the ids that the template adds, or it forks."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from pipeline.errors import ConfigurationError, PlugInError
from pipeline.schema import Message

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SPECIAL = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40)
FIXTURES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def with_template(tokenizer: Any, template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def whole(tokenizer: Any, messages: tuple[Message, ...]) -> list[int]:
    dictionaries = [m.as_template_input() for m in messages]
    return list(tokenizer.apply_chat_template(dictionaries, add_generation_prompt=True, return_dict=False))


@given(user=TEXT, reply=TEXT, answer=TEXT, stopped=st.booleans())
@settings(FIXTURES, max_examples=150)
def test_extension_equals_the_template_where_the_reply_is_tokenised_as_the_template_would(
    smollm2: Any, user: str, reply: str, answer: str, stopped: bool
) -> None:
    renderer = Renderer(smollm2)
    first = renderer.start([Message("user", user)])
    assert list(first.prompt_ids) == whole(smollm2, first.messages)
    sampled = smollm2(reply, add_special_tokens=False).input_ids + ([smollm2.eos_token_id] if stopped else [])
    said = renderer.completed(sampled)
    second = renderer.extend(first, sampled, said, [Message("user", answer)])
    assert second.branch == 0
    assert second.prompt_ids[: len(first.prompt_ids) + len(sampled)] == (*first.prompt_ids, *sampled)
    assert second.prompt_ids == (*first.prompt_ids, *sampled, *second.added_ids)
    seam = smollm2(first.text + said.text, add_special_tokens=False).input_ids
    if seam == [*first.prompt_ids, *sampled[: len(sampled) - stopped]] and said.end_id == (
        smollm2.eos_token_id if stopped else None
    ):
        assert list(second.prompt_ids) == whole(smollm2, second.messages)


@given(sampled=st.lists(st.integers(0, 49151), min_size=1, max_size=30))
@settings(FIXTURES, max_examples=150)
def test_sampled_ids_survive_whatever_they_are(smollm2: Any, sampled: list[int]) -> None:
    renderer = Renderer(smollm2)
    first = renderer.start([Message("user", "hi")])
    second = renderer.extend(first, sampled, renderer.completed(sampled), [Message("user", "go on")])
    if second.branch == 0:
        assert second.prompt_ids[: len(first.prompt_ids) + len(sampled)] == (*first.prompt_ids, *sampled)
    else:
        assert second.added_ids == second.prompt_ids and list(second.prompt_ids) == whole(smollm2, second.messages)


def test_ids_that_are_no_canonical_tokenisation_are_kept(smollm2: Any) -> None:
    renderer = Renderer(smollm2)
    odd = [smollm2.convert_tokens_to_ids(c) for c in "hello"]
    assert odd != smollm2("hello", add_special_tokens=False).input_ids
    first = renderer.start([Message("user", "hi")])
    second = renderer.extend(first, odd, renderer.completed(odd), [Message("user", "go on")])
    assert renderer.completed(odd).text == "hello" and second.branch == 0
    assert second.prompt_ids[len(first.prompt_ids) :][:5] == tuple(odd)


def test_only_the_end_of_turn_token_is_taken_off_and_not_characters(smollm2: Any) -> None:
    renderer = Renderer(smollm2)
    end = smollm2.eos_token_id
    text = "a<|im_end"
    ids = smollm2(text, add_special_tokens=False).input_ids
    assert renderer.completed([*ids, end]).text == text and renderer.completed([*ids, end]).end_id == end
    assert renderer.completed(ids).end_id is None
    assert renderer.completed([]).text == ""
    assert renderer.completed([end]).text == ""


def test_template_that_strips_thinking_forks_and_the_new_branch_is_the_whole_prompt(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, THINKING)
    renderer = Renderer(tokenizer)
    first = renderer.start([Message("user", "2 + 3?")])
    thought = [*tokenizer("<think>\nhm\n</think>\n5", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    second = renderer.extend(first, thought, renderer.completed(thought), [Message("user", "sure?")])
    assert second.branch == 1 and second.added_ids == second.prompt_ids
    assert list(second.prompt_ids) == whole(tokenizer, second.messages)
    plain = [*tokenizer("5", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    third = renderer.extend(second, plain, renderer.completed(plain), [Message("user", "ok")])
    assert third.branch == 1 and third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids


@given(reply=TEXT)
@settings(FIXTURES, max_examples=100)
def test_template_that_trims_forks_exactly_when_there_is_something_to_trim(smollm2: Any, reply: str) -> None:
    tokenizer = with_template(smollm2, TRIMMING)
    renderer = Renderer(tokenizer)
    first = renderer.start([Message("user", "x")])
    ids = [*tokenizer(reply, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    said = renderer.completed(ids)
    second = renderer.extend(first, ids, said, [Message("user", "y")])
    assert second.branch == int(said.text != said.text.strip())
    if second.branch:
        assert list(second.prompt_ids) == whole(tokenizer, second.messages)


def test_turn_closed_by_another_token_than_the_templates_forks(smollm2: Any) -> None:
    other = smollm2.convert_tokens_to_ids("<|endoftext|>")
    renderer = Renderer(smollm2, [other])
    assert set(renderer.end_ids) == {other, smollm2.eos_token_id}
    first = renderer.start([Message("user", "x")])
    ids = [*smollm2("5", add_special_tokens=False).input_ids, other]
    assert renderer.completed(ids).text == "5"
    assert renderer.extend(first, ids, renderer.completed(ids), [Message("user", "y")]).branch == 1


def test_template_without_special_tokens_extends_by_text(smollm2: Any) -> None:
    tokenizer = with_template(smollm2, NO_SPECIAL)
    renderer = Renderer(tokenizer)
    first = renderer.start([Message("user", "x")])
    ids = tokenizer("five", add_special_tokens=False).input_ids
    second = renderer.extend(first, ids, renderer.completed(ids), [Message("user", "y")])
    assert second.branch == 0 and tokenizer.decode(second.prompt_ids) == second.text
    closed = [*ids, tokenizer.eos_token_id]
    assert renderer.extend(first, closed, renderer.completed(closed), [Message("user", "y")]).branch == 1


def test_tiny_word_tokenizer_extends_by_two_tokens_a_message(words: Any) -> None:
    renderer = Renderer(words)
    first = renderer.start([Message("user", "guess")])
    seven = words.convert_tokens_to_ids("7")
    for ids in ([seven, words.eos_token_id], [seven]):
        second = renderer.extend(first, ids, renderer.completed(ids), [Message("user", "higher")])
        assert list(second.prompt_ids) == whole(words, second.messages)
        assert renderer.completed(ids).text == "7"


def test_models_own_tiny_tokenizer_satisfies_the_prefix_property() -> None:
    build_tokenizer = pytest.importorskip("learner.models.tiny").build_tokenizer
    tokenizer = build_tokenizer(16)
    renderer = Renderer(tokenizer)
    conversation = renderer.start([Message("user", "guess")])
    for answer in ("higher", "lower", "higher"):
        ids = [*tokenizer("7", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        conversation = renderer.extend(conversation, ids, renderer.completed(ids), [Message("user", answer)])
    assert conversation.branch == 0 and list(conversation.prompt_ids) == whole(tokenizer, conversation.messages)


def test_tokenizer_without_a_template_is_a_configuration_error(words: Any) -> None:
    bare = copy.deepcopy(words)
    bare.chat_template = None
    with pytest.raises(ConfigurationError, match="chat_template"):
        Renderer(bare)


def test_template_that_cannot_hold_a_dialogue_is_a_configuration_error(words: Any) -> None:
    with pytest.raises(ConfigurationError, match="user and an assistant"):
        one = "{% if messages[1] %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
        Renderer(with_template(words, one))


def test_template_that_raises_is_a_renderer_failure(words: Any) -> None:
    two = "{% if messages[2] %}{{ raise_exception('') }}{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
    renderer = Renderer(with_template(words, two))
    conversation = renderer.start([Message("user", "x")])
    with pytest.raises(PlugInError, match="renderer"):
        renderer.extend(conversation, [7], renderer.completed([7]), [Message("user", "y")])


@pytest.mark.slow
def test_actor_loads_a_plain_tokenizer_without_torch(tmp_path: Path, words: Any) -> None:
    words.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    code = (
        "import sys; from pathlib import Path; from actors.rendering.renderer import Renderer\n"
        "import actors.process.role; from actors.rendering.tokenizer import load_tokenizer\n"
        f"tokenizer, ends = load_tokenizer(Path({str(tmp_path)!r})); renderer = Renderer(tokenizer, ends)\n"
        "assert renderer.end_ids == (2, 5), renderer.end_ids\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_a_chat_template_may_lie_below_the_home_folder(
    tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words.save_pretrained(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setenv("HOME", str(tmp_path))
    tokenizer, _ = load_tokenizer(tmp_path, "~/chat.jinja")
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_a_chat_template_that_is_no_utf_8_is_a_configuration_error(tmp_path: Path, words: Any) -> None:
    words.save_pretrained(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }} ｜", "utf-16")
    with pytest.raises(ConfigurationError, match=r"model\.chat_template: .*chat\.jinja cannot be read"):
        load_tokenizer(tmp_path, str(template))
    template.write_text("{{ messages }} ｜", "utf-8")
    assert load_tokenizer(tmp_path, str(template))[0].chat_template == "{{ messages }} ｜"
