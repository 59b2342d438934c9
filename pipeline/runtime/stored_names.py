"""Weights of a model by their names in files, where those are others than in the model.

transformers keeps the experts of a layer as one weight ``[E, …]``. In the files of a model, and for inference engines,
each expert has weights of its own. The *transforms* of a model (``get_model_conversion_mapping`` of transformers)
convert one into the other, and rename weights. They are called here for one group of weights after another, so that no
more than a group is converted at once. transformers is not imported: callers hand in what comes from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Mapper = Callable[..., Sequence[Any]]
"""``get_model_conversion_mapping`` of transformers."""


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that are converted together, and what they become."""

    names: tuple[str, ...]
    target: str
    """Name of the result; of several results the pattern of their names."""
    converter: Any = None
    """Transform with operations; None: the weight is the same under both names."""
    patterns: tuple[str, ...] = ()
    """The pattern of ``converter`` that each of ``names`` fits."""

    def converted(self, tensors: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """The results by name, from ``tensors`` by ``names`` or by some of them. They may be views."""
        if self.converter is None:
            return {self.target: tensors[self.names[0]]}
        converter = deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            if name in tensors:
                converter.add_tensor(self.target, name, pattern, tensors[name])
        results = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def written_groups(model: Any, names: Iterable[str], mapper: Mapper) -> list[Group]:
    """Groups of a model's weights that become weights of files, in the order of ``names``. The names in files are those
    of the folder that ``model`` was read from (``model._weight_conversions``)."""
    used = getattr(model, "_weight_conversions", None)
    if used is None:  # no file says whether names there begin with the prefixes that a transform removes
        used = [t for t in mapper(model, add_legacy=False) if not hasattr(t, "prefix_to_remove")]
    if not used:
        return [Group((name,), name) for name in names]
    converters, renamings = _divided(transform.reverse_transform() for transform in reversed(used))

    def renamed(name: str) -> tuple[str, Any, str]:
        converter, pattern = None, ""
        for transform in converters:
            name, found = transform.rename_source_key(name)
            if found is not None:
                converter, pattern = transform, found
                break
        for transform in renamings:
            name, _ = transform.rename_source_key(name)
        return name, converter, pattern

    return _grouped(names, renamed)


def read_groups(
    transforms: Sequence[Any], stored: Iterable[str], own: Collection[str], prefix: str | None = None
) -> list[Group]:
    """Groups of the weights of files, of the names ``stored``, that become weights of a model. Those for which ``own``
    has no name keep theirs. ``prefix``, of the base model, may be missing on either side.

    ``transforms`` know afterwards whether they were used (``was_used``).
    """
    converters, renamings = _divided(transforms)

    def placed(name: str) -> str:
        if name in own or prefix is None:
            return name
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return other if other in own else name

    def renamed(stored_name: str) -> tuple[str, Any, str]:
        name, converter, pattern = stored_name, None, ""
        for transform in renamings:
            name, _ = transform.rename_source_key(name)
        for transform in converters:
            name, found = transform.rename_source_key(name)
            if found is not None:
                converter, pattern = transform, found
                break
        if placed(name) not in own and placed(stored_name) in own:
            return placed(stored_name), None, ""
        return placed(name), converter, pattern

    return _grouped(stored, renamed)


def _divided(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Transforms with operations, of which one applies at most, and those that only rename."""
    found: tuple[list[Any], list[Any]] = [], []
    for transform in transforms:
        found[not hasattr(transform, "operations")].append(transform)
    return found


def _grouped(names: Iterable[str], renamed: Callable[[str], tuple[str, Any, str]]) -> list[Group]:
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    order = {name: i for i, name in enumerate(names)}
    for name in sorted(order, key=_numbers_in_order):
        target, converter, pattern = renamed(name)
        groups.setdefault(target, (converter, []))[1].append((name, pattern))
    found = [
        Group(tuple(name for name, _ in members), target, converter, tuple(pattern for _, pattern in members))
        for target, (converter, members) in groups.items()
    ]
    return sorted(found, key=lambda group: min(order[name] for name in group.names))


def _numbers_in_order(name: str) -> list[tuple[int, int, str]]:
    """Key by which ``experts.2`` precedes ``experts.10``: the operations stack weights in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
