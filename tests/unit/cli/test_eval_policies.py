"""What --policy may name, and which of them one engine can serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forage_cli.evaluation.policies import Kind, by_engine, digest, distinct, resolve, untrained
from forage_common.errors import DataError, UserError
from forage_common.settings import Settings


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Path:
    """A run that has published versions 3, 10 and, under a second trainer, 10 and 11; 10 was best."""
    folder = tmp_path / "my-run"
    for name in ("v3-e1", "v10-e1", "v10-e2", "v11-e2"):
        shutil.copytree(repository / "models/tiny-policy", folder / "policies" / name)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/best").write_text("step_10\n")
    settings = Settings()
    model = settings.model.model_copy(update={"path": repository / "models/tiny-policy"})
    (folder / "settings.yaml").write_text(settings.model_copy(update={"model": model}).to_yaml())
    return folder


@pytest.mark.parametrize(
    ("version", "folder", "label"),
    [
        ("latest", "v11-e2", "my-run@11"),
        ("best", "v10-e2", "my-run@10"),
        ("10", "v10-e2", "my-run@10"),
        ("3", "v3-e1", "my-run@3"),
    ],
)
def test_a_runs_versions_are_found(run: Path, version: str, folder: str, label: str) -> None:
    found = resolve(f"{run}@{version}")
    assert (found.kind, found.folder, found.label) == (Kind.FOLDER, run / "policies" / folder, label)
    assert resolve(f"after={run}@{version}").label == "after"


def test_what_a_run_has_not_kept_names_the_way_to_it(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"policy 4 \(versions that are there: 3, 10, 11\).*forage trainer export"):
        resolve(f"{run}@4")
    shutil.rmtree(run / "policies/v10-e1")
    shutil.rmtree(run / "policies/v10-e2")
    with pytest.raises(DataError, match="FOLDER --best"):
        resolve(f"{run}@best")
    (run / "checkpoints/best").unlink()
    with pytest.raises(DataError, match="names no best checkpoint"):
        resolve(f"{run}@best")
    with pytest.raises(UserError, match=r"is a run: say which version, for instance .*my-run@latest"):
        resolve(str(run))
    with pytest.raises(DataError, match="is not a run"):
        resolve(f"{tmp_path}@latest")
    (tmp_path / "weights").mkdir()
    with pytest.raises(DataError, match=r"has no readable config\.json"):
        resolve(str(tmp_path / "weights"))


def test_endpoints_and_what_runs() -> None:
    remote = resolve("https://host:8000/v1/")
    assert (remote.kind, remote.url, remote.label) == (Kind.ENDPOINT, "https://host:8000/v1", "host-8000")
    assert resolve("big=http://host/v1").label == "big"
    assert (resolve("running").kind, resolve("now=running").label) == (Kind.RUNNING, "now")


def test_the_untrained_policy_is_that_of_the_run(run: Path, repository: Path) -> None:
    trained = resolve(f"{run}@latest")
    found = untrained([trained], None)
    assert (found.label, found.folder) == ("untrained", repository / "models/tiny-policy")
    assert untrained([trained], run / "policies/v3-e1").folder == run / "policies/v3-e1"
    with pytest.raises(UserError, match="give --untrained FOLDER"):
        untrained([resolve("http://host/v1")], None)
    with pytest.raises(UserError, match="two policies are called 'untrained'"):
        distinct([found, replace(trained, label="untrained")])


def _wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))


def _other_words(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def _other_weights(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(weights))


@pytest.mark.parametrize(("change", "engines"), [(_wider, 2), (_other_words, 2), (_other_weights, 1)])
def test_an_engine_serves_what_differs_in_weights_alone(
    run: Path, change: Callable[[Path], None], engines: int
) -> None:
    one, other = resolve(f"{run}@10"), resolve(f"{run}@11")
    assert one.digest == other.digest
    assert other.folder is not None
    change(other.folder)
    assert digest(other.folder) != one.digest
    assert len(by_engine([one, other])) == engines
    assert len(by_engine([one, other, resolve("http://host/v1"), resolve("http://other/v1")])) == engines + 2
