"""Base classes for sections of the run file: frozen models that refuse unknown keys, and a choice of one model by
name."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

NUMBERS = (int, float, int | None, float | None)


class Section(BaseModel):
    """A frozen section of the run file. The docstring under a field is its documentation, which ``afterplay config
    show`` prints."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """``values`` with one text as a list of it where a list is expected (``report_to: wandb``), and with ``true``
        as text where a number is: Python takes it for 1."""
        if not isinstance(values, dict):
            return values

        def meant(key: str, value: Any) -> Any:
            kind = cls.model_fields[key].annotation if key in cls.model_fields else None
            if isinstance(value, bool) and kind in NUMBERS:
                return str(value).lower()
            one = isinstance(value, str) and get_origin(kind) is tuple and get_args(kind)[1:] == (...,)
            return [value] if one else value

        return {key: meant(key, value) for key, value in values.items()}


Options = TypeVar("Options", bound=Section)


def expect_kind(options: object, kind: type[Options], key: str) -> Options:
    """``options`` as ``kind``. Raises :class:`TypeError` where another loss or estimator is chosen."""
    if not isinstance(options, kind):
        raise TypeError(f"expected {kind.__name__} as {key}, got {options!r}")
    return options


class Choice:
    """One of several sections, selected by its ``name``: ``Annotated[A | B, Choice("a")]``.

    ``policy: sapo`` is short for ``policy: {name: sapo}``. Without a name, ``default`` is chosen. A section whose
    ``name`` is any string takes the import path of the user's own function (``module:function``).
    """

    def __init__(self, default: str) -> None:
        self.default = default
        self.kinds: dict[str, type[Section]] = {}
        """By name; ``own`` is the section for import paths."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for kind in get_args(source):
            names = get_args(kind.model_fields["name"].annotation) or ("own",)
            self.kinds |= dict.fromkeys(names, kind)
        tagged = core_schema.tagged_union_schema(
            {name: handler.generate_schema(kind) for name, kind in self.kinds.items()}, discriminator=self._tag
        )
        return core_schema.no_info_before_validator_function(self._read, tagged)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the built-in sections."""
        return tuple(name for name in self.kinds if name != "own")

    def kind(self, value: Any) -> type[Section] | None:
        """The section that a value of the run file selects, or None if its name is unknown."""
        tag = self._tag(self.mapping(value))
        return None if tag is None else self.kinds.get(tag)

    def mapping(self, value: Any) -> Any:
        """``value`` as a mapping with an explicit name."""
        if isinstance(value, str):
            return {"name": value}
        return {"name": self.default, **value} if isinstance(value, dict) else value

    def _read(self, value: Any) -> Any:
        value = self.mapping(value)
        if self._tag(value) is None:
            own = ", or your own as module:function or file.py:function" if "own" in self.kinds else ""
            came = value.get("name") if isinstance(value, dict) else value
            raise ValueError(f"expected one of {', '.join(self.names)}{own}, got {came!r}")
        return value

    def _tag(self, value: Any) -> str | None:
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        if not isinstance(name, str):
            return None
        if name in self.names:
            return name
        file, colon, function = name.rpartition(":")
        return "own" if "own" in self.kinds and file and colon and function.isidentifier() else None
