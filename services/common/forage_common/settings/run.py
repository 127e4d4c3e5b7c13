"""Settings of the run as a whole: its name and folder, Redis, and the initial policy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from forage_common.settings.base import Section


class RunSettings(Section):
    id: str = Field("local", pattern=r"^[A-Za-z0-9._-]+$", description="names the run's folder and its keys in Redis")
    dir: Path = Field(Path("runs"), description="folder of run folders")
    seed: int = Field(0, ge=0)

    @property
    def folder(self) -> Path:
        return self.dir / self.id


class RedisSettings(Section):
    url: str = "redis://127.0.0.1:18600/0"
    password_file: Path | None = Field(None, description="file with the server's password, where the URL has none")
    timeout_s: float = Field(10.0, gt=0, description="of one command")
    reclaim_idle_s: float = Field(10.0, gt=0, description="a worker silent for so long loses its entries to another")


class ModelSettings(Section):
    path: Path = Field(Path("models/tiny-policy"), description="a Hugging Face folder: the initial policy")
