"""The deployments in a real Ray Serve with scripted engines: routing, broadcasts, errors, killed replicas."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from listening import LOOPBACK, list_listening
from scripted_cluster import REPLICAS
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.errors import SettingsError

if TYPE_CHECKING:  # it imports Ray, which reads its environment then
    from serve_parts import Inside


def look_inside(caller: Any) -> list[Inside]:
    found: list[Inside] = caller.everywhere.remote("inside").result(timeout_s=200)
    return found


def hold(caller: Any, holds: bool) -> None:
    caller.everywhere.remote("hold", holds).result(timeout_s=200)


def wait_for_all(ask: Any) -> None:
    """Wait until every replica is asked: one that refused, or hung, in a test before is avoided for a moment."""
    numbers = itertools.count()
    wait_until(lambda: len(set(ask([f"before-{next(numbers)}" for _ in range(12)]).result(timeout_s=200))) == REPLICAS)


def test_a_group_goes_to_one_replica_and_groups_to_all(caller: Any) -> None:
    wait_for_all(lambda names: caller.many.remote(names, 1))
    names = [f"group-{i}" for i in range(12) for _ in range(2)]
    served = caller.many.remote(names, 5).result(timeout_s=200)
    homes = dict(zip(names, served, strict=True))
    assert [homes[name] for name in names] == served
    assert len(set(served)) == REPLICAS
    assert caller.many.remote(names, 5).result(timeout_s=200) == served, "later turns find the same replica"


def test_the_turns_of_a_chat_go_to_one_replica_and_chats_to_all(caller: Any) -> None:
    wait_for_all(caller.chat.remote)
    names = [f"chat-{i}" for i in range(12)]
    homes = caller.chat.remote(names).result(timeout_s=200)
    assert len(set(homes)) == REPLICAS
    assert caller.chat.remote(names).result(timeout_s=200) == homes


def test_no_process_of_a_local_ray_listens_for_other_machines(caller: Any) -> None:
    caller.many.remote(["group"], 1).result(timeout_s=200)  # replicas open their ports before they answer
    found = list_listening(os.getpid())
    assert sum("ServeReplica" in name for names in found.values() for name in names) > REPLICAS
    assert set(found) <= LOOPBACK, found


def test_every_replica_is_reached_by_a_broadcast(caller: Any) -> None:
    policy = Policy(version=3, epoch=1)
    assert (
        caller.everywhere.remote("load_policy", policy.SerializeToString()).result(timeout_s=200) == [0.25] * REPLICAS
    )
    snapshots = caller.everywhere.remote("take_snapshot").result(timeout_s=200)
    assert len({snapshot.replica for snapshot in snapshots}) == REPLICAS
    assert [snapshot.serving for snapshot in snapshots] == [policy] * REPLICAS
    with pytest.raises(Exception, match="altered"):
        caller.everywhere.remote("load_policy", Policy(version=13).SerializeToString()).result(timeout_s=200)


def assert_released(caller: Any, name: str, homes: set[int]) -> None:
    """Release the name; an update must not wait then, and every replica that served the name has heard of it."""
    caller.release.remote(name).result(timeout_s=200)
    policy = Policy(version=4, epoch=1)
    # A lease that is left would hold it back for 600 s.
    caller.everywhere.remote("load_policy", policy.SerializeToString()).result(timeout_s=200)
    assert homes <= {state.pid for state in look_inside(caller) if name in state.released}


def test_an_update_need_not_wait_after_the_release_of_a_group_on_one_replica(caller: Any) -> None:
    (home,) = set(caller.many.remote(["leased/one"], 1).result(timeout_s=200))
    assert_released(caller, "leased/one", {home})


def test_an_update_need_not_wait_after_the_release_of_a_group_that_moved_to_a_second_replica(caller: Any) -> None:
    (home,) = set(caller.many.remote(["leased/moved"], 1).result(timeout_s=200))
    caller.everywhere.remote("fail", home, "altered").result(timeout_s=200)
    (other,) = set(caller.many.remote(["leased/moved"], 1).result(timeout_s=200))
    caller.everywhere.remote("fail", home, "").result(timeout_s=200)
    assert other != home
    assert_released(caller, "leased/moved", {home, other})


def test_a_replica_that_hangs_holds_no_release_back(caller: Any) -> None:
    (home,) = set(caller.many.remote(["leased/frozen"], 1).result(timeout_s=200))
    (other,) = {state.pid for state in look_inside(caller)} - {home}
    os.kill(other, signal.SIGSTOP)
    try:
        caller.release.remote("leased/frozen").result(timeout_s=200)
    finally:
        os.kill(other, signal.SIGCONT)
    states = look_inside(caller)
    assert {state.pid for state in states if "leased/frozen" in state.released} == {home, other}


def test_errors_keep_their_type(caller: Any) -> None:
    assert "no such role" in caller.render.remote().result(timeout_s=200)


def test_a_generation_whose_caller_is_cancelled_is_cancelled(caller: Any) -> None:
    before = sum(state.cancelled for state in look_inside(caller))
    hold(caller, True)
    slow = caller.many.remote(["slow"], 1)
    wait_until(lambda: sum(state.running for state in look_inside(caller)) == 1)
    slow.cancel()
    wait_until(lambda: sum(state.cancelled for state in look_inside(caller)) == before + 1)
    hold(caller, False)


def test_a_replica_out_of_service_is_avoided_and_when_all_are_callers_wait(caller: Any) -> None:
    (home,) = set(caller.many.remote(["g"], 1).result(timeout_s=200))
    pids = [state.pid for state in look_inside(caller)]
    caller.everywhere.remote("fail", home, "altered").result(timeout_s=200)
    (other,) = set(caller.many.remote(["g"] * 4, 1).result(timeout_s=200))
    assert other != home
    for pid in pids:
        caller.everywhere.remote("fail", pid, "altered").result(timeout_s=200)
    assert caller.give_up.remote("g", 0.5).result(timeout_s=200)
    for pid in pids:
        caller.everywhere.remote("fail", pid, "").result(timeout_s=200)
    assert len(caller.many.remote(["g"], 1).result(timeout_s=200)) == 1


def test_logs_of_replicas_reach_the_main_process(caller: Any, capsys: pytest.CaptureFixture[str]) -> None:
    caller.everywhere.remote("say", "one_word").result(timeout_s=200)
    shown: list[str] = []

    def count_words() -> int:
        shown.append(capsys.readouterr().err)
        return "".join(shown).count('"event": "one_word"')

    wait_until(lambda: count_words() == REPLICAS)


@pytest.mark.usefixtures("caller")
def test_the_builder_of_serve_deploy_takes_settings_by_their_names() -> None:
    from ray.serve import Application

    from forage_rollout.deployments.application import build

    assert isinstance(build({"run.id": "one", "rollout.engine_replicas.max": "4"}), Application)
    with pytest.raises(SettingsError, match=r"rollout\.nn"):
        build({"rollout.nn": "4"})


def test_generations_of_a_replica_that_is_killed_go_on_elsewhere(caller: Any) -> None:
    names = [f"killed-{number % 25}" for number in range(200)]
    before = caller.repeated.remote().result(timeout_s=200)
    hold(caller, True)
    running = caller.many.remote(names, 1)
    wait_until(lambda: sum(state.running for state in look_inside(caller)) == 200)
    lost, living = sorted(look_inside(caller), key=lambda state: state.running, reverse=True)
    os.kill(lost.pid, signal.SIGKILL)
    # Those that it was sampling are sampled there, or where Serve replaces it.
    wait_until(lambda: caller.repeated.remote().result(timeout_s=200) == before + lost.running)
    hold(caller, False)
    ended = running.result(timeout_s=200)
    assert (len(ended), lost.pid in ended) == (200, False), "each has an answer, and no answer is of the dead replica"
    assert ended.count(living.pid) >= living.running
    assert caller.repeated.remote().result(timeout_s=200) == before + lost.running, "and no others"
    caller.connect.remote(REPLICAS).result(timeout_s=200)  # other tests find all replicas
