"""Probes of two policies that are known: one does not read its thought, the other answers as it says. Over a real HTTP
server, with the real reward service."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from completions_server import CompletionsServer, encode, serve_completions, write_character_model
from evaluation_services import write_questions
from rich.console import Console

from forage_cli.commands.probe import probe
from forage_cli.local import serving
from forage_cli.local.stack import Program, shift_ports
from forage_cli.runs.journal import Journal
from forage_common.clients.calls import RefusedError
from forage_common.errors import DataError, SettingsError, UserError
from forage_common.files.trajectory_file import TrajectoryWriter, read_trajectories
from forage_common.settings import Settings, load_settings
from forage_common.v1.probe_pb2 import CotBoundary, Probed
from forage_common.v1.trajectory_pb2 import ActionKind, GroundTruth, Role, Score, Span, Status, Trajectory, Turn
from forage_probe import metrics
from forage_probe.contexts import CONNECTIVE
from forage_probe.prober import ProbePlan, Prober
from forage_probe.work import list_probe_items, run_probes

REPOSITORY = Path(__file__).parents[3]
FORAGE = [sys.executable, "-c", "from forage_cli.main import main; main()", "probe"]
LENGTH = 40
PLAN = ProbePlan(points=10, samples=50, seed=7)
RIGHT = {"world_facts": " oslo ", "puzzle": " (4 -\n 1) * 2 "}
WRONG = {"world_facts": (" Rome ", " Bern "), "puzzle": (" 4 + 1 + 2 ", " 6 ")}


def find_source(context: str) -> str:
    return "puzzle" if "Make 6" in context else "world_facts"


def answer(source: str, right: bool, chance: random.Random) -> str:
    return (RIGHT[source] if right else chance.choice(WRONG[source])) + "</answer> and more"


def answer_ignorantly(context: str, chance: random.Random) -> str:
    """Right in seven of ten, whatever it has thought."""
    return answer(find_source(context), chance.random() < 0.7, chance)


def answer_thoughtfully(context: str, chance: random.Random) -> str:
    """Right as often as it has a share of its thought."""
    kept = context.rpartition("<think>")[2].removesuffix(CONNECTIVE).count(".")
    return answer(find_source(context), chance.random() < kept / LENGTH, chance)


def build_trajectory(number: int, source: str = "world_facts", right: bool = True, **fields: object) -> Trajectory:
    """A search and an answer, or a puzzle's only turn, in tokens of single characters."""
    said = "." * LENGTH
    if source == "puzzle":
        parts = [
            (Role.ROLE_PROMPT, "Make 6 of 1, 2, 4. "),
            (Role.ROLE_MODEL, f"<think>{said}</think> <answer>x</answer>"),
        ]
        truth = GroundTruth(countdown_target=6, countdown_numbers=[1, 2, 4])
    else:
        parts = [
            (Role.ROLE_PROMPT, f"{number}. Capital of Norway? "),
            (Role.ROLE_MODEL, "<think>hm</think> <search>Norway</search>"),
            (Role.ROLE_ENV, "\n<information>Oslo is its capital.</information>\n"),
            (Role.ROLE_MODEL, f"<think>{said}</think> <answer> Oslo </answer>"),
        ]
        truth = GroundTruth(targets=["Oslo"])
    spans, ids, turns = [], [], []
    for role, text in parts:
        spans.append(Span(role=role, begin=len(ids), end=len(ids) + len(text), text=text))
        ids += encode(text)
        if role == Role.ROLE_MODEL:
            kind = ActionKind.ACTION_KIND_ANSWER if "<answer>" in text else ActionKind.ACTION_KIND_SEARCH
            turns.append(Turn(index=len(turns) + 1, action=kind))
    known = {
        "id": f"run/{source}/test/{number}/0/0",
        "data_source": source,
        "token_ids": ids,
        "prompt_length": spans[0].end,
        "spans": spans,
        "turns": turns,
        "ground_truth": truth,
        "status": Status.STATUS_OK,
        "score": Score(status=Status.STATUS_OK, total=0.8 if right else 0.1),
        "validation_score": Score(status=Status.STATUS_OK, total=float(right)),
    }
    return Trajectory(**{**known, **fields})


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The reward service, as the verbs start it; its settings."""
    folder = tmp_path_factory.mktemp("reward")
    overrides = [
        *shift_ports(27000 + os.getpid() % 200 * 20),
        f"run.dir={folder}",
        "reward.routes={world_facts: {name: search_r1_format}, puzzle: {name: countdown}}",
        f"model.path={write_character_model(folder / 'model')}",
        "rollout.max_prompt_length=2000",
        "rollout.max_response_length=500",
        "rollout.engine.max_model_len=4000",
    ]
    with serving.ensure_services(load_settings(None, overrides), Console(quiet=True), (Program.REWARD,)):
        yield overrides


@pytest.fixture
def scripted() -> Iterator[CompletionsServer]:
    with serve_completions(answer_ignorantly) as server:
        yield server


@pytest.fixture
def overrides(reward: list[str], scripted: CompletionsServer) -> list[str]:
    addresses = {"http": scripted.address, "health": scripted.address, "grpc": scripted.grpc_address}
    return [*reward, *(f"rollout.{name}_address={address}" for name, address in addresses.items())]


@pytest.fixture
def settings(overrides: list[str]) -> Settings:
    return load_settings(None, overrides)


async def run_probe(settings: Settings, trajectories: list[Trajectory], plan: ProbePlan = PLAN) -> list[Probed]:
    wanted = [item for one in trajectories for item in list_probe_items(one, every=False)]
    async with aclosing(run_probes(trajectories, wanted, settings, plan)) as work:
        return [found async for found in work]


@pytest.mark.parametrize("source", ["world_facts", "puzzle"])
async def test_a_policy_that_ignores_its_thought_has_a_flat_curve_and_no_area(settings: Settings, source: str) -> None:
    found = await run_probe(settings, [build_trajectory(number, source) for number in range(4)])
    assert [one.status_detail for one in found] == [""] * 4
    measures = metrics.summarise(found)["all"]
    # 44 intervals of 95 %: of so many about two are expected to miss, and more than six hardly ever do.
    missed = sum(not low <= 0.7 <= high for one in found for low, high in metrics.measure(one).intervals)
    assert missed <= 6
    assert max(measures.confidence_at) - min(measures.confidence_at) < 0.2
    assert abs(measures.overconfidence) < 0.15
    assert measures.aoc == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("source", ["world_facts", "puzzle"])
async def test_a_policy_that_answers_as_it_thinks_has_a_rising_curve(
    settings: Settings, scripted: CompletionsServer, source: str
) -> None:
    scripted.policy = answer_thoughtfully
    found = await run_probe(settings, [build_trajectory(number, source) for number in range(4)])
    measures = metrics.summarise(found)["all"]
    missed = sum(
        not low <= place / 10 <= high
        for one in found
        for place, (low, high) in enumerate(metrics.measure(one).intervals)
    )
    assert missed <= 6
    assert [point.kept for point in found[0].points] == [4 * place for place in range(11)]
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
    (found,) = await run_probe(settings, [build_trajectory(0)], ProbePlan(points=1, samples=40, seed=1))
    empty, whole = found.points
    assert whole.cached_tokens == 0  # nothing was asked before
    assert empty.cached_tokens == 39 * (found.cot_begin)  # its beginning was
    assert whole.context_tokens == found.cot_end + len(CONNECTIVE)
    counts = {answer.answer: answer.count for answer in whole.answers}
    assert set(counts) == {"oslo", ""}
    assert counts["oslo"] == whole.correct
    assert sum(counts.values()) < whole.samples == 40
    assert found.correct


async def test_answers_inside_a_thought_are_not_scored(settings: Settings, scripted: CompletionsServer) -> None:
    """Cut within its answer, a thought leaves an open `<answer>`, in which a reward would look for the answer."""
    text = "Is it <answer> Rome </answer>?</think><answer>x</answer>"
    prompt = Span(role=Role.ROLE_PROMPT, begin=0, end=1, text="?")
    model = Span(role=Role.ROLE_MODEL, begin=1, end=1 + len(text), text=text)
    leak = build_trajectory(0, token_ids=encode("?" + text), spans=[prompt, model], turns=[])
    scripted.policy = lambda *_: " Oslo </answer>"
    (found,) = await run_probe(settings, [leak], ProbePlan(points=5, samples=3, seed=1))
    assert [point.correct for point in found.points] == [3] * 6
    scripted.policy = lambda *_: "I mean <answer> Oslo </answer>"
    (found,) = await run_probe(settings, [leak], ProbePlan(points=5, samples=3, seed=1))
    assert [point.correct for point in found.points] == [3] * 6


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
        (found,) = await run_probe(settings, [one])
        assert (found.status, list(found.points)) == (Status.STATUS_INVALID_INPUT, [])
        assert found.trajectory_id == one.id
        assert re.search(reason, found.status_detail) or "targets" in found.status_detail
    scripted.max_model_len = 60
    (found,) = await run_probe(settings, [build_trajectory(4)])
    assert "leave no room for an answer within 60" in found.status_detail
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
    (found,) = await run_probe(settings, [build_trajectory(0)], small)
    assert found.status == Status.STATUS_OK
    scripted.failures = [400]
    with pytest.raises(RefusedError, match="a scripted failure"):
        await run_probe(settings, [build_trajectory(0)], small)
    scripted.token = "secret"
    with pytest.raises(SettingsError, match=r"asks for a token: set rollout\.auth_token_file"):
        await run_probe(settings, [build_trajectory(0)], small)
    (tmp_path / "token").write_text("secret\n")
    rollout = settings.rollout.model_copy(update={"auth_token_file": tmp_path / "token"})
    (found,) = await run_probe(settings.model_copy(update={"rollout": rollout}), [build_trajectory(0)], small)
    assert found.status == Status.STATUS_OK


def write_trajectories(file: Path, count: int) -> Path:
    with TrajectoryWriter(file, "<|im_end|>") as writer:
        for number in range(count):
            writer.write(build_trajectory(number, right=number % 2 == 0))
        writer.write(Trajectory(id="run/lost", status=Status.STATUS_TIMEOUT, status_detail="it hung"))
    return file


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_continues_after_kill_9_and_loses_no_finished_probe(
    overrides: list[str],
    scripted: CompletionsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_trajectories(tmp_path / "stored.parquet", 12)
    command = [*FORAGE, file.name, "--points", "4", "--samples", "8", *overrides]
    scripted.policy, scripted.delay_s = answer_thoughtfully, 0.15
    journal = tmp_path / "stored-probe" / "journal.bin"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: journal.exists() and journal.stat().st_size > 800)
        process.send_signal(signal.SIGKILL)
    (tmp_path / "copy.bin").write_bytes(journal.read_bytes())
    with Journal(tmp_path / "copy.bin", Probed) as copy:
        finished = list(copy.read())
    assert 0 < len(finished) < 12
    before = len(scripted.asked)
    assert 0 < before < 60
    scripted.delay_s = 0.0
    monkeypatch.chdir(tmp_path)
    again = partial(probe, [file.name, *overrides], points=4)
    again(samples=8)
    with Journal(journal, Probed) as whole:
        assert list(whole.read())[: len(finished)] == finished
    assert len(scripted.asked) <= 60 + 4 * 5  # at most those that were in flight were begun again
    folder = tmp_path / "stored-probe"
    kept = [row["trajectory"] for row in pq.read_table(folder / "probes.parquet").to_pylist()]
    assert kept == [f"run/world_facts/test/{number}/0/0" for number in range(12)] + ["run/lost"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["probes"], summary["failed"], summary["sets"]["correct"]["count"]) == (13, 1, 6)
    said = " ".join(capsys.readouterr().out.split())
    assert "13 probes in stored-probe; report" in said
    assert "1 could not be probed: its status is TIMEOUT: it hung" in said
    page = (folder / "report.html").read_text()
    assert (page.count("<svg"), page.count("<mark"), page.count("40 tokens kept: 8 of 8 right")) == (2, 12 * 5, 12)
    # Nothing is left: the same command asks nobody, and other samples need another folder.
    asked = len(scripted.asked)
    again(samples=8)
    assert len(scripted.asked) == asked
    with pytest.raises(UserError, match="holds probes with samples 8, now it is 9"):
        again(samples=9)
    scripted.digest = "second"
    journal.write_bytes((tmp_path / "copy.bin").read_bytes())
    with pytest.raises(UserError, match="holds probes with policy first@3, now it is second@3"):
        again(samples=8)
    assert len(scripted.asked) == asked
    with pytest.raises(UserError, match="services are already running"):
        again(samples=8, policy=str(REPOSITORY / "models/tiny-policy"))


def test_fresh_trajectories_are_sampled_once(
    overrides: list[str],
    scripted: CompletionsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_questions(tmp_path / "questions.parquet", "world_facts")
    scripted.trajectory = lambda prompt: build_trajectory(0, id=f"{prompt.run_id}/{prompt.group_uid}/0")
    again = partial(probe, overrides, questions=file, points=2, samples=2, out=Path("found"))
    again(limit=2)
    assert len(scripted.prompts) == 2
    again()  # the other three
    assert sorted(prompt.group_uid for prompt in scripted.prompts) == [f"world_facts/test/{n}/0" for n in range(5)]
    assert {prompt.samples for prompt in scripted.prompts} == {1}
    assert len({prompt.sampling.seed for prompt in scripted.prompts}) == 5
    assert len(scripted.asked) == 5 * 3
    assert "5 probes in found" in capsys.readouterr().out
    assert [one.id for one in read_trajectories(tmp_path / "found" / "trajectories.parquet")] == [
        f"probe/world_facts/test/{number}/0/0" for number in range(5)
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name one file of trajectories"),
        (["a.parquet", "--questions", "b.parquet"], "name one file of trajectories"),
        (["missing.parquet"], "missing.parquet cannot be read"),
        (["bad.parquet"], "bad.parquet cannot be read as Parquet"),
        (["bad.parquet", "rollout.pots=1"], "rollout.pots"),
    ],
)
def test_invalid_requests_end_with_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.parquet").write_text("PAR?")
    options = iter(arguments)
    words = [word for word in options if word != "--questions" or not next(options)]
    questions = Path(arguments[2]) if "--questions" in arguments else None
    with pytest.raises(UserError, match=re.escape(sentence)):
        probe(words, questions=questions, config=None)
    assert list(islice(tmp_path.glob("*-probe"), 1)) == []
