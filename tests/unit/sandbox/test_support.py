"""What a machine can take from user code, against what the settings ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from forage_runtime.errors import SettingsError
from forage_runtime.settings import UserReward
from forage_runtime.settings.security import Sandbox, UserCode
from forage_runtime.telemetry.health import Health
from forage_sandbox import support
from forage_sandbox.support import Support

OPEN = Support(0, True, {"files": "no Landlock"})


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_service_says_which_protections_its_user_code_lacks(mode: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"mine": UserReward(function="mine.py:score")}
    monkeypatch.setattr(support, "find_support", lambda: Support(6, True))
    assert support.list_notes(user, "auto") == {}
    monkeypatch.setattr(support, "find_support", lambda: OPEN)
    assert support.list_notes({}, mode) == {}
    note = support.list_notes(user, mode)["user code"]
    assert ("files open (no Landlock)" if mode == "auto" else "security.user_code is off") in note
    health = Health()
    health.add_lasting_note("user code", note)
    health.set_notes({"redis": "slow"})
    assert health.notes == {"user code": note, "redis": "slow"}


def test_what_is_required_and_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_support", lambda: OPEN)
    with pytest.raises(SettingsError, match=r"is require, .*\(files would be open: no Landlock\).*=auto"):
        support.choose("require")
    assert support.choose("auto") is OPEN
    assert support.choose("off") is None


def test_a_confinement_has_what_its_section_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_support", lambda: Support(4, True))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    built = support.build_confinement("reward.user.a", UserCode(read=(tmp_path / "link",), network=True), 512, "auto")
    assert built.read == (str(tmp_path / "real"),)  # the kernel's rules hold for what a link points to
    assert (built.network, built.programs, built.write, built.memory_mib) == (True, False, (), 512)
    assert (built.landlock, built.seccomp, built.is_on) == (4, True, True)
    off = support.build_confinement("reward.user.a", UserCode(), 512, "off")
    assert (off.landlock, off.seccomp, off.is_on) == (0, False, False)
