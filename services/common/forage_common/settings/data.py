"""Settings of the questions and the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from forage_common.settings.base import Section


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
    val_max_samples: int = Field(-1, description="Most validation questions that are used; -1: all")

    @property
    def train_paths(self) -> tuple[Path, ...]:
        """The training files."""
        return tuple(file.path for file in self.train_files)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """One weight per training file; empty if all questions form one pool."""
        return tuple(file.weight for file in self.train_files if file.weight is not None)

    @model_validator(mode="after")
    def _check_weights(self) -> DataSettings:
        if self.train_weights and len(self.train_weights) < len(self.train_files):
            without = next(file.path for file in self.train_files if file.weight is None)
            raise ValueError(f"train_files: {without} has no weight and others have: give all of them one, or none")
        return self
