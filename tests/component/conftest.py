"""Authorities that issue certificates, for the components that speak TLS."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Issuer


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    folder = tmp_path / "authority"
    folder.mkdir()
    return Issuer(folder)


@pytest.fixture
def other(tmp_path: Path) -> Issuer:
    folder = tmp_path / "other"
    folder.mkdir()
    return Issuer(folder)
