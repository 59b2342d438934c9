"""Loads run files: file, environment variables and ``--set`` become a :class:`RunConfig`; errors name the remedy.

Precedence, lowest first: the file, ``AFTERPLAY__SECTION__KEY=value``, ``--set section.key=value``. Values are YAML 1.2
without duplicate keys, not PyYAML's 1.1: ``1e-6`` is a number, only ``true`` and ``false`` are booleans, and dates are
strings. :func:`loads` reads the output of :func:`dump` as an equal configuration.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
import unicodedata
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.base import Choice, Options
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigurationError

Lines = dict[tuple[str | int, ...], int]
"""Path of keys and list positions to the line, from 1, where its value begins."""

_MERGE = "tag:yaml.org,2002:merge"
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    (_MERGE, r"^(?:<<)$", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own form)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks the keys as they are written, before those that ``<<`` merges come among them."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _refusal(key_node, f"expected a text as key, got {key!r}")
            if key in seen and key_node.tag != _MERGE:
                raise _refusal(
                    key_node, f"expected each key once, got {key!r} on line {seen[key]} and again on line {line}"
                )
            seen[key] = line
        return node

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        text = str(self.construct_scalar(node))  # JSON, which is YAML, may write one character as a pair of escapes
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text.lstrip("+-").startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escapes line separators that only YAML 1.1 knows: YAML 1.2 readers would replace them by spaces."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag in ("tag:yaml.org,2002:str", _MERGE):
    _Loader.add_constructor(_tag, _Loader.construct_yaml_str)


def _refusal(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_REMEDIES = {
    "<block end>": ": indent the keys of a section by the same number of spaces",
    "'\\t'": ": indent with spaces",
    "mapping values are not allowed here": ": write a text with ': ' in it in quotes, or indent as above",
}
"""Sentences for PyYAML's words."""


