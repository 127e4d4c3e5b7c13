"""Probes of two policies that are known, over a real HTTP server, with the real reward service."""

from __future__ import annotations

import re
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
from completions_server import CompletionsServer, encode
from probe_parts import (
    LENGTH,
    PLAN,
    answer_thoughtfully,
    build_trajectory,
)

from forage_probe import metrics
from forage_probe.contexts import CONNECTIVE
from forage_probe.prober import ProbePlan, Prober
from forage_probe.work import list_probe_items, run_probes
from forage_proto.v1.probe_pb2 import CotBoundary, Probed
from forage_proto.v1.trajectory_pb2 import GroundTruth, Role, Span, Status, Trajectory
from forage_runtime.clients.calls import RefusedError
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import Settings


async def run_probe(settings: Settings, trajectories: list[Trajectory], plan: ProbePlan = PLAN) -> list[Probed]:
    wanted = [item for one in trajectories for item in list_probe_items(one, every=False)]
    async with aclosing(run_probes(trajectories, wanted, settings, plan)) as work:
        return [probed async for probed in work]


@pytest.mark.parametrize("source", ["world_facts", "puzzle"])
async def test_a_policy_that_ignores_its_thought_has_a_flat_curve_and_no_area(settings: Settings, source: str) -> None:
    probed = await run_probe(settings, [build_trajectory(number, source) for number in range(4)])
    assert [one.status_detail for one in probed] == [""] * 4
    measures = metrics.summarise(probed)["all"]
    # 44 intervals of 95 %: of so many about two are expected to miss, and more than six hardly ever do.
    missed = sum(not low <= 0.7 <= high for one in probed for low, high in metrics.measure(one).intervals)
    assert missed <= 6
    assert max(measures.confidence_at) - min(measures.confidence_at) < 0.2
    assert abs(measures.overconfidence) < 0.15
    assert measures.aoc == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("source", ["world_facts", "puzzle"])
async def test_a_policy_that_answers_as_it_thinks_has_a_rising_curve(
    settings: Settings, scripted: CompletionsServer, source: str
) -> None:
    scripted.policy = answer_thoughtfully
    probed = await run_probe(settings, [build_trajectory(number, source) for number in range(4)])
    measures = metrics.summarise(probed)["all"]
    missed = sum(
        not low <= place / 10 <= high
        for one in probed
        for place, (low, high) in enumerate(metrics.measure(one).intervals)
    )
    assert missed <= 6
    assert [point.kept for point in probed[0].points] == [4 * place for place in range(11)]
    assert (measures.confidence_at[0], measures.confidence_at[-1]) == (0.0, 1.0)
    assert measures.confidence_at == pytest.approx([place / 10 for place in range(11)], abs=0.1)
    assert measures.rho is not None
    assert measures.rho > 0.95
    assert measures.premature == 0.0
    assert measures.overconfidence == pytest.approx(-1.1, abs=0.15)
    # Two wrong answers share what is not right: the right one leads from a third of the thought on.
    assert measures.aoc == pytest.approx(0.33, abs=0.1)


async def test_a_context_is_the_sampled_text_and_the_connective_and_every_point_has_its_seed(
    settings: Settings, scripted: CompletionsServer
) -> None:
    one = build_trajectory(3)
    (first,), (again,) = await run_probe(settings, [one]), await run_probe(settings, [one])
    for point in (*first.points, *again.points):
        point.ClearField("cached_tokens")  # the second time all of it is there
    assert first.points == again.points
    assert (first.turn, first.boundary) == (2, CotBoundary.COT_BOUNDARY_THINK_CLOSE)
    thought = one.token_ids[first.cot_begin : first.cot_end]
    assert thought == encode("." * LENGTH)
    before = list(one.token_ids[: first.cot_begin])
    asked = scripted.asked[:11]
    assert {len(body["prompt"]) for body in asked} == {len(before) + kept + len(CONNECTIVE) for kept in range(0, 41, 4)}
    for body in asked:
        kept = len(body["prompt"]) - len(before) - len(CONNECTIVE)
        assert body["prompt"] == [*before, *thought[:kept], *encode(CONNECTIVE)]
    assert len(asked[0]["prompt"]) == len(before) + LENGTH + len(CONNECTIVE)  # the whole thought fills the cache first
    assert [(body["n"], body["max_tokens"], body["stop"]) for body in asked] == [(50, 64, ["</answer>"])] * 11
    seeds = sorted(body["seed"] for body in asked)
    assert all(later - earlier > 50 for earlier, later in pairwise(seeds))  # samples share none
    (other,) = await run_probe(settings, [one], ProbePlan(points=10, samples=50, seed=8))
    assert other.points != first.points


