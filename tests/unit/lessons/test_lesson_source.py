"""``lessons.source``: a class of the user's in place of the stage's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config.lessons import LessonsConfig
from pipeline.errors import ConfigurationError
from pipeline.lessons.service import MAKE_SOURCE
from pipeline.lessons.store import close_source
from pipeline.runtime.plugins import load_main

PLUGINS = str(Path(__file__).parent / "plugins_for_lessons.py")


def make(name: str, **options: Any) -> Any:
    return load_main(MAKE_SOURCE)(LessonsConfig(enabled=True, source=name, source_options=options))


async def test_a_class_of_ones_own_is_made_with_its_options() -> None:
    source = make(f"{PLUGINS}:Remembers", size=3)
    assert source.size == 3
    assert [lesson.text for lesson in await source.search("o", "guess", 2)] == ["about guess"]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no.such.package:Source", {}, r"lessons\.source: importing 'no\.such\.package' failed"),
        (f"{PLUGINS}:Nobody", {}, r"lessons\.source: .* has no 'Nobody'"),
        (f"{PLUGINS}:Remembers", {"sise": 3}, r"lessons\.source_options: unknown sise; Remembers takes size"),
        (f"{PLUGINS}:OnlySearches", {}, r"lessons\.source: expected a class .* without summarise, close"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(name, **options)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"source": "somewhere"}, "lessons.source: expected stage, or your own as module:Class .* got 'somewhere'"),
        ({"source": "package.module:"}, "got 'package.module:'"),
        ({"source_options": {"url": "x"}}, "lessons.source_options are for a source of your own"),
    ],
)
def test_run_files_that_name_no_source_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LessonsConfig(enabled=True, **section)


async def test_closing_is_given_up_and_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.lessons.store.CLOSE_SECONDS_MAX", 0.01)
    source = make(f"{PLUGINS}:Remembers")

    async def fail() -> None:
        raise KeyError("gone")

    with anyio.fail_after(60):
        source.close = anyio.sleep_forever
        await close_source(source)
        source.close = fail
        await close_source(source)
    assert "lesson source close failed with KeyError" in caplog.text
