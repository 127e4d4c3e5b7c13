"""The base of every section of the settings, and the types that sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field

# A string in the annotation names the type in descriptions.
Address = Annotated[str, Field(pattern=r"^[^:/\s]+:\d{1,5}$"), "host:port"]
# Whose parameters they are checks them, and names what it expected.
Params = Annotated[dict[str, Annotated[float, AllowInfNan(True)] | int | str | bool], "map of values"]

Device = Literal["auto", "cpu", "gpu"]


class Section(BaseModel):
    """A node of the tree: immutable, closed to unknown keys, and without numbers that are infinite or none."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
