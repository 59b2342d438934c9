"""Base classes for sections of the run file: frozen models that refuse unknown keys, and functions with options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, SerializeAsAny, model_validator
from pydantic_core import CoreSchema, core_schema

NUMBERS = (int, float, int | None, float | None)
PATHS = (Path, Path | None)


class Section(BaseModel):
    """A frozen section of the run file. The docstring under a field is its documentation, which ``afterplay config
    show`` prints."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """``values`` with one text as a list of it where a list is expected (``report_to: wandb``), with ``true`` as
        text where a number is, because Python takes it for 1, and with the home folder for the ``~`` of a path."""
        if not isinstance(values, dict):
            return values

        def meant(key: str, value: Any) -> Any:
            kind = cls.model_fields[key].annotation if key in cls.model_fields else None
            if isinstance(value, bool) and kind in NUMBERS:
                return str(value).lower()
            if isinstance(value, str | Path) and kind in PATHS:
                return os.path.expanduser(value)
            one = isinstance(value, str) and get_origin(kind) is tuple and get_args(kind)[1:] == (...,)
            return [value] if one else value

        return {key: meant(key, value) for key, value in values.items()}

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise :class:`ValueError`, with the remedy, where keys contradict each other."""


class Options(Section):
    """A function with options of its own, which stand beside its ``name`` in the run file: ``{name: sapo, negative:
    1.1}``. Each function has a subclass next to it in the learner; so may a function of your own."""

    name: str


class Given(Options, extra="allow"):
    """A function and its options as the run file has them. The learner checks them (``learner.process.preflight``)."""


Kind = TypeVar("Kind", bound=Options)


def expect_kind(options: object, kind: type[Kind], key: str) -> Kind:
    """``options`` as ``kind``. Raises :class:`TypeError` where another loss or estimator is chosen."""
    if not isinstance(options, kind):
        raise TypeError(f"expected {kind.__name__} as {key}, got {options!r}")
    return options


def by_name(*kinds: type[Options]) -> dict[str, type[Options]]:
    """The classes by the names of their functions. A class whose ``name`` may be any text is that of import paths, and
    stands under ``own``."""
    return {name: kind for kind in kinds for name in get_args(kind.model_fields["name"].annotation) or ("own",)}


class Choice:
    """A function by its name, or with its options: ``Annotated[Function, Choice("a")]``.

    ``policy: sapo`` is short for ``policy: {name: sapo}``. Without a name, ``default`` is chosen.
    """

    def __init__(self, default: str) -> None:
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def mapping(self, value: Any) -> Any:
        """``value`` as a mapping with an explicit name."""
        if isinstance(value, str):
            return {"name": value}
        return {"name": self.default, **value} if isinstance(value, dict) else value

    def _read(self, value: Any) -> Any:
        value = self.mapping(value)
        if isinstance(value, Options):
            return value
        if not isinstance(value, dict) or not isinstance(value["name"], str):
            raise ValueError(f"expected the name of a function, or {{name: NAME, OPTION: VALUE}}, got {value!r:.80}")
        return Given.model_validate(value)


Function = SerializeAsAny[Options]
