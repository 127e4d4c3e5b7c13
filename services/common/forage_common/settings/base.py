"""The base of every section of the settings, and the types that sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Field


def _check_port(address: str) -> str:
    port = int(address.rpartition(":")[2])
    if port > 65535:
        raise ValueError(f"there is no port {port}: give one up to 65535")
    return address


# A string in the annotation names the type in descriptions.
Address = Annotated[str, Field(pattern=r"^[^:/\s]+:\d{1,5}$"), AfterValidator(_check_port), "host:port"]
# Whose parameters they are checks them, and names what it expected.
Params = Annotated[dict[str, Annotated[float, AllowInfNan(True)] | int | str | bool], "map of values"]

Device = Annotated[
    Literal["auto", "cpu", "gpu", "cuda"], AfterValidator(lambda device: "gpu" if device == "cuda" else device)
]
"""Where a service computes: auto, cpu or gpu; cuda is another word for gpu, and is read as such."""


class Section(BaseModel):
    """A node of the tree: immutable, closed to unknown keys, and without numbers that are infinite or none."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
