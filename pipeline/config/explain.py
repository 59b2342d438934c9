"""Resolves a configuration (fixed ports, absolute paths) and prints it as documented YAML."""

from __future__ import annotations

import random
import secrets
import socket
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from pipeline.config import load
from pipeline.config.rollouts import LEARNER_KEY, EngineConfig, EnvironmentConfig
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigurationError

SERVER_PORTS = 20_000, 65_536
"""Ports that a server may be given where none was asked for; the end is exclusive."""
ACTOR_KEY_FILE = "engine_actor.secret"
"""In the run directory: the key with which actors of the run may generate."""


def resolve(config: RunConfig, taken: Collection[int] | None = None) -> RunConfig:
    """A copy in which everything is fixed that several processes must know: the run's identity, the ports of the
    engines and of a replay stage on TCP, and where the engines' keys are. ``taken``: the ports in use on the nodes of
    the engines; None: they run on this machine.

    Metrics ports stay 0: each process takes a free one and writes it to the run directory. Paths become absolute, so
    that the resolved file is valid in any folder. Raises :class:`ConfigurationError` that names a port in use.
    """
    engine, stage = config.engine, config.stage
    if engine.kind != "external":
        _require_own_urls(engine)
    if engine.kind != "external" and not engine.urls:
        port = free_ports(engine.host, engine.replicas, taken or ()) if engine.port == 0 else engine.port
        if engine.port:
            for i in range(engine.replicas):
                _require_free(engine.host, port + i, f"engine.port (replica {i})", taken)
        engine = engine.model_copy(update={"port": port})
    if engine.kind != "external" and engine.actor_key is None:
        place = f"file:{config.run.path.absolute() / ACTOR_KEY_FILE}"
        engine = engine.model_copy(update={"actor_key": place, "learner_key": LEARNER_KEY})
    places = {name: getattr(engine, name) or "" for name in ("discovery", "actor_key", "learner_key")}
    files = {name: Path(place.removeprefix("file:")) for name, place in places.items() if place.startswith("file:")}
    engine = engine.model_copy(update={name: f"file:{p.expanduser().absolute()}" for name, p in files.items()})
    curve, store = (None if path is None else path.absolute() for path in (stage.curve, stage.store))
    stage = stage.model_copy(update={"address": _fixed(stage.address), "curve": curve, "store": store})
    if config.metrics.port:
        for i in range(2 + config.actor.replicas):
            _require_free(config.metrics.host, config.metrics.port + i, "metrics.port")
    identity = config.run.id or secrets.token_hex(4)
    run = config.run.model_copy(update={"id": identity, "directory": Path(config.run.directory).absolute()})
    environments = {name: _with_data_at_home(section) for name, section in config.environments.items()}
    supervised = config.loss.supervised
    if (file := supervised.demonstrations) is not None:
        supervised = supervised.model_copy(update={"demonstrations": file.absolute()})
    loss = config.loss.model_copy(update={"supervised": supervised})
    reference = config.learner.reference
    if (folder := reference.folder) is not None:
        reference = reference.model_copy(update={"folder": folder.absolute()})
    learner = config.learner.model_copy(update={"reference": reference})
    model = config.model
    if (template := model.chat_template) is not None:
        model = model.model_copy(update={"chat_template": str(Path(template).expanduser().absolute())})
    changed = {"engine": engine, "stage": stage, "run": run, "loss": loss, "environments": environments}
    return config.model_copy(update={**changed, "learner": learner, "model": model})


def _require_own_urls(engine: EngineConfig) -> None:
    """``engine.urls`` of engines that the run starts are where those will listen. Raises
    :class:`ConfigurationError`."""
    if engine.urls and len(engine.urls) != engine.replicas:
        raise ConfigurationError(
            f"engine.urls: expected one for each engine that the run starts (engine.replicas: {engine.replicas}), got "
            f"{len(engine.urls)}: omit engine.urls, or set engine.kind: external for engines that run already"
        )
    for i, url in enumerate(engine.urls if engine.port else ()):
        if urlsplit(url).port != engine.port + i:
            raise ConfigurationError(
                f"engine.urls: expected the port {engine.port + i} in the URL of engine {i} (engine.port + {i}), got "
                f"{url}: change one of them, or set engine.port: 0, so that each engine listens at its URL's port"
            )


