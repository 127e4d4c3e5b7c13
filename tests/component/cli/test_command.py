"""The `forage` command as a process, and where it asks others: Redis, the driver of GPUs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import redis
from forage_command import RunForage, run_forage
from waiting import WAIT_S

from forage_queue.streams.client import StreamClient
from forage_runtime import __version__
from forage_runtime.settings import RedisSettings

__all__ = ["run_forage"]
FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


def test_the_exit_code_is_that_of_the_process() -> None:
    ended = subprocess.run([*FORAGE, "--version"], capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout) == (0, f"forage {__version__}\n")


def test_commands_that_need_services_say_so_where_the_command_alone_is_installed(
    tmp_path: Path, repository: Path
) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    shutil.copytree(repository / "cli/forage_cli", packages / "forage_cli")
    code = (
        "import sys\nfrom forage_cli.main import main\n"
        "for command in (['demo'], ['doctor'], ['reward', 'list']):\n"
        "    sys.argv = ['forage', *command]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        print(ended.code)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(packages)},
        timeout=WAIT_S,
    )
    assert ended.stdout.split() == ["2"] * 3
    lines = ended.stderr.splitlines()
    assert len(lines) == 3
    assert all("the command alone is installed" in line for line in lines)


def test_config_check_accepts_the_output_of_config_show_and_warns_of_a_small_redis(
    run_forage: RunForage, tmp_path: Path, repository: Path, redis_server: RedisSettings
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
    streams = StreamClient(redis_server, "default")
    streams.declare_environments({"world_facts": "single_turn"})
    streams._redis.persist(streams.key("environments"))  # however late the command looks
    arguments = ["-c", str(tmp_path / "s.yaml"), f"redis.url={redis_server.url}", "run.id=default"]
    checked = run_forage("config", "check", *arguments, "rollout.environments.typo.name=search")
    assert checked.code == 0, checked.stderr
    assert "Redis: groups take up to" in checked.stdout
    assert "warning: Redis has a maxmemory of 4 MiB" in checked.stderr
    assert "warning: rollout.environments.typo is for a data source that no question has" in checked.stderr
    assert "'world_facts' gets the environment 'single_turn' from the rollout service" in checked.stderr


def test_doctor_prints_what_is_missing_and_how_to_fix_it(run_forage: RunForage, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("model: {path: nowhere}\n")
    ended = run_forage("doctor", "-c", str(bad))
    assert ended.code == 1
    line = next(line for line in ended.stdout.splitlines() if "✗" in line)
    assert line.split()[1:3] == ["model", "nowhere"]
    assert "set model.path to" in " ".join(ended.stdout.split())


def test_the_command_imports_no_ml_library_before_it_needs_one() -> None:
    code = (
        "import sys; import forage_runtime.settings, forage_queue.streams.client, forage_cli.commands\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'pyarrow', 'babel', 'pycountry'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
