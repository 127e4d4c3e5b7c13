"""A Ray cluster that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forage_common.errors import UserError
from forage_common.settings import load_settings
from forage_trainer.__main__ import main


def test_an_address_without_ray_is_refused(monkeypatch: pytest.MonkeyPatch, free_address: Callable[[], str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    address = free_address()
    with pytest.raises(UserError, match=f"trainer.ray.address {address} cannot be joined .*Connection refused"):
        main(load_settings(None, [f"trainer.ray.address={address}"], {}))
