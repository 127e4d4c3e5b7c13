"""The `forage` command: its help, version and settings; bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from forage_cli.settings_reference import describe_settings, explain_setting
from forage_common import __version__
from forage_common.settings import RedisSettings
from forage_common.streams.client import StreamClient

FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


def run_forage(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORAGE, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd)


def test_help_lists_every_command() -> None:
    text = run_forage("--help").stdout
    for command in ("demo", "up", "ask", "trajectories", "status", "config", "doctor", "data", "reward"):
        assert f" {command} " in text


@pytest.mark.parametrize("service", ["retriever", "reward", "rollout", "trainer"])
def test_a_service_prints_its_usage(repository: Path, service: str) -> None:
    command = [repository / f".venvs/{service}/bin/python", "-m", f"forage_{service}", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"`python -m forage_{service} [--config FILE]")
    assert "FORAGE__RUN__SEED=1" in ended.stdout


def test_version_is_that_of_the_project() -> None:
    assert run_forage("--version").stdout == f"forage {__version__}\n"


def test_config_explain_prints_type_default_description_and_value() -> None:
    ended = run_forage("config", "explain", "trainer.max_staleness", "trainer.max_staleness=3")
    name, summary, description = ended.stdout.splitlines()[:3]
    assert name == "trainer.max_staleness = 3"
    assert summary.strip() == "integer ≥ 0, default 1"
    assert len(description) > 20


def test_config_explain_prints_every_setting_of_a_section() -> None:
    text = run_forage("config", "explain", "rollout.engine").stdout
    names = {line.partition(" =")[0] for line in text.splitlines() if line.startswith("rollout.")}
    assert names == {setting.name for setting in explain_setting("rollout.engine")}
    assert "rollout.engine.max_model_len" in names


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "explain", "redis.url"]])
def test_passwords_in_urls_are_not_printed(arguments: list[str]) -> None:
    text = run_forage(*arguments, "redis.url=redis://forage:secret-word@host:6379/0").stdout
    assert "redis://***@host:6379/0" in text
    refused = run_forage(*arguments, "redis.url=http://forage:secret-word@host")
    assert "secret-word" not in text + refused.stderr
    assert "redis.url" in refused.stderr


def test_config_show_explains_every_setting() -> None:
    text = run_forage("config", "show", "--explain").stdout
    assert all(f"\n{setting.name} = " in f"\n{text}" for setting in describe_settings())


@pytest.mark.parametrize("command", [["demo"], ["doctor"], ["reward", "list"]])
def test_commands_that_need_a_checkout_say_so_when_installed_from_a_wheel(
    tmp_path: Path, repository: Path, command: list[str]
) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    shutil.copytree(repository / "services/cli/forage_cli", packages / "forage_cli")
    ended = subprocess.run(
        [*FORAGE, *command], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(packages)}, timeout=60
    )
    assert ended.returncode == 2
    assert "this command needs a checkout of Forage" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["config", "check", "trainer.totl=1"], "unknown setting 'trainer.totl'"),
        (["config", "show", "-c", "none.yaml"], "none.yaml cannot be read"),
        (["config", "explain", "trainer.max_stale"], "'trainer.max_stale': did you mean 'trainer.max_staleness'?"),
        (["config", "check", "model.path=nowhere"], "model.path nowhere does not exist"),
        (["demo", "rollout.nn=1"], "unknown setting 'rollout.nn': did you mean 'n'?"),
        (["demo", "--resume"], "there is no run to resume"),
        (["trajectories", "nothing"], "nothing is not a run"),
        (["trajectories", "[bold]x[/y]"], "[bold]x[/y] is not a run"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    ended = run_forage(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_config_check_accepts_the_output_of_config_show_and_warns_of_a_small_redis(
    tmp_path: Path, repository: Path, redis_server: RedisSettings
) -> None:
    from forage_cli.datasets.world.write import build_world

    build_world(tmp_path / "world", 0)
    files = [
        f"data.{kind}_files=[{tmp_path}/world/{name}.parquet]" for kind, name in (("train", "train"), ("val", "test"))
    ]
    model = f"model.path={repository}/models/tiny-policy"
    shown = run_forage("config", "show", *files, model, f"data.corpus={tmp_path}/world/corpus.jsonl")
    (tmp_path / "s.yaml").write_text(shown.stdout)
    redis.Redis.from_url(redis_server.url).config_set("maxmemory", "4mb")
    StreamClient(redis_server, "default").declare_environments({"world_facts": "single_turn"})
    arguments = ["-c", str(tmp_path / "s.yaml"), f"redis.url={redis_server.url}", "run.id=default"]
    checked = run_forage("config", "check", *arguments, "rollout.environments.typo.name=search")
    assert checked.returncode == 0, checked.stderr
    assert "Redis: groups take up to" in checked.stdout
    assert "warning: Redis has a maxmemory of 4 MiB" in checked.stderr
    assert "warning: rollout.environments.typo is for a data source that no question has" in checked.stderr
    assert "'world_facts' gets the environment 'single_turn' from the rollout service" in checked.stderr


def test_doctor_prints_what_is_missing_and_how_to_fix_it(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: {path: nowhere}\n")
    ended = run_forage("doctor", "-c", str(bad))
    assert ended.returncode == 1
    line = next(line for line in ended.stdout.splitlines() if "✗" in line)
    assert line.split()[1:3] == ["model", "nowhere"]
    assert "set model.path to" in " ".join(ended.stdout.split())


def test_the_command_imports_no_ml_library_before_it_needs_one() -> None:
    code = (
        "import sys; import forage_common.settings, forage_common.streams.client, forage_cli.commands\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'pyarrow', 'babel', 'pycountry'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_found_by_a_service_ends_the_demo_and_leaves_no_run_folder(
    tmp_path: Path, repository: Path, free_base_port: Callable[[], int]
) -> None:
    options = ["--base-port", str(free_base_port()), f"run.dir={tmp_path}/runs"]
    ended = run_forage("demo", *options, "reward.routes.world_facts.name=exact", cwd=repository)
    assert ended.returncode == 2
    assert "reward.routes.world_facts asks for the reward 'exact', which does not exist" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == [], "no file is left"
