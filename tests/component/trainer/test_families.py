"""Every family of models that transformers knows is published as `save_pretrained` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_families import list_families
from published_family import check_published, publish_family


@pytest.mark.parametrize("kind", list_families())
def test_a_published_family_is_what_transformers_saves_and_reads(kind: str, tmp_path: Path) -> None:
    check_published(publish_family(kind, tmp_path), tmp_path)
