"""Starting vLLM in two processes, with stand-ins for its modules."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actors.servers import api_server


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """``name`` and its packages as modules; the last one with ``content``."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:i]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(module).update(content)
    return module


class Lazy:
    """A model that vLLM's registry has not imported."""

    def __init__(self, found: object) -> None:
        self._found = found

    def load_model_cls(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_the_class_of_the_model_is_imported_and_others_are_left_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Lazy(ImportError("no kernel"))
    models: dict[str, object] = {"LlamaForCausalLM": Lazy("the class"), "Broken": broken}
    registry = SimpleNamespace(models=models, register_model=models.__setitem__)
    stand_in(monkeypatch, "vllm.model_executor.models.registry", ModelRegistry=registry)
    names = ["LlamaForCausalLM", "Broken", "Unknown"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    api_server.register_model_classes(tmp_path)
    assert models == {"LlamaForCausalLM": "the class", "Broken": broken}
    (tmp_path / "config.json").write_text("{}")
    api_server.register_model_classes(tmp_path)


def test_the_engine_core_is_forked_and_its_signals_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook["after_in_child"]))
    utils = stand_in(monkeypatch, "vllm.v1.engine.utils", get_mp_context=None)
    api_server.fork_engine_core()
    assert utils.get_mp_context().get_start_method() == "fork"
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    [hook] = hooks
    hook()
    assert signal.set_wakeup_fd(before) == -1
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_everything_is_imported_before_the_model_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    done: list[str] = []
    server = SimpleNamespace(main=lambda: done.append("serve"))
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    stand_in(monkeypatch, "vllm.platforms", current_platform=platform)

    def import_module(name: str) -> object:
        done.append(name)
        return server

    monkeypatch.setattr(api_server.importlib, "import_module", import_module)
    for name in ("await_model", "register_model_classes", "fork_engine_core"):
        monkeypatch.setattr(api_server, name, lambda *folder, name=name: done.append(name))
    api_server.main(["--model", str(tmp_path), "--port", "1"])
    if on_cpu:
        expected = [*api_server.ENGINE, "fork_engine_core", api_server.SERVER, "await_model", "register_model_classes"]
    else:
        expected = [api_server.SERVER, "await_model"]
    assert done == [*expected, "serve"]


def test_on_another_node_of_an_engine_only_its_workers_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    stand_in(monkeypatch, "vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False))
    stand_in(monkeypatch, "vllm.entrypoints.serve.utils.api_utils", cli_env_setup=lambda: done.append("environment"))
    parser = SimpleNamespace(parse_args=lambda arguments: ("parsed", *arguments))
    stand_in(
        monkeypatch,
        api_server.WORKERS,
        FlexibleArgumentParser=lambda: "empty",
        make_arg_parser=lambda empty: parser,
        ServeSubcommand=SimpleNamespace(cmd=done.append),
    )
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--nnodes=2", "--node-rank=1", "--headless"]
    api_server.main(arguments)
    assert done == ["environment", ("parsed", *arguments)]