def parse_yaml(text: str, where: str) -> Any:
    """The value of a document. Raises :class:`ConfigurationError` that names ``where``, the line and the problem."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or str(error)
        if error.context and problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in problem), "")
        raise ConfigurationError(f"{where}{line}: {problem}{_look_alike(text, error) or remedy}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{where}: expected YAML, got {' '.join(str(error).split())}") from error


def _look_alike(text: str, error: yaml.MarkedYAMLError) -> str:
    """A question about a full-width sign or space where YAML failed, since it looks like one that YAML reads."""
    if error.problem_mark is None:
        return ""
    last = error.problem_mark.line
    first = error.context_mark.line if error.context_mark else max(last - 1, 0)
    for number, line in enumerate(text.split("\n")[first : last + 1], first + 1):
        for character in line:
            usual = unicodedata.normalize("NFKC", character)
            if usual != character and usual in set(":,{}[] "):
                return f"; is {character!r} on line {number} meant as {usual!r}?"
    return ""


def yaml_lines(text: str) -> Lines:
    """Line at which each value of a document begins. The document must parse. What is inside a value that has several
    aliases is found under the first of them."""
    found: Lines = {}
    walked: set[int] = set()

    def walk(node: yaml.Node | None, path: tuple[str | int, ...]) -> None:
        if id(node) in walked:
            return
        walked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[(*path, key.value)] = key.start_mark.line + 1
                walk(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                found[(*path, index)] = value.start_mark.line + 1
                walk(value, (*path, index))

    walk(yaml.compose(text, _Loader), ())
    return found


def dump_yaml(value: Any) -> str:
    """A document; paths become text, tuples lists."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def plain(value: Any) -> Any:
    """``value`` reduced to types that YAML has."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Each value of nested sections by its dotted key; an empty section is a value."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


ENVIRONMENT_PREFIX = "AFTERPLAY__"
Path_ = tuple[str | int, ...]


@dataclass(slots=True)
class _Sources:
    """The file, environment variable or option that each value came from."""

    file: str
    lines: Lines = field(default_factory=dict)
    overrides: dict[Path_, str] = field(default_factory=dict)

    def name(self, path: Path_) -> str:
        """Source of the value at ``path``, or of one within it that an override has put there."""
        within = [came for at, came in self.overrides.items() if len(path) > 1 and at[: len(path)] == path]
        if within:
            return within[-1]
        for length in range(len(path), 0, -1):
            part = path[:length]
            if part in self.overrides:
                return self.overrides[part]
            if part in self.lines:
                return f"{self.file}, line {self.lines[part]}"
        return self.file


def load(file: Path | str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> RunConfig:
    """Load the configuration of a run. ``file`` is a path, or ``@NAME`` for an example that ships with Afterplay.

    ``overrides`` are the arguments of ``--set``; ``environment`` defaults to ``os.environ``. Raises
    :class:`ConfigurationError` that lists every problem with its place, the expected value and the value that came.
    """
    path = Path(file)
    environment = os.environ if environment is None else environment
    if str(file).startswith("@"):
        return loads(example(str(file)[1:]), str(file), overrides, environment)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"expected a run file in UTF-8 at {path}, got: {error}: save it as UTF-8") from error
    except OSError as error:
        raise ConfigurationError(
            f"expected a run file at {path}, got: {error.strerror or error}. Give the path of a YAML file, or "
            "an example that ships with Afterplay, such as @tiny"
        ) from error
    return loads(text, str(path), overrides, environment)


def examples() -> Path:
    """Folder of the run files that ship with Afterplay: inside an installed package, or of the repository."""
    inside = Path(__file__).with_name("examples")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def example(name: str) -> str:
    """Text of the run file ``@name``. Its paths, which begin at the root of the repository, lead to the folder of the
    examples. Raises :class:`ConfigurationError` that lists the names."""
    folder = examples()
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in names:
        raise ConfigurationError(
            f"expected the name of a run file that ships with Afterplay, got @{name}; there are "
            + ", ".join(f"@{one}" for one in names)
        )
    return (folder / f"{name}.yaml").read_text(encoding="utf-8").replace("configs/", f"{folder}/")


def loads(
    text: str, name: str = "run file", overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """:func:`load` for a text in memory; ``name`` is used as the file name in messages."""
    data = parse_yaml(text, name)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigurationError(f"{name}: expected sections like 'run:' and 'engine:', got a {type(data).__name__}")
    sources = _Sources(name, yaml_lines(text))
    for key, value in sorted((environment or {}).items()):
        if key.startswith(ENVIRONMENT_PREFIX):
            parts = key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            place = f"environment variable {key}"
            _assign(data, parts, parse_yaml(value, place), place, sources)
    for override in overrides:
        key, value = read_override(override)
        place = f"--set {override}"
        _assign(data, key.split("."), parse_yaml(value, place), place, sources)
    data = {key: {} if value is None else value for key, value in data.items()}
    problems = _check_named(data, sources)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += [_describe(problem, sources) for problem in error.errors(include_url=False)]
    if problems:
        raise ConfigurationError("\n".join(dict.fromkeys(problems)))
    return config


def read_override(text: str) -> tuple[str, str]:
    """Key and value of one ``--set``. Raises :class:`ConfigurationError` for a text without ``=`` or a value, and for
    spaces around ``=``: a shell would have made several arguments of them.

    >>> read_override("run.seed=3")
    ('run.seed', '3')
    """
    key, _, value = text.partition("=")
    if key and value and key == key.strip() and value == value.lstrip():
        return key, value
    right = f"{key.strip() or 'learner.learning_rate'}={value.strip() or ('VALUE' if key.strip() else '1e-5')}"
    raise ConfigurationError(f"--set {text}: expected section.key=value without spaces around =, as in --set {right}")


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML that :func:`loads` reads as an equal one."""
    return dump_yaml(config.model_dump(mode="python"))


