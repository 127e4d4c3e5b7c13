"""Passwords are replaced under a run."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading

import pytest
import redis
from redis_stack import open_streams, run_forage, settings, stack
from waiting import WAIT_S, wait_until

from forage_cli.local.stack import Stack
from forage_proto.v1.trajectory_pb2 import Prompt, TrajectoryGroup
from forage_queue.streams.users import Role
from forage_runtime.settings import Settings
from forage_trajectory.codec import pack_group

__all__ = ["settings", "stack"]
FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()"]


def test_passwords_are_replaced_under_a_run_that_loses_nothing(stack: Stack, settings: Settings) -> None:
    folder = stack.folder / "redis"
    trainer, rollout = open_streams(stack.log_in(Role.TRAINER)), open_streams(stack.log_in(Role.ROLLOUT))
    admin = redis.Redis.from_url(
        settings.redis.url, username="forage-admin", password=(folder / "passwords/forage-admin").read_text().strip()
    )
    trainer.create_groups()
    trainer.acquire_epoch()
    issued, over = 0, threading.Event()

    def issue() -> None:
        nonlocal issued
        while not over.is_set():
            trainer.issue(Prompt(group_uid=f"uid-{issued}", batch=1, position=issued))  # False: its reply was lost
            issued += 1

    def finish() -> None:
        while not over.is_set() or rollout.count_backlog(rollout.prompts):
            # What was claimed under this name is there still where the reply of a claim was lost.
            for entry in rollout.claim_prompts("worker", 8, 0.05) or rollout.take_over_prompts("worker", 8):
                rollout.finish(entry, pack_group(TrajectoryGroup(group_uid=entry.message.group_uid)))

    def rotate(option: str) -> int:
        # In a process of its own: the threads above write to this one's log, in the middle of the list.
        list_ = subprocess.check_output(
            [*FORAGE, "redis", "acl", "--run", "own", "--passwords", str(folder / "passwords"), option], text=True
        )
        (folder / "users.acl").write_text(list_)
        run_forage("redis", "load", "--config", str(stack.folder / "settings.yaml"), "--users")
        admin.client_kill_filter(_type="normal", skipme=True)
        before = issued
        wait_until(lambda: issued >= before + 20, "the trainer goes on")
        return list_.count("#")

    before = (folder / "passwords/forage-trainer").read_text()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        work = [threads.submit(issue), threads.submit(finish)]
        try:
            assert rotate("--add-password") == 2 * len(Role)
            assert rotate("--drop-old") == len(Role)
        finally:
            over.set()
        for one in work:
            one.result(WAIT_S)
    assert (folder / "passwords/forage-trainer").read_text() != before
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(settings.redis.url, username="forage-trainer", password=before.strip()).ping()
    groups = trainer.claim_groups(trainer.trajectories, 10 * issued, 0.1)
    assert sorted(entry.message.group_uid for entry in groups) == sorted(f"uid-{n}" for n in range(issued))
