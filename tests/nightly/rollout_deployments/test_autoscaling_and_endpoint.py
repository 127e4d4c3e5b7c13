"""Autoscaling, and an endpoint in place of the engine, in a real Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai_server import serve_openai
from waiting import wait_until

from forage_proto.v1.trajectory_pb2 import Policy
from forage_rollout.loop.tokens import FileTokenizer
from forage_runtime.clients.calls import RefusedError
from forage_runtime.settings import EngineSettings, ModelSettings, ReplicaSettings, RolloutSettings, Settings
from forage_weights.announcement import PolicyError


@pytest.mark.usefixtures("caller")
def test_replicas_are_added_as_the_queue_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve
    from serve_parts import build_application

    from forage_rollout.deployments import application

    monkeypatch.setattr(application, "UPSCALE_DELAY_S", 1.0)
    engines = ReplicaSettings(min=1, max=2)
    elastic = serve.run(build_application(Settings(), engines), name="elastic", route_prefix=None)
    assert len(elastic.everywhere.remote("take_snapshot").result(timeout_s=200)) == 1
    busy = elastic.many.remote(["g"] * 200, 6000)
    wait_until(
        lambda: len(elastic.everywhere.remote("take_snapshot").result(timeout_s=200)) == 2,
        "one replica has 200 requests, and nothing",
    )
    busy.cancel()
    serve.delete("elastic")


@pytest.mark.usefixtures("caller")
def test_generations_on_replicas_that_are_replaced_or_removed_end_where_they_began() -> None:
    from ray import serve
    from serve_parts import build_application

    def deploy(replicas: int) -> Any:
        engines = ReplicaSettings(min=replicas, max=replicas)
        return serve.run(build_application(Settings(), engines), name="shrinking", route_prefix=None)

    shrinking = deploy(2)
    names = [f"group-{number}" for number in range(16)]
    homes = shrinking.many.remote(names, 1).result(timeout_s=200)
    assert len(set(homes)) == 2
    running = shrinking.many.remote(names, 800)  # eight seconds
    wait_until(
        lambda: sum(state.running for state in shrinking.everywhere.remote("inside").result(timeout_s=200)) == 16
    )
    shrunk = deploy(1)
    assert running.result(timeout_s=200) == homes
    assert len(set(shrunk.many.remote(names, 1).result(timeout_s=200))) == 1
    serve.delete("shrinking")


@pytest.mark.usefixtures("caller")
def test_dispatchers_follow_their_groups_in_flight_and_drain_before_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve
    from serve_parts import BusyDeployment

    from forage_rollout.deployments import application

    monkeypatch.setattr(application, "UPSCALE_DELAY_S", 1.0)
    monkeypatch.setattr(application, "DOWNSCALE_DELAY_S", 1.0)
    settings = Settings(rollout=RolloutSettings(max_dispatchers=3, max_trajectories_in_flight=2048))
    groups = tmp_path / "groups"
    groups.write_text("150")
    busy = application.build_dispatcher_deployment(BusyDeployment, settings).bind(str(tmp_path))
    serve.run(busy, name="dispatchers", route_prefix=None)

    def read_states() -> dict[str, int]:
        states: dict[str, int] = serve.status().applications["dispatchers"].deployments["Dispatcher"].replica_states
        return states

    def await_replicas(count: int) -> None:
        wait_until(lambda: read_states() == {"RUNNING": count}, lambda: f"{count} replicas, not {read_states()},")

    await_replicas(1)
    groups.write_text("256")  # as many as one may have
    await_replicas(3)
    assert list(tmp_path.glob("drained-*")) == []
    groups.write_text("10")
    await_replicas(1)
    assert len(list(tmp_path.glob("drained-*"))) == 2
    serve.delete("dispatchers")


@pytest.mark.usefixtures("caller")
def test_an_endpoint_replaces_the_engine(repository: Path) -> None:
    from ray import serve
    from serve_parts import build_application

    folder = repository / "models" / "tiny-policy"
    with serve_openai(FileTokenizer(folder), ["said </x>"]) as server:
        rollout = RolloutSettings(engine=EngineSettings(endpoint=server.url))
        settings = Settings(model=ModelSettings(path=folder), rollout=rollout)
        remote = serve.run(
            build_application(settings, ReplicaSettings(), scripted=False), name="remote", route_prefix=None
        )
        said = remote.many.remote(["g", "h"], 5).result(timeout_s=200)
        assert said == [FileTokenizer(folder).encode("said </x>")[0]] * 2
        (snapshot,) = remote.everywhere.remote("take_snapshot").result(timeout_s=200)
        assert snapshot.serving.uri == server.url
        assert (snapshot.counts["requests",], snapshot.counts["circuit_open", "endpoint"]) == (2, 0)
        with pytest.raises(PolicyError, match="serves weights of its own"):
            remote.everywhere.remote("load_policy", Policy(version=1, uri="/x").SerializeToString()).result(
                timeout_s=200
            )
        server.failures.append(401)
        with pytest.raises(RefusedError, match=r"look at rollout\.engine\.endpoint_token_file"):
            remote.many.remote(["g"], 5).result(timeout_s=200)
    serve.delete("remote")
