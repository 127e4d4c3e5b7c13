"""The users of the Redis that a stack starts, and those that `forage redis` makes for another server."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis_process import DURABLE, serve
from redis_stack import open_streams, run_forage, settings, stack
from typer.testing import CliRunner
from waiting import wait_until

from forage_cli.local.redis import users as redis_users
from forage_cli.local.redis.memory import check_redis
from forage_cli.local.stack import Program, Stack
from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import Policy, Prompt
from forage_queue.streams.client import StreamClient
from forage_queue.streams.durability import check_durability
from forage_queue.streams.users import SERVICES, Role, name_user
from forage_runtime.errors import SettingsError, UserError
from forage_runtime.settings import Settings, load_settings

__all__ = ["settings", "stack"]


def test_everybody_needs_a_user_and_each_program_has_its_own(stack: Stack, settings: Settings) -> None:
    client = open_streams(stack.settings)
    client.create_groups()
    client.publish(Policy(version=1, epoch=client.acquire_epoch()))
    with pytest.raises(SettingsError, match="refuses this client"):
        StreamClient(settings.redis, "own", patience_s=1).ping()
    rollout = open_streams(stack.log_in(Role.ROLLOUT))
    assert rollout.read_policy() == client.read_policy()
    with pytest.raises(SettingsError, match="refuses this client"):
        rollout.publish(Policy(version=2, epoch=2))
    with pytest.raises(SettingsError, match="refuses this client"):
        StreamClient(stack.settings.redis, "another-run", patience_s=1).read_policy()
    trainer = open_streams(stack.log_in(Role.TRAINER))
    trainer.acquire_epoch()
    assert trainer.issue(Prompt(group_uid="uid", batch=1))
    assert check_durability(trainer, settings.redis) == []
    for program, role in ((Program.TRAINER, "trainer"), (Program.ROLLOUT, "rollout"), (Program.CONSOLE, "console")):
        environment = stack._service(program).environment
        assert environment["FORAGE__REDIS__USERNAME"] == f"forage-{role}"
        assert Path(environment["FORAGE__REDIS__PASSWORD_FILE"]).is_file()
    assert "FORAGE__REDIS__USERNAME" not in stack._service(Program.REWARD).environment


def test_passwords_are_their_owners_and_in_no_other_file(stack: Stack) -> None:
    open_streams(stack.settings)
    folder = stack.folder / "redis" / redis_users.PASSWORDS
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == sorted(name_user(role) for role in Role)
    words = [file.read_text().strip() for file in files]
    assert len(set(words)) == len(words)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    for file in stack.folder.rglob("*"):
        if file.is_file() and file not in files:
            content = file.read_bytes()
            assert not any(word.encode() in content for word in words), file


def test_a_command_with_settings_of_its_own_asks_the_server_of_the_latest_run(stack: Stack, settings: Settings) -> None:
    open_streams(stack.settings)
    assert any("refuses this client" in problem for problem in check_redis(settings))
    (settings.run.dir / "latest").symlink_to("own")
    assert not any("refuses" in problem for problem in check_redis(settings))


def test_a_run_of_a_version_without_users_is_resumed(
    settings: Settings, redis_binary: str, free_address: Callable[[], str]
) -> None:
    folder, port = settings.run.folder / "redis", free_address().rpartition(":")[2]
    with serve(redis_binary, folder, port, *DURABLE):
        old = StreamClient(load_settings(None, [f"redis.url=redis://127.0.0.1:{port}/0"], {}).redis, "own", 5)
        old.create_groups()
        old.acquire_epoch()
        assert old.issue(Prompt(group_uid="uid", batch=1))
    stack = Stack(settings, [Program.REDIS])
    stack.start()
    try:
        assert [issue.group_uid for issue in open_streams(stack.settings).read_issued()] == ["uid"]
        first = [file.read_text() for file in sorted((folder / "passwords").iterdir())]
    finally:
        stack.stop()
    again = Stack(stack.settings, [Program.REDIS])
    again.start()
    try:
        assert len(open_streams(again.settings).read_issued()) == 1
        assert [file.read_text() for file in sorted((folder / "passwords").iterdir())] == first
    finally:
        again.stop()


def test_functions_come_back_with_a_server_that_lost_everything(stack: Stack) -> None:
    client = open_streams(stack.settings)
    admin = stack.log_in(Role.ADMIN).redis
    assert admin.password_file is not None
    password = admin.password_file.read_text().strip()
    server = redis.Redis.from_url(admin.url, username="forage-admin", password=password)
    server.function_flush()
    for file in (stack.folder / "redis/appendonlydir").iterdir():
        file.unlink()
    server.shutdown(nosave=True, now=True, force=True)
    wait_until(lambda: stack.supervisor.tick() or stack.supervisor.restarts[Program.REDIS])
    assert open_streams(stack.settings).read_issued() == client.read_issued() == []


def test_every_service_has_a_role() -> None:
    assert set(SERVICES) == set(Role) - {Role.ADMIN}


def test_the_commands_for_a_server_of_others_make_the_same_users(stack: Stack, tmp_path: Path) -> None:
    open_streams(stack.settings)
    admin = stack.log_in(Role.ADMIN).redis
    assert admin.password_file is not None
    login = {"username": "forage-admin", "password": admin.password_file.read_text().strip()}
    with redis.Redis.from_url(admin.url, **login) as server:
        made = ("--passwords", str(tmp_path / "words"), "--prefix", "other", "--run", "own")
        for line in run_forage("redis", "acl", "--format", "commands", *made).splitlines():
            assert server.execute_command(*line.split())
        users = {line.split()[1]: line.split()[3:] for line in server.acl_list()}
    for role in SERVICES:
        assert users[f"other-{role}"] != users[f"forage-{role}"], "passwords are their own"
        rules = [
            {word for word in users[f"{prefix}-{role}"] if not word.startswith("#")} for prefix in ("other", "forage")
        ]
        assert rules[0] == rules[1]
    assert "other-admin" not in users
    client = stack.settings.redis.model_copy(
        update={"username": "other-console", "password_file": tmp_path / "words/other-console"}
    )
    assert StreamClient(client, "own", patience_s=1).ping()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--users", "trainer,nobody"), "nobody is no role: give trainer, rollout, cli"),
        (("--add-password", "--drop-old"), "give one of them"),
        (("--drop-old",), "add the new one with --add-password"),
        (("--passwords", "/proc/none"), "cannot be written"),
    ],
)
def test_a_list_that_cannot_be_made_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["redis", "acl", *arguments])
    assert isinstance(ended.exception, UserError)
    assert sentence in str(ended.exception)


def test_only_an_administrator_loads_functions(stack: Stack) -> None:
    open_streams(stack.settings)
    arguments = ["redis", "load", "--config", str(stack.folder / "settings.yaml"), "redis.username=forage-trainer"]
    file = stack.folder / "redis/passwords/forage-trainer"
    ended = CliRunner().invoke(app, [*arguments, f"redis.password_file={file}"])
    assert "refuses this client (User forage-trainer has no permissions" in str(ended.exception)


def test_functions_of_other_versions_are_kept_until_they_are_pruned(stack: Stack) -> None:
    open_streams(stack.settings)
    admin = stack.log_in(Role.ADMIN).redis
    assert admin.password_file is not None
    with redis.Redis.from_url(
        admin.url, username="forage-admin", password=admin.password_file.read_text().strip()
    ) as server:
        old = "#!lua name=forage_0123\nredis.register_function('forage_0123_issue', function() return 1 end)"
        server.function_load(old)
        arguments = ("redis", "load", "--config", str(stack.folder / "settings.yaml"))
        assert "forage_0123: of another version" in run_forage(*arguments)
        assert server.fcall("forage_0123_issue", 0) == 1
        assert "forage_0123: deleted" in run_forage(*arguments, "--prune")
        with pytest.raises(redis.ResponseError, match="not found"):
            server.fcall("forage_0123_issue", 0)
    open_streams(stack.settings).create_groups()
