"""What several pages share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Place = Annotated[
    str,
    Field(
        description="file of a trajectory: step-<n>, or a validation's label (validation-step-<n> after step n)",
        examples=["step-10"],
    ),
]
RowNumber = Annotated[int, Field(ge=0, description="number of a trajectory in its file, from 0")]
Count = Annotated[int, Field(ge=0, lt=2**53, description="a number that JavaScript has, too")]
UnixSeconds = Annotated[float, Field(description="seconds since 1970")]


class Model(BaseModel):
    """A reply, or a part of one; its fields are all present, unknown values are null."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class Problem(Model):
    """An error: one sentence with the remedy."""

    detail: str


class Estimate(Model):
    """A mean with its 95 % bootstrap interval over questions."""

    mean: float
    low: float
    high: float
    count: int


class Author(StrEnum):
    """The author of a text; `opening` is what the chat template wrote in the model's name."""

    PROMPT = "prompt"
    OPENING = "opening"
    MODEL = "model"
    ENV = "env"


class GroupState(StrEnum):
    """What became of a group of a step."""

    TRAINED = "trained"
    DEAD = "dead"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"


class SortOrder(StrEnum):
    ASCENDING = "ascending"
    DESCENDING = "descending"
