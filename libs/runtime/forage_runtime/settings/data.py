"""Settings of the questions and the corpus."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue, field_validator, model_validator

from forage_runtime.settings.base import FunctionName, Section
from forage_runtime.text.chat_template import CLOCK

NOT_VARIABLES = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length messages"
    " padding return_assistant_tokens_mask return_dict return_tensors self tokenize"
    f" tokenizer_kwargs truncation {CLOCK}".split()
)
"""What `apply_chat_template` of transformers 5.19 takes itself, and what Forage gives to every template."""


class TrainFile(Section):
    """A Parquet file of training questions; a bare path is a file without a weight."""

    path: Path = Field(description="Parquet file in the Search-R1 layout")
    weight: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Share of all groups relative to the other files; null: questions of all files form one pool",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value


class DataSettings(Section):
    """Questions to train and validate on, and the corpus to search."""

    train_files: tuple[TrainFile, ...] = Field(
        (TrainFile(path=Path("data/world/train.parquet")),), description="Parquet files of training questions"
    )
    val_files: tuple[Path, ...] = Field(
        (Path("data/world/test.parquet"),), description="Parquet files of validation questions"
    )
    corpus: Path = Field(
        Path("data/world/corpus.jsonl"), description="Corpus file that the retriever indexes: JSON Lines or Parquet"
    )
    train_batch_size: int = Field(16, ge=1, description="Prompts (groups) of an optimizer step")
    sampler: FunctionName = Field(
        "",
        description="An order of the training questions of your own, FILE.py:FUNCTION or MODULE:FUNCTION; empty: a new "
        "permutation each epoch",
    )
    val_max_samples: int = Field(-1, description="Most validation questions that are used; -1: all")
    apply_chat_template_kwargs: Annotated[dict[str, JsonValue], "map of values"] = Field(
        default_factory=dict,
        description="Variables for the model's chat template, such as {enable_thinking: false}; `forage model check`"
        " lists those that it reads",
    )
    template_date: date | None = Field(
        None,
        description="Current date for a chat template that writes it into the prompt, YYYY-MM-DD; null: the day of the"
        " run's first start, also after a resume",
    )

    @property
    def train_paths(self) -> tuple[Path, ...]:
        """The training files."""
        return tuple(file.path for file in self.train_files)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """One weight per training file; empty if all questions form one pool."""
        return tuple(file.weight for file in self.train_files if file.weight is not None)

    @field_validator("apply_chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in variables:
            if name in NOT_VARIABLES:
                remedy = "set data.template_date" if name == CLOCK else "leave it out"
                raise ValueError(f"{name!r} is no variable of a template, Forage sets it: {remedy}")
        return variables

    @model_validator(mode="after")
    def _check_weights(self) -> DataSettings:
        if self.train_weights and len(self.train_weights) < len(self.train_files):
            without = next(file.path for file in self.train_files if file.weight is None)
            raise ValueError(f"train_files: {without} has no weight and others have: give all of them one, or none")
        return self
