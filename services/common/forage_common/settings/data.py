"""Settings of the questions and the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from forage_common.settings.base import Section


class TrainFile(Section):
    """A Parquet file of questions; a bare path is one without a weight."""

    path: Path
    weight: float | None = Field(None, gt=0, allow_inf_nan=False, description="share of all groups, relative to others")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value


class DataSettings(Section):
    train_files: tuple[TrainFile, ...] = (TrainFile(path=Path("data/world/train.parquet")),)
    val_files: tuple[Path, ...] = (Path("data/world/test.parquet"),)
    corpus: Path = Path("data/world/corpus.jsonl")
    train_batch_size: int = Field(16, ge=1, description="prompts (groups) an optimizer step")
    val_max_samples: int = Field(-1, description="-1 = all")

    @property
    def train_paths(self) -> tuple[Path, ...]:
        """The training files."""
        return tuple(file.path for file in self.train_files)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """One weight a training file; none where all questions are one pool."""
        return tuple(file.weight for file in self.train_files if file.weight is not None)

    @model_validator(mode="after")
    def _weighted(self) -> DataSettings:
        if self.train_weights and len(self.train_weights) < len(self.train_files):
            without = next(file.path for file in self.train_files if file.weight is None)
            raise ValueError(f"train_files: {without} has no weight and others have: give all of them one, or none")
        return self
