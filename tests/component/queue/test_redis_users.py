"""What each user of a server may do, tried on a real one: everything that its role does, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import redis
from redis_process import DURABLE, serve
from stream_calls import CALLS

from forage_proto.v1.trajectory_pb2 import LedgerEntry, Policy, Prompt, Replica, Shift, TrajectoryGroup
from forage_queue.streams.client import ANNOUNCED, NEVER, SERVED, StreamClient
from forage_queue.streams.durability import check_durability
from forage_queue.streams.functions import build_facts, build_library, is_read_only, list_scripts, name_function
from forage_queue.streams.payloads import Payloads
from forage_queue.streams.users import RIGHTS, SERVICES, Role, describe_all, hash_password, name_user
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import RedisSettings, RunSettings, Settings
from forage_trajectory.codec import pack_group

RUN, OTHER = "run-1.x", "other"
# Other topologies, databases and confirmed writes have tests of their own.
ELSEWHERE = {"client|setname", "select", "cluster|slots", "cluster|shards", "command", "wait", "hello", "incr"}
# What functions do after an hour of silence, or with keys that only the trainer gives them.
ELSEWHERE |= {"hdel", "zrem", "xgroup|delconsumer", "del"}
NOT_OURS = {Role.EXPORTER, Role.KEDA}


@pytest.fixture(scope="module")
def server(
    redis_binary: str, free_address: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisSettings]:
    """A server with the users of `forage redis acl` for one run, and the functions that its administrator loaded."""
    folder, port = tmp_path_factory.mktemp("redis"), free_address().rpartition(":")[2]
    for role in Role:
        (folder / role).write_text(f"word-of-{role}\n")
    users = describe_all({role: [hash_password(f"word-of-{role}")] for role in Role}, RUN)
    (folder / "users.acl").write_text(users)
    settings = RedisSettings(url=f"redis://127.0.0.1:{port}/0", password_file=folder / "admin", username="forage-admin")
    with serve(redis_binary, folder, port, *DURABLE, "--aclfile", str(folder / "users.acl")):
        yield settings


@pytest.fixture
def admin(server: RedisSettings) -> Iterator[redis.Redis]:
    """The administrator on an empty server with the functions."""
    with redis.Redis.from_url(server.url, username="forage-admin", password="word-of-admin") as client:
        client.flushall()
        client.function_flush()
        client.function_load(build_library().code)
        yield client


@pytest.fixture
def open_as(server: RedisSettings, tmp_path: Path) -> Callable[..., StreamClient]:
    payloads = Payloads(Settings(run=RunSettings(dir=tmp_path), redis=RedisSettings(inline_bytes=0)))

    def connect(role: Role, run: str = RUN) -> StreamClient:
        assert server.password_file is not None
        login = {"username": name_user(role), "password_file": server.password_file.with_name(str(role))}
        return StreamClient(server.model_copy(update=login), run, patience_s=1, payloads=payloads)

    return connect


def list_all_commands(role: Role) -> set[str]:
    """Commands that a user may send to any key."""
    return {*RIGHTS[role].common_commands, *(word for grant in RIGHTS[role].grants for word in grant.commands)}


def list_server_commands(admin: redis.Redis) -> dict[str, int]:
    """Every command and subcommand of the server, as access lists name it → the least number of its words."""
    connection = admin.connection_pool.get_connection()
    connection.send_command("COMMAND")
    rows = connection.read_response()
    admin.connection_pool.release(connection)
    single = {name: arity for name, arity, *fields in rows if not fields[-1]}
    subcommands = {sub[0]: sub[1] for row in rows for sub in row[-1]}
    return {name.decode(): abs(arity) for name, arity in {**single, **subcommands}.items()}


@pytest.mark.parametrize("role", SERVICES)
def test_every_other_command_of_the_server_is_refused(admin: redis.Redis, role: Role) -> None:
    allowed, tried = list_all_commands(role), 0
    for name, length in list_server_commands(admin).items():
        if name in allowed or name.partition("|")[0] in allowed:
            continue
        words = name.split("|")
        words += ["x"] * (length - len(words))
        answer = admin.execute_command("ACL DRYRUN", name_user(role), *words)
        # AUTH, HELLO, QUIT and RESET are for everybody, without a password too.
        is_free = name in ("auth", "hello", "quit", "reset")
        assert (answer == b"OK") == is_free or (is_free and b"no permissions" not in answer), (name, answer)
        assert is_free or b"has no permissions to run" in answer, (name, answer)
        tried += 1
    assert tried > 200


def test_only_info_is_dangerous_and_nobody_brings_lua(admin: redis.Redis) -> None:
    dangerous = {
        command.replace(" ", "|")
        for category in ("dangerous", "admin", "scripting", "pubsub", "keyspace")
        for command in admin.execute_command("ACL CAT", category)
    } - {"exists", "scan", "type", "del", "fcall", "fcall_ro"}
    assert {"eval", "evalsha", "script|load", "function|load", "config|get", "keys", "flushall"} <= dangerous
    for role in SERVICES:
        commands = list_all_commands(role)
        assert commands & dangerous <= {"info"}, role


def exercise(role: Role, open_as: Callable[..., StreamClient]) -> None:
    """What the services of a role do with their client, on a server where the others have done their part."""
    client = open_as(role)
    prompt = Prompt(group_uid="uid", batch=1, reply_stream="")
    assert client.ping()
    if role is Role.TRAINER:
        client.acquire_epoch()
        client.create_groups()
        client.offer_payloads()
        client.open_replies(client.key("validation-before"), 0)
        assert client.issue(prompt)
        assert client.issue(Prompt(group_uid="v", batch=0, reply_stream=client.key("validation-before")))
        assert len(client.read_issues(client.trajectories, 1)) == len(client.read_issued()) == 1
        assert len(client.read_prompts()) == 2
        assert client.find_absent(client.trajectories, 1) == set()
        client.publish(Policy(version=1, epoch=client.epoch))
        assert client.read_policy() is not None
        client.set_shift(Shift(number=1))
        shift = client.read_shift()
        assert shift is not None
        assert client.replace_shift(shift, Shift(number=2))
        do_rollouts_part(open_as)
        groups = client.claim_groups(client.trajectories, 10, 1.0)
        with patch("forage_queue.streams.payloads.ORPHAN_S", -60.0):
            client.delete_orphans()
        again = client.reclaim_groups(client.trajectories, ())
        assert [entry.id for entry in again] == [entry.id for entry in groups]
        answers = client.claim_groups(client.key("validation-before"), 10, 1.0)
        client.discard(client.key("validation-before"), [entry.id for entry in answers])
        client.acknowledge(LedgerEntry(step=1, group_uids=["uid"]), [entry.id for entry in groups])
        assert list(client.read_ledger()) == [1]
        client.close_replies(client.key("validation-before"), 0)
        assert client.read_environments() == {"nq": "search"}
        assert client.read_dtype() == "float32"
        assert list(client.read_replicas()) == ["engine"]
        client.prune()
        client.reject(client.trajectories, b"1-1", b"content")
        assert client.count_backlog(client.prompts) == client.measure_bytes(client.key("none")) == 0
        assert client.read_byte_limit() == 0
    elif role is Role.ROLLOUT:
        trainer = open_as(Role.TRAINER)
        trainer.acquire_epoch()
        trainer.create_groups()
        trainer.offer_payloads()
        trainer.open_replies(trainer.key("validation-before"), 0)
        assert trainer.issue(prompt)
        assert trainer.issue(Prompt(group_uid="v", batch=0, reply_stream=trainer.key("validation-before")))
        trainer.set_shift(Shift(number=1))
        do_rollouts_part(open_as)
        assert (
            trainer.count_backlog(trainer.trajectories) == trainer.count_backlog(trainer.key("validation-before")) == 1
        )
    elif role is Role.CLI:
        client.create_groups()
        client.publish(Policy(version=0, epoch=client.acquire_epoch()))
        assert client.read_policy() is not None
        assert client.read_issued() == [] and client.read_ledger() == {}  # noqa: PT018
        assert client.read_replicas() == {} and client.read_environments() is None  # noqa: PT018
        assert client.count_backlog(client.prompts) == client.read_byte_limit() == 0
        assert client.measure_bytes(client.prompts) > 0
    elif role is Role.CONSOLE:
        assert client.read_policy() is None and client.read_environments() is None  # noqa: PT018
        assert client.read_epoch() == client.count_backlog(client.prompts) == client.measure_bytes(client.prompts) == 0
        assert client.read_replicas() == {}
        assert client.read_server("clients")["connected_clients"]


def do_rollouts_part(open_as: Callable[..., StreamClient]) -> None:
    client = open_as(Role.ROLLOUT)
    client.create_groups()
    client.declare_environments({"nq": "search"})
    client.declare_dtype("float32")
    entries = client.claim_prompts("worker", 10, 0.1)
    assert len(entries) == 2
    assert client.take_over_prompts("worker", 10) == entries
    client.keep_alive("worker", [entry.id for entry in entries])
    assert client.reclaim_prompts("other", 1) == []
    for entry in entries:
        group = TrajectoryGroup(group_uid=entry.message.group_uid, batch=entry.message.batch)
        group.trajectories.add(token_ids=[1, 2])
        assert client.finish(entry, pack_group(group))
        assert not client.finish(entry, pack_group(group))
    assert client.count_backlog(client.trajectories) == 1
    assert client.measure_bytes(client.trajectories) > 0
    assert client.read_byte_limit() == 0
    client.acknowledge_policy("engine", Replica())
    assert list(client.read_replicas()) == ["engine"]
    client.read_policy()
    assert client.await_change(ANNOUNCED, NEVER, 0.1) != NEVER
    assert client.await_change(SERVED, NEVER, 0.1) != NEVER
    shift = client.read_shift()
    assert shift is not None
    assert client.replace_shift(shift, shift)
    client.reject(client.prompts, b"1-1", b"content")


@pytest.mark.parametrize("role", [role for role in SERVICES if role not in NOT_OURS])
def test_a_role_can_do_its_work_and_has_no_right_that_it_does_not_use(
    admin: redis.Redis, open_as: Callable[..., StreamClient], role: Role
) -> None:
    admin.config_resetstat()
    exercise(role, open_as)
    used = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
    assert list_all_commands(role) - ELSEWHERE <= used


@pytest.mark.parametrize("role", SERVICES)
def test_keys_of_another_run_are_refused(admin: redis.Redis, open_as: Callable[..., StreamClient], role: Role) -> None:
    admin.set(f"forage:{{{OTHER}}}:epoch", 1)
    client = open_as(role, OTHER)
    asked: list[Callable[[], object]] = [lambda: client.count_backlog(client.prompts)]
    if role not in NOT_OURS:
        asked += [client.read_policy, client.read_epoch, client.read_replicas, lambda: client.measure_bytes("x")]
    if role in (Role.TRAINER, Role.ROLLOUT, Role.CLI):
        asked += [client.create_groups]
    for ask in asked:
        with pytest.raises(SettingsError, match="refuses this client"):
            ask()
    assert admin.keys("*") == [f"forage:{{{OTHER}}}:epoch".encode()]


@pytest.mark.parametrize("role", SERVICES)
@pytest.mark.parametrize("script", list_scripts())
def test_a_function_does_only_what_its_caller_could_do_command_by_command(
    admin: redis.Redis, server: RedisSettings, role: Role, script: str
) -> None:
    prefix = f"forage:{{{RUN}}}:"
    short, arguments = CALLS[script]
    keys = [prefix + name.replace("replies", "validation-before") for name in short]
    if script == "create_group":
        keys = [f"{prefix}prompts"]  # the trainer alone creates streams of answers
    elif script == "reject":
        keys = keys[:3]  # the trainer alone has an epoch
    call = "FCALL_RO" if is_read_only(script) else "FCALL"
    login = {"username": name_user(role), "password": f"word-of-{role}"}
    with redis.Redis.from_url(server.url, **login) as client:
        try:
            client.execute_command(call, name_function(script), len(keys), *keys, *arguments)
            refused = False
        except redis.ResponseError as error:
            refused = "permission" in str(error) or "ACL failure" in str(error)
    scripts = {*RIGHTS[role].scripts, *(name for grant in RIGHTS[role].grants for name in grant.scripts)}
    if script in scripts:
        assert not refused
    if role is Role.CLI and not is_read_only(script):
        assert refused == (script not in scripts)
    if role in (Role.CONSOLE, Role.EXPORTER, Role.KEDA):
        assert refused == (script not in scripts)
        assert not admin.exists(*keys)


def test_an_engine_cannot_publish_nor_change_what_was_trained_on(
    admin: redis.Redis, open_as: Callable[..., StreamClient]
) -> None:
    client = open_as(Role.ROLLOUT)
    for act in (
        lambda: client.publish(Policy(version=1, epoch=1)),
        client.acquire_epoch,
        lambda: client.acknowledge(LedgerEntry(step=1), []),
        lambda: client.issue(Prompt(batch=1)),
        client.prune,
    ):
        with pytest.raises(SettingsError, match="refuses this client"):
            act()
    assert not admin.keys("*")


@pytest.mark.parametrize("stream", ["prompts", "trajectories", "validation-before", "issued:prompts", "ledger"])
def test_the_command_line_changes_no_prompt_and_no_trajectory(
    admin: redis.Redis, server: RedisSettings, open_as: Callable[..., StreamClient], stream: str
) -> None:
    trainer = open_as(Role.TRAINER)
    trainer.acquire_epoch()
    trainer.create_groups()
    assert trainer.issue(Prompt(group_uid="uid", batch=1))
    key, before = trainer.key(stream), {name: admin.dump(name) for name in admin.keys("*")}
    writing = {name.decode() for name in admin.execute_command("COMMAND LIST FILTERBY ACLCAT write")}
    lengths = {name: length for name, length in list_server_commands(admin).items() if name in writing}
    assert {"del", "xadd", "set", "xtrim", "xgroup|destroy"} <= set(lengths)
    for name, length in lengths.items():
        words = [*name.split("|"), key]
        words += ["1"] * (length - len(words))
        answer = admin.execute_command("ACL DRYRUN", "forage-cli", *words)
        creates = name == "xgroup|create" and stream in ("prompts", "trajectories")
        assert (answer == b"OK") == creates, (words, answer)
    with redis.Redis.from_url(server.url, username="forage-cli", password="word-of-cli") as client:
        for words in (["DEL", key], ["XADD", key, "*", "m", "x"], ["SET", key, "x"], ["XTRIM", key, "MAXLEN", "0"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
        assert client.exists(key) == admin.exists(key)
    assert {name: admin.dump(name) for name in admin.keys("*")} == before


def test_a_user_without_functions_waits_for_the_administrator(
    admin: redis.Redis, open_as: Callable[..., StreamClient]
) -> None:
    admin.function_flush()
    client = open_as(Role.TRAINER)
    with pytest.raises(UnavailableError, match="administrator run `forage redis load`"):
        client.create_groups()
    admin.function_load(build_library().code)
    client.create_groups()


def test_what_the_server_promises_is_what_its_administrator_left(
    admin: redis.Redis, server: RedisSettings, open_as: Callable[..., StreamClient]
) -> None:
    client = open_as(Role.TRAINER)
    assert any("does not tell" in problem for problem in check_durability(client, server))
    for value, problems in (("always", 0), ("everysec", 1)):
        admin.function_load(build_facts({"appendfsync": value}).code, replace=True)
        assert len(check_durability(client, server)) == problems


def test_a_wrong_password_and_no_user_are_refused(server: RedisSettings, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong\n")
    for login in ({"username": "forage-trainer"}, {"username": ""}):
        own = server.model_copy(update={**login, "password_file": tmp_path / "wrong"})
        with pytest.raises(SettingsError, match="check user, password and rights"):
            StreamClient(own, RUN, patience_s=1).ping()
    with pytest.raises(SettingsError, match="check user, password and rights"):
        StreamClient(RedisSettings(url=server.url), RUN, patience_s=1).ping()