async def test_tokens_are_counted_and_only_closed_answers_count(
    settings: Settings, scripted: CompletionsServer
) -> None:
    scripted.policy = lambda _, chance: chance.choice([" Oslo </answer>", "the OSLO.</answer>", " Rome", " </answer>"])
    (probed,) = await run_probe(settings, [build_trajectory(0)], ProbePlan(points=1, samples=40, seed=1))
    empty, whole = probed.points
    assert whole.cached_tokens == 0  # nothing was asked before
    assert empty.cached_tokens == 39 * (probed.cot_begin)  # its beginning was
    assert whole.context_tokens == probed.cot_end + len(CONNECTIVE)
    counts = {answer.answer: answer.count for answer in whole.answers}
    assert set(counts) == {"oslo", ""}
    assert counts["oslo"] == whole.correct
    assert sum(counts.values()) < whole.samples == 40
    assert probed.correct


async def test_answers_inside_a_thought_are_not_scored(settings: Settings, scripted: CompletionsServer) -> None:
    """Cut within its answer, a thought leaves an open `<answer>`, in which a reward would look for the answer."""
    text = "Is it <answer> Rome </answer>?</think><answer>x</answer>"
    prompt = Span(role=Role.ROLE_PROMPT, begin=0, end=1, text="?")
    model = Span(role=Role.ROLE_MODEL, begin=1, end=1 + len(text), text=text)
    leak = build_trajectory(0, token_ids=encode("?" + text), spans=[prompt, model], turns=[])
    scripted.policy = lambda *_: " Oslo </answer>"
    (probed,) = await run_probe(settings, [leak], ProbePlan(points=5, samples=3, seed=1))
    assert [point.correct for point in probed.points] == [3] * 6
    scripted.policy = lambda *_: "I mean <answer> Oslo </answer>"
    (probed,) = await run_probe(settings, [leak], ProbePlan(points=5, samples=3, seed=1))
    assert [point.correct for point in probed.points] == [3] * 6


async def test_every_turn_can_be_probed_even_without_an_answer(settings: Settings, scripted: CompletionsServer) -> None:
    one = build_trajectory(0)
    assert list_probe_items(one, every=True) == [(one.id, 1), (one.id, 2)]
    async with Prober(settings, ProbePlan(points=2, samples=2, seed=1)) as prober:
        first = await prober.probe(one, turn=1)
        del one.turns[1:]  # it ended in a turn that asked for nothing
        last = await prober.probe(one)
    assert (first.turn, [point.kept for point in first.points]) == (1, [0, 1, 2])
    assert last.turn == 2
    assert "information" not in str(scripted.asked[0]["prompt"])


async def test_a_trajectory_that_cannot_be_probed_has_a_reason(settings: Settings, scripted: CompletionsServer) -> None:
    cases = {
        "its status is TIMEOUT: it hung": build_trajectory(0, status=Status.STATUS_TIMEOUT, status_detail="it hung"),
        "it has 0 turns, not 1": build_trajectory(1, spans=[], turns=[]),
        "data source 'nowhere' has no route": build_trajectory(2, data_source="nowhere"),
        "no accepted answers": build_trajectory(3, ground_truth=GroundTruth()),
    }
    for reason, one in cases.items():
        (probed,) = await run_probe(settings, [one])
        assert (probed.status, list(probed.points)) == (Status.STATUS_INVALID_INPUT, [])
        assert probed.trajectory_id == one.id
        assert re.search(reason, probed.status_detail) or "targets" in probed.status_detail
    scripted.max_model_len = 60
    (probed,) = await run_probe(settings, [build_trajectory(4)])
    assert "leave no room for an answer within 60" in probed.status_detail
    stranger = build_trajectory(5)
    stranger.token_ids[-5] += 1
    with pytest.raises(DataError, match=r"run/world_facts/test/5/0/0: model\.path has another vocabulary"):
        await run_probe(settings, [stranger])


def test_adapters_are_not_probed(settings: Settings) -> None:
    engine = settings.rollout.engine.model_copy(update={"max_lora_rank": 8})
    adapted = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"engine": engine})})
    with pytest.raises(SettingsError, match=r"rollout\.engine\.max_lora_rank is 8"):
        Prober(adapted)


async def test_temporary_failures_are_retried_and_others_are_reported(
    settings: Settings, scripted: CompletionsServer, tmp_path: Path
) -> None:
    small = ProbePlan(points=2, samples=2, seed=1)
    scripted.failures = [503, 500]
    (probed,) = await run_probe(settings, [build_trajectory(0)], small)
    assert probed.status == Status.STATUS_OK
    scripted.failures = [400]
    with pytest.raises(RefusedError, match="a scripted failure"):
        await run_probe(settings, [build_trajectory(0)], small)
    scripted.token = "secret"
    with pytest.raises(SettingsError, match=r"asks for a token: set rollout\.auth_token_file"):
        await run_probe(settings, [build_trajectory(0)], small)
    (tmp_path / "token").write_text("secret\n")
    rollout = settings.rollout.model_copy(update={"auth_token_file": tmp_path / "token"})
    (probed,) = await run_probe(settings.model_copy(update={"rollout": rollout}), [build_trajectory(0)], small)
    assert probed.status == Status.STATUS_OK