def _fixed(address: str) -> str:
    """``stage.address`` with an absolute path, or a port that is free."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        return f"ipc://{Path(path).expanduser().absolute()}" if path else address
    host, port = split_address(address)
    if port:
        _require_free(host, port, "stage.address")
        return address
    return f"tcp://{bracketed(host)}:{free_ports(host, 1)}"


def _with_data_at_home(section: EnvironmentConfig) -> EnvironmentConfig:
    """A copy with absolute paths of its data."""
    data = section.tasks_from
    if data is None:
        return section
    splits = data.splits
    if data.path is None and data.name is None:
        splits = {name: str(Path(str(place)).expanduser().absolute()) for name, place in splits.items()}
    path = None if data.path is None else data.path.absolute()
    return section.model_copy(update={"tasks_from": data.model_copy(update={"path": path, "splits": splits})})


def split_address(address: str) -> tuple[str, int]:
    """``tcp://host:port`` as host and port. Raises :class:`ConfigurationError`."""
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(
            f"stage.address: expected ipc://, ipc://PATH or tcp://host:port, for example tcp://127.0.0.1:5555, got "
            f"{address!r}"
        )
    return host.strip("[]"), int(port)


def free_ports(host: str, count: int, taken: Collection[int] = ()) -> int:
    """First of ``count`` ports in a row that are free now and not in ``taken``, drawn at random. They are none of those
    that the system gives to outgoing connections: one of these would be taken before a server that starts slowly
    listens there. Raises :class:`ConfigurationError` after 50 tries."""
    first, end = SERVER_PORTS[0], min(SERVER_PORTS[1], _outgoing_ports()) - count
    for _ in range(50):
        port = random.SystemRandom().randrange(first, end) if first < end else _any_port(host)
        ports = range(port, port + count)
        if ports.stop <= 65536 and not any(p in taken for p in ports) and all(is_free(host, p) for p in ports):
            return port
    raise ConfigurationError(
        f"expected {count} consecutive free ports on {host}, found none: set engine.port and stage.address"
    )


def _outgoing_ports() -> int:
    """First of the ports that the system gives to outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 49152  # macOS, and RFC 6335


def _any_port(host: str) -> int:
    with _socket(host) as first:
        first.bind((host, 0))
        return int(first.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now."""
    try:
        with _socket(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError):
        return False
    return True


def taken_ports(host: str = "0.0.0.0") -> tuple[int, ...]:
    """The ports of this machine where no server could listen now, but for those that only root may bind."""
    return tuple(port for port in range(1024, 65_536) if not is_free(host, port))


def _require_free(host: str, port: int, key: str, taken: Collection[int] | None = None) -> None:
    if not is_free(host, port) if taken is None else port in taken:
        place = f"{host}:{port}" if taken is None else f"port {port} on each node of an engine"
        raise ConfigurationError(
            f"{key}: expected {place} to be free, but it is in use or may not be bound. "
            "Stop the process that listens there, choose another port, or set 0 for any free one"
        )


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def bracketed(host: str) -> str:
    """A host as it stands before the port in an address."""
    return f"[{host}]" if ":" in host else host


_WIDTH = 110


def show(config: RunConfig, plain: bool = False) -> str:
    """YAML that loads as an equal configuration; without ``plain``, every key has its docstring above it."""
    return load.dump(config) if plain else "\n".join(_section(config, 0)) + "\n"


def _section(model: BaseModel, depth: int) -> list[str]:
    lines: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        documentation = field.description or (type(value).__doc__ if isinstance(value, BaseModel) else "")
        if depth == 0 and lines:
            lines.append("")
        words = " ".join((documentation or "").replace("``", "").split())
        indent = "  " * depth
        lines += [f"{indent}# {line}" for line in textwrap.wrap(words, _WIDTH - len(indent) - 2)]
        lines += _entry(name, value, depth)
    for name, value in (model.model_extra or {}).items():
        lines += _entry(name, value, depth)
    return lines


def _entry(name: str, value: Any, depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(value, BaseModel):
        return [f"{indent}{name}:", *_section(value, depth + 1)]
    if isinstance(value, dict) and value and all(isinstance(v, BaseModel) for v in value.values()):
        keys = {load.dump_yaml({key: 0}).rsplit(":", 1)[0]: section for key, section in value.items()}
        return [f"{indent}{name}:", *(line for key, v in keys.items() for line in _entry(key, v, depth + 1))]
    if isinstance(value, tuple):
        value = [item.model_dump(mode="python") if isinstance(item, BaseModel) else item for item in value]
    text = load.dump_yaml({name: value}).rstrip("\n")
    return [indent + line if line else line for line in text.split("\n")]
