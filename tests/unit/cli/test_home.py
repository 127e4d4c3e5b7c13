"""Where the command finds services, recipes and models: in a checkout, from any folder, or in a wheel's archive."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from forage_cli.local import home
from forage_runtime.errors import UserError


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_package(folder: Path, name: str, **files: str) -> Path:
    """The package of a wheel, whose archive holds these files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / home.ARCHIVE).write_bytes(gzip.compress(content.getvalue()))
    (folder / home.DIGEST).write_text(f"{name}\n")
    return folder


def test_an_archive_is_unpacked_once_beside_those_of_other_versions(tmp_path: Path) -> None:
    package, data = tmp_path / "package", tmp_path / "data"
    first = home.unpack(write_package(package, "0.1-a", file="one"), data)
    assert (first.name, (first / "file").read_text()) == ("0.1-a", "one")
    (first / "made").touch()
    assert home.unpack(package, data) == first
    assert (first / "made").exists(), "what was installed there stays"
    second = home.unpack(write_package(package, "0.1-b", file="two"), data)
    assert (second / "file").read_text() == "two"
    assert {path.name for path in data.iterdir() if path.is_dir()} == {"0.1-a", "0.1-b"}


def test_an_archive_that_cannot_be_unpacked_leaves_nothing(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", "0.1-a", file="one")
    whole = (package / home.ARCHIVE).read_bytes()
    (package / home.ARCHIVE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises((EOFError, tarfile.TarError)):
        home.unpack(package, tmp_path / "data")
    assert [path for path in (tmp_path / "data").iterdir() if path.is_dir()] == []


def test_an_environment_whose_installation_was_interrupted_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "find_home", lambda: tmp_path)
    python = home.locate_interpreter("reward")
    python.parent.mkdir(parents=True)
    python.touch()
    assert not home.is_installed("reward")
    with pytest.raises(UserError, match=r"the reward environment is not installed .*: run 'make setup'"):
        home.find_interpreter("reward")
    (python.parents[1] / ".installed").touch()
    assert home.find_interpreter("reward") == python


def test_recipes_and_the_tiny_policy_are_found_from_any_folder(elsewhere: Path) -> None:
    settings = home.load_recipe(Path("configs/demo.yaml"), [])
    assert settings.model.path == home.find_home() / "models/tiny-policy"
    own = elsewhere / "models/tiny-policy"
    own.mkdir(parents=True)
    assert home.load_recipe(Path("configs/demo.yaml"), []).model.path == Path("models/tiny-policy"), "one's own first"
    assert home.load_recipe(None, ["model.path=models/mine"]).model.path == Path("models/mine")
    with pytest.raises(UserError, match=r"configs/none\.yaml"):
        home.load_recipe(Path("configs/none.yaml"), [])


def test_code_of_recipes_is_found_from_any_folder(elsewhere: Path) -> None:
    def find(*overrides: str) -> tuple[str, str]:
        settings = home.load_recipe(Path("configs/knowledge_graph.yaml"), list(overrides))
        return settings.rollout.environments["knowledge_graph"].name, settings.data.sampler

    shipped = home.find_home() / "examples/knowledge_graph/environment.py"
    assert find() == (f"{shipped}:KnowledgeGraph", "")
    assert find("data.sampler=examples/training/sampler.py:short_first")[1].startswith(f"{home.find_home()}/examples")
    assert find("data.sampler=mine.py:order")[1] == "mine.py:order"
    own = elsewhere / "examples/knowledge_graph/environment.py"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find()[0] == "examples/knowledge_graph/environment.py:KnowledgeGraph", "one's own first"


def test_the_command_that_installs_environments_is_that_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.describe_setup("gpu") == "'make setup DEVICE=gpu'"
    monkeypatch.setattr(home, "is_checkout", lambda: False)
    assert (home.describe_setup(), home.describe_setup("gpu")) == ("'forage setup'", "'forage setup --device gpu'")


def test_the_folder_of_a_wheel_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    monkeypatch.setenv(home.FOLDER_VARIABLE, "mine")
    assert home._find_data_folder() == elsewhere / "mine"
    monkeypatch.delenv(home.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert home._find_data_folder() == Path("/data/forage")
