"""What every section has in common: unknown keys are refused, values are bounded, nothing changes after loading."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the run file; the docstring under a field is its documentation (``afterplay config
    show``)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
