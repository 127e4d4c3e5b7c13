"""Folders of published policies, which are served by themselves: every file in them is signed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from key_pairs import make_keys, make_signatures
from policy_files import Publications

from forage_runtime.errors import DataError
from forage_runtime.settings import SecuritySettings
from forage_weights.folders import SIGNED, open_whole, write_description
from forage_weights.signed_folder import sign_folder, verify_published


class Run:
    """A run with two versions: a whole one and a delta."""

    def __init__(self, folder: Path, name: str = "run") -> None:
        self.security = make_keys(folder / "keys")
        self.policies = folder / name / "policies"
        signatures = make_signatures(folder / "keys", name)
        published = Publications(str(folder / "published"), folder / "scratch")
        for version in (1, 2):
            policy = published.publish()
            target = self.policies / f"v{version}-e1"
            shutil.copytree(folder / f"published/v{version}", target)
            for part in policy.parts:
                part.uri = f"/elsewhere/v{part.version}-e1"
            if version == 1:
                for text in ("config.json", "tokenizer.json"):
                    (target / text).write_text("{}")
            write_description(target, policy)
            sign_folder(target, policy, signatures)

    def verify(self, version: int, security: SecuritySettings | None = None) -> str:
        folder = self.policies / f"v{version}-e1"
        return verify_published(folder, open_whole(folder), security or self.security)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_signed_policy_and_a_delta_are_named_by_their_key(run: Run, tmp_path: Path) -> None:
    key = make_signatures(tmp_path / "keys").key_id
    assert run.verify(1) == run.verify(2) == key
    whole = run.policies / "whole-v2-e1"
    assert not (whole / SIGNED).exists()
    assert verify_published(whole, whole, run.security) == key


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def swap(file: Path) -> None:
    other = file.with_name("b.safetensors" if file.name[0] == "a" else "a.safetensors")
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def add(file: Path) -> None:
    file.with_name("chat_template.jinja").write_text("{{ x }}")


def link(file: Path) -> None:
    file.with_name("more").symlink_to(file)


@pytest.mark.parametrize(
    ("version", "name", "change", "sentence"),
    [
        (1, "a.safetensors", append, "a.safetensors was changed since it was signed"),
        (1, "a.safetensors", truncate, "a.safetensors was changed"),
        (1, "a.safetensors", swap, "a.safetensors was changed"),
        (1, "config.json", append, "config.json was changed"),
        (1, "config.json", Path.unlink, "config.json is missing"),
        (1, "config.json", add, "chat_template.jinja was added since it was signed"),
        (1, "config.json", link, "more was added"),
        (1, SIGNED, halve, "signed.json is damaged"),
        (1, SIGNED, Path.unlink, "is not signed, and security.require_signed is set"),
        (2, "delta", append, "delta was changed"),
        (2, "policy.json", append, "policy.json was changed"),
        (2, "../v1-e1/config.json", append, "config.json was changed"),
        (2, "../whole-v2-e1/config.json", append, "config.json was changed"),
        (2, "../whole-v2-e1/config.json", add, "chat_template.jinja was added"),
        (2, "../whole-v2-e1/a.safetensors", truncate, "a.safetensors has .* announced were"),
        (2, "../whole-v2-e1/a.safetensors", swap, "a.safetensors does not have the digest"),
        (2, "../v1-e1/signed.json", Path.unlink, "v1-e1 is not signed"),
    ],
)
def test_whatever_is_changed_in_a_folder_it_is_refused(
    version: int, name: str, change: Callable[[Path], None], sentence: str, run: Run
) -> None:
    folder = run.policies / f"v{version}-e1"
    whole = open_whole(folder)
    change(folder / name)
    with pytest.raises(DataError, match=rf"is refused: .*({sentence})"):
        verify_published(folder, whole, run.security)


def test_a_version_under_another_name_or_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    (run.policies / "v1-e1").rename(run.policies / "v9-e1")
    with pytest.raises(DataError, match=r"signed as version 1 of epoch 1, and its name is v9-e1"):
        run.verify(9)
    (tmp_path / "run").rename(tmp_path / "copy")
    run.policies = tmp_path / "copy/policies"
    with pytest.raises(DataError, match=r"has signed for run 'copy'"):
        run.verify(9)


def test_a_changed_list_is_refused(run: Run) -> None:
    file = run.policies / "v1-e1" / SIGNED
    signed = json.loads(file.read_text())
    for files in ({"../x": "0" * 64}, {"a": "x"}, [], None):
        file.write_text(json.dumps(signed | {"files": files}))
        with pytest.raises(DataError, match=r"signed.json is damaged"):
            run.verify(1)
    for change in ({"version": 2}, {"epoch": 0}, {"files": {}}, {"signature": "x"}):
        file.write_text(json.dumps(signed | change))
        with pytest.raises(DataError, match=r"has a damaged signature|is not what the key"):
            run.verify(1)


def test_unsigned_policies_are_refused_only_where_signatures_are_required(run: Run, tmp_path: Path) -> None:
    for version in (1, 2):
        (run.policies / f"v{version}-e1" / SIGNED).unlink()
    lenient = make_keys(tmp_path / "keys", require_signed=False)
    assert run.verify(1, lenient) == run.verify(2, lenient) == ""
    assert run.verify(1, SecuritySettings()) == ""
    with pytest.raises(DataError, match=r"is not signed"):
        run.verify(2)
    own = shutil.copytree(run.policies / "v1-e1", tmp_path / "my-model")
    assert verify_published(own, own, run.security) == ""  # of no run: the user has named it


def test_a_link_in_a_run_is_verified_as_what_it_is_called(run: Run, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(run.policies / "v1-e1", foreign)
    (foreign / SIGNED).unlink()
    (run.policies / "v7-e1").symlink_to(foreign)
    with pytest.raises(DataError, match=r"is not signed"):
        run.verify(7)
    other = Run(tmp_path / "others", "other")
    (run.policies / "v8-e1").symlink_to(other.policies / "v1-e1")
    with pytest.raises(DataError, match=r"is refused"):
        run.verify(8)
    shutil.rmtree(run.policies)
    (tmp_path / "parts").mkdir()
    shutil.copytree(foreign, tmp_path / "parts/v9-e1")
    run.policies.symlink_to(tmp_path / "parts")
    with pytest.raises(DataError, match=r"is not signed"):
        run.verify(9)


def test_links_to_a_run_and_to_its_policies_are_followed(run: Run, tmp_path: Path) -> None:
    key = make_signatures(tmp_path / "keys").key_id
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    (tmp_path / "mine").symlink_to(run.policies / "v1-e1")
    for folder in (tmp_path / "latest/policies/v1-e1", tmp_path / "mine"):
        assert verify_published(folder, folder, run.security) == key


def test_a_whole_folder_beside_a_version_that_is_no_delta_is_refused(run: Run) -> None:
    whole = run.policies / "whole-v1-e1"
    shutil.copytree(run.policies / "v1-e1", whole)
    with pytest.raises(DataError, match=r"it is no delta"):
        verify_published(whole, whole, run.security)