def _assign(data: dict[str, Any], parts: list[str], value: Any, place: str, sources: _Sources) -> None:
    """Set one value; missing sections are created."""
    if not all(parts):
        raise ConfigurationError(f"{place}: expected names between the separators, got {'.'.join(parts)!r}")
    at: Any = data
    path: Path_ = ()
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        key: str | int = part
        if isinstance(at, list):
            if not part.isdecimal() or int(part) >= len(at):
                raise ConfigurationError(
                    f"{place}: expected a position from 0 to {len(at) - 1} in {_dotted(path)}, got {part!r}"
                )
            key = int(part)
        elif isinstance(at, dict):  # as the file spells it: environment variables have no case
            key = part if part in at else next((k for k in at if k.lower() == part), part)
        else:
            raise ConfigurationError(f"{place}: expected {_dotted(path)} to be a section, got the value {at!r}")
        path = (*path, key)
        choice = choice_at(path)
        if following is None:
            at[key] = value
        elif choice is not None and isinstance(at, dict):
            at[key] = choice.mapping(at.get(key) or {})
        elif (at.get(key) if isinstance(at, dict) else at[typing.cast(int, key)]) is None:
            at[key] = {}
        if following is not None:
            at[key] = copy(at[key])  # another section may be an alias of this one
            at = at[key]
    sources.overrides[path] = place


def _check_named(data: dict[str, Any], sources: _Sources) -> list[str]:
    """An error message for a run file without environments, and for each environment without a name: a mistyped section
    name would otherwise add a task to the run."""
    if "environments" not in data:
        came = f"sections {', '.join(data)}" if data else "an empty file"
        return [
            f"{sources.file}: expected a section environments with what is trained, for example environments: "
            f"{{guess: {{name: number_guess}}}}, got {came}; @tiny is a whole run file"
        ]
    sections = data["environments"] if isinstance(data["environments"], dict) else {}
    named = [key for key, section in sections.items() if isinstance(section, dict) and "name" in section]
    problems = []
    for key in sections:
        path: Path_ = ("environments", key)
        if key in named or not isinstance(sections[key], dict | None):
            continue
        place = next((came for at, came in sources.overrides.items() if at[:2] == path), sources.name(path))
        problems.append(
            f"{place}: environments.{key} needs the name of an environment, for example name: number_guess"
            + (_suggestion(key, named, ("environments",)) if named else "")
        )
    return problems


def choice_at(path: Path_) -> Choice | None:
    """The :class:`Choice` at ``path``, or None if there is another kind of value."""
    model = model_at(RunConfig, path[:-1])
    found = model.model_fields.get(str(path[-1])) if model else None
    return next((item for item in found.metadata if isinstance(item, Choice)), None) if found else None


def _describe(problem: Any, sources: _Sources) -> str:
    """One line with the place, the key, the expected value, the value that came and the remedy."""
    path = tuple(problem["loc"])
    place = sources.name(path)
    if problem["type"] == "extra_forbidden":
        place = next((came for at, came in sources.overrides.items() if at[: len(path)] == path), place)
    return f"{place}: {sentence(problem, path, model_at(RunConfig, path[:-1]))}"


def sentence(problem: Any, path: Path_, model: type[BaseModel] | None = None) -> str:
    """The key, the expected value and the value that came, for a problem that pydantic found at ``path``."""
    key, kind = _dotted(path), problem["type"]
    if kind == "extra_forbidden":
        return f"unknown key {key}{_suggestion(str(path[-1]), list(model.model_fields) if model else [], path[:-1])}"
    came = "" if isinstance(problem["input"], dict | BaseModel) else f", got {_short(problem['input'])}"
    if kind in ("value_error", "assertion_error"):
        return f"{key + ': ' if key else ''}{problem['ctx']['error']}"
    if kind == "literal_error":
        return f"{key}: expected one of {problem['ctx']['expected']}{came}"
    if kind == "missing":
        return f"{key}: expected a value, got none"
    if kind in ("model_type", "dict_type"):
        return f"{key}: expected a section (keys and values){came}"
    if kind == "string_type" and isinstance(problem["input"], int | float):
        text = str(problem["input"]).lower() if isinstance(problem["input"], bool) else problem["input"]
        return f'{key}: expected text{came}: write it in quotes, "{text}", and in a shell \'"{text}"\''
    if kind.endswith("_type"):
        came = came or ", got a section"
    if kind in ("tuple_type", "path_type"):
        return f"{key}: expected a {'list' if kind == 'tuple_type' else 'path'}{came}"
    message = re.sub(r"^\w+ should (be |have )|^Value error, ", "", problem["msg"])
    message = message.replace("String should match pattern", "text of the form").replace(" after validation", "")
    return f"{key}: expected {message[0].lower() + message[1:]}{came}"


