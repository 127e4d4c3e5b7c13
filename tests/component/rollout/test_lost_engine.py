"""An engine replica that is killed under 64 trajectories in flight: generations are lost, and no group."""

from __future__ import annotations

from agent_parts import Judge, Library, MakeAgent, judge, library, make_agent
from dispatcher_bench import Bench
from linked_engine import LINES, start_engine

from forage_proto.v1.trajectory_pb2 import ChatMessage, Prompt, Sampling, Status
from forage_rollout.links.pool import EnginePool

__all__ = ["judge", "library", "make_agent"]
GROUPS, SAMPLES = 8, 8


async def test_no_group_starts_again_when_an_engine_is_killed_under_its_trajectories(
    bench: Bench, make_agent: MakeAgent, library: Library, judge: tuple[Judge, str]
) -> None:
    bench.settings = bench.settings.model_copy(
        update={"rollout": bench.settings.rollout.model_copy(update={"max_groups_in_flight": GROUPS, "n": SAMPLES})}
    )
    bench.limit(GROUPS * SAMPLES)
    with start_engine() as (_, first), start_engine() as (victim, second):
        pool = EnginePool(releases=False)
        pool.set_replicas({"first": first, "second": second})
        agent = make_agent(pool, retrieve_timeout_s=300.0, score_timeout_s=300.0)
        for position in range(GROUPS):
            bench.trainer.issue(
                Prompt(
                    run_id="r",
                    group_uid=f"g/{position}",
                    data_source="s",
                    samples=SAMPLES,
                    batch=1,
                    position=position,
                    messages=[ChatMessage(role="user", content=f"Question {position}")],
                    sampling=Sampling(temperature=1.0, seed=11),
                )
            )
        async with bench.run(agent.run_group) as dispatcher:
            await bench.wait_until(lambda: agent.counts.samples_in_flight == GROUPS * SAMPLES)
            await bench.wait_until(lambda: (pool._replicas["second"].load or 0) > SAMPLES)
            victim.kill()
            groups = await bench.take_groups(GROUPS)
            assert sorted(bench.runs) == sorted(f"g/{position}" for position in range(GROUPS)), "a group started again"
            assert (dispatcher.counts.runs_repeated, dispatcher.counts.groups_failed) == (0, 0)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert len(trajectories) == GROUPS * SAMPLES
        for trajectory in trajectories:
            assert trajectory.status == Status.STATUS_OK, trajectory.status_detail
            said = [span.text for span in trajectory.spans if span.text in LINES]
            assert said == list(LINES), "each turn is there once"
            assert [(one.begin, one.end) for one in trajectory.segments] == [
                (span.begin - trajectory.prompt_length, span.end - trajectory.prompt_length)
                for span in trajectory.spans
                if span.text in LINES
            ]
        counts = pool.counts
        assert 0 < counts.generations_repeated <= GROUPS * SAMPLES
        assert counts.repeated_tokens >= counts.generations_repeated * len(LINES[-1])
        assert (counts.engine_links, counts.links_lost) == (1, 1)
        await pool.close()