def reasons(error: ValidationError) -> str:
    """Problems of a configuration that was made from another one, in one line."""
    return "; ".join(sentence(problem, tuple(problem["loc"])) for problem in error.errors())


def read_options(given: Options, kinds: Mapping[str, type[Options]], key: str) -> Options:
    """A function of the run file with its options in the class that ``kinds`` has for its name; ``own`` is the class
    for import paths. Raises :class:`ConfigurationError`, a line for each problem, for a name that is not among
    ``kinds``, and for options that are unknown or wrong."""
    file, _, function = given.name.rpartition(":")
    kind = kinds.get("own" if file and function.isidentifier() else given.name)
    if kind is None:
        names = ", ".join(name for name in kinds if name != "own")
        own = ", or your own as module:function or file.py:function" if "own" in kinds else ""
        raise ConfigurationError(f"{key}: expected one of {names}{own}, got {given.name!r}")
    if isinstance(given, kind):
        return given
    try:
        return kind.model_validate(given.model_dump())
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [sentence(problem, (*key.split("."), *problem["loc"]), kind) for problem in problems]
        raise ConfigurationError("\n".join(lines)) from error


USUAL_NAMES = {
    "lr": "learner.learning_rate",
    "batch_size": "groups.groups_per_step",
    "train_batch_size": "groups.groups_per_step",
    "group_size": "groups.n_rollout",
    "num_generations": "groups.n_rollout",
    "num_iterations": "learner.epochs",
    "ppo_epochs": "learner.epochs",
    "max_grad_norm": "learner.grad_clip",
    "max_steps": "run.total_steps",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "temp": "sampling.temperature",
    "save_steps": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "model_name": "model.source",
    "model_name_or_path": "model.source",
    "trainer": "learner",
    "training": "learner",
}
"""Keys and sections of ours by the names that other trainers give them."""


def _suggestion(wrong: str, known: Sequence[str], section: Path_) -> str:
    if (ours := USUAL_NAMES.get(wrong.lower())) is not None:
        return f"; did you mean {ours}?"
    there = f"{_dotted(section) or 'the file'} has {', '.join(known)}" if known else ""
    models = {name: model_at(RunConfig, (name,)) for name in RunConfig.model_fields}
    namesakes = [f"{name}.{wrong}" for name, model in models.items() if model and wrong in model.model_fields]
    if namesakes:  # the same word may mean another thing there
        are = "is" if len(namesakes) == 1 else "are"
        return f"; there {are} {' and '.join(namesakes)}" + (f", and {there}" if there else "")
    close = difflib.get_close_matches(wrong.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {_dotted((*section, close[0]))}?"
    return f"; {there}" if there else ""


def model_at(model: type[BaseModel], path: Path_) -> type[BaseModel] | None:
    """The section at ``path``, or None if there is a value."""
    at: Any = model
    for key in path:
        if isinstance(at, type) and issubclass(at, BaseModel):
            found = at.model_fields.get(str(key))
            at = found.annotation if found else None
        else:
            arguments = typing.get_args(at)
            at = arguments[-1] if typing.get_origin(at) is dict else arguments[0] if arguments else None
        if typing.get_origin(at) in (UnionType, typing.Union):
            at = next((a for a in typing.get_args(at) if a is not type(None)), None)
    return at if isinstance(at, type) and issubclass(at, BaseModel) else None


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
