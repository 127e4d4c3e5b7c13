"""The card of an evaluation: what it holds, which inputs are not its own, and when its numbers hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from forage_cli.evaluation import cards, plan
from forage_cli.evaluation.cards import Card, Verdict
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.plan import EvaluationPlan, SamplingPlan
from forage_cli.evaluation.policies import EvaluatedPolicy, Kind
from forage_cli.evaluation.results import write_results, write_summary
from forage_cli.main import app
from forage_proto.v1.trajectory_pb2 import (
    ActionKind,
    ChatMessage,
    GroundTruth,
    Provenance,
    Score,
    Status,
    TemplateValues,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from forage_records.questions import Question
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import Settings, load_settings

REPOSITORY = Path(__file__).resolve().parents[3]
INDEX = Provenance(corpus_digest="c", encoder_digest="e", index_digest="i", mode="hybrid")
QUESTIONS = {
    index: Question(
        "nq", "test", index, (ChatMessage(role="user", content=f"{index}?"),), GroundTruth(targets=["yes"]), ""
    )
    for index in range(20)
}
POLICY = EvaluatedPolicy("mine", Kind.FOLDER, "models/mine", Path("models/mine"), digest="d")
PLAN = EvaluationPlan(
    (Path("nq.parquet"),),
    "",
    QUESTIONS,
    (POLICY,),
    (Method.SEARCH,),
    SamplingPlan(samples=1, temperature=0.0, top_p=1.0, top_k=-1, seed=1),
    None,
    {
        "rollout.max_turns": 4,
        "rollout.environments": {"nq": {"name": "env.py:Env", "network": True}},
        "data.corpus": "here.jsonl",
        "data.template_date": None,
        "reward.routes": {"nq": [{"name": "f1"}]},
    },
    TemplateValues(variables='{"enable_thinking": false}', today="2026-11-29"),
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text("class Env: ...\n")
    Path("mine.py").write_text("def score(view, truth, params): ...\n")
    return load_settings(
        None,
        [
            "reward.routes={nq: [{name: mine}], other: [{name: em}]}",
            "reward.user.mine.function=mine.py:score",
            "rollout.environments.nq.name=env.py:Env",
        ],
        {},
    )


@pytest.fixture
def evaluate(tmp_path: Path, settings: Settings) -> Callable[..., Card]:
    """Evaluate without services: the answers are given by the number of their question, None for a failure."""

    def run(
        name: str, answers: Mapping[int, str | None], work: EvaluationPlan = PLAN, index: Provenance = INDEX
    ) -> Card:
        folder = tmp_path / name
        plan.claim_folder(folder, work)
        cards.record_searched(folder, index)
        finished = [
            (item, TrajectoryGroup(trajectories=[_answer(answers.get(item.index, "yes"))])) for item in work.items()
        ]
        write_results(folder, finished, {"mine": ""})
        return cards.build_card(work, settings, folder, write_summary(folder))

    return run


def _answer(text: str | None) -> Trajectory:
    if text is None:
        return Trajectory(status=Status.STATUS_TIMEOUT)
    return Trajectory(
        status=Status.STATUS_OK,
        turns=[Turn(index=1, action=ActionKind.ACTION_KIND_ANSWER, content=text)],
        validation_score=Score(status=Status.STATUS_OK, total=float(text == "yes")),
    )


WRONG = dict.fromkeys(range(5), "no")


def test_a_card_holds_what_its_numbers_depend_on_and_survives_its_file(evaluate: Any, tmp_path: Path) -> None:
    card = evaluate("once", WRONG)
    file = tmp_path / "deep" / "card.json"
    cards.write_card(card, file)
    assert cards.read_card(file) == card
    (result,) = card.results
    assert (result.em.mean, result.questions, result.failed_questions) == (0.75, 20, 0)
    assert result.em.low < 0.75 < result.em.high
    assert card.questions.sources == {"nq/test": 20}
    assert card.own_code.keys() == {"environment of nq", "reward mine"}
    assert card.settings["rollout.environments"] == {}, "a card opens nothing to code on another machine"
    assert card.searched[0].corpus_digest == "c"
    given = dict(text.split("=", 1) for text in card.list_settings())
    assert given["rollout.max_turns"] == "4"
    assert "rollout.environments" not in given, "those of --config stay"
    assert json.loads(given["data.template_date"]) == "2026-11-29"
    assert json.loads(given["data.apply_chat_template_kwargs"]) == {"enable_thinking": False}


def test_the_digest_of_questions_is_of_their_content(evaluate: Any) -> None:
    digest = evaluate("once", {}).questions.digest
    assert evaluate("moved", {}, replace(PLAN, files=(Path("elsewhere.parquet"),))).questions.digest == digest
    first = QUESTIONS[0]
    for name, changed in {
        "message": replace(first, messages=(ChatMessage(role="user", content="other?"),)),
        "role": replace(first, messages=(ChatMessage(role="system", content="0?"),)),
        "gold": replace(first, ground_truth=GroundTruth(targets=["yes", "y"])),
        "problem": replace(first, ground_truth=GroundTruth(countdown_target=3, countdown_numbers=[1, 2])),
        "split": replace(first, split="dev"),
        "text": replace(first, text="what baselines ask"),
    }.items():
        other = replace(PLAN, questions=QUESTIONS | {0: changed})
        assert evaluate(name, {}, other).questions.digest != digest, name
    one, moved = ({place: first} for place in (0, 1))
    digests = {cards._describe_questions(replace(PLAN, questions=some)).digest for some in (one, moved, QUESTIONS)}
    assert len(digests) == 3, "its place says which seed a question has"


def test_every_other_input_is_named_and_another_place_is_none(evaluate: Any, settings: Settings) -> None:
    card = evaluate("once", {})

    def differ(**changes: Any) -> list[str]:
        return cards.list_differences(card, cards.describe_inputs(replace(PLAN, **changes), settings))

    def change(**values: Any) -> dict[str, Any]:
        return {**PLAN.settings, **{name.replace("__", "."): value for name, value in values.items()}}

    assert differ(settings=change(data__corpus="there.jsonl", data__template_date="2026-11-29")) == []
    assert differ(questions={0: QUESTIONS[0]}) == [
        "questions: nq.parquet holds others (1 of nq/test, the card 20 of nq/test)"
    ]
    (policy,) = differ(policies=(replace(POLICY, digest="another"),))
    assert "--policy mine=FOLDER" in policy
    (more,) = differ(policies=(POLICY, replace(POLICY, label="typo")))
    assert more == "policy typo: it is none of the card's (mine)"
    assert differ(settings=change(rollout__max_turns=2)) == ["rollout.max_turns: 2, the card 4"]
    (routes,) = differ(settings=change(reward__routes={"nq": [{"name": "em"}]}))
    assert routes.startswith("reward.routes: ")
    assert differ(sampling=replace(PLAN.sampling, top_p=0.5)) == ["top_p: 0.5, the card 1.0"]
    assert differ(methods=(Method.SEARCH, Method.DIRECT)) == ["methods: ['search', 'direct'], the card ['search']"]
    template = TemplateValues(variables="{}", today="2026-11-30")
    assert [text.partition(":")[0] for text in differ(template=template)] == [
        "apply_chat_template_kwargs",
        "template date",
    ]
    Path("mine.py").write_text("def score(view, truth, params): return 1\n")
    assert differ() == ["reward mine: other code; --config names the settings with the card's"]


def test_a_reranker_and_the_tokenizer_of_an_endpoint_are_inputs(settings: Settings, tmp_path: Path) -> None:
    endpoint = replace(PLAN, policies=(EvaluatedPolicy("there", Kind.ENDPOINT, "http://h/v1", url="http://h/v1"),))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")

    def describe(reranker: str) -> cards.Inputs:
        given = load_settings(None, [f"model.path={folder}", f"retriever.rerank.model='{reranker}'"], {})
        return cards.describe_inputs(endpoint, given.model_copy(update={"reward": settings.reward}))

    card = describe(str(folder))
    assert cards.list_differences(card, describe(str(folder))) == []
    other = "retriever.rerank.model: not the card's reranker; --config names the settings with it"
    assert cards.list_differences(card, describe("http://user:word@host:1")) == [other]
    assert "word" not in describe("http://user:word@host:1").model_dump_json()
    (folder / "model.onnx").write_text("weights")
    assert cards.list_differences(card, describe(str(folder))) == [other]
    (folder / "tokenizer.json").write_text('{"other": 1}')
    tokenizer, reranker = cards.list_differences(card, describe(""))
    assert tokenizer.startswith("model.path: not the card's tokenizer of the endpoint")
    assert reranker == other
    assert cards.describe_inputs(PLAN, settings).other_models == {}


@pytest.mark.parametrize(
    ("again", "verdict"),
    [
        (WRONG, Verdict.SAME),
        (WRONG | {0: "never"}, Verdict.AGREES),  # as wrong as before, in other words
        (dict.fromkeys(range(5, 10), "no"), Verdict.AGREES),  # as many, and others
        (dict.fromkeys(range(20), "no"), Verdict.DISAGREES),
        ({}, Verdict.DISAGREES),
        (WRONG | {19: None}, Verdict.DISAGREES),  # a question without an answer proves nothing
        (dict.fromkeys(range(20)), Verdict.DISAGREES),
    ],
    ids=["same", "other words", "others wrong", "all wrong", "none wrong", "one failed", "all failed"],
)
def test_numbers_hold_within_their_interval(evaluate: Any, again: Mapping[int, str | None], verdict: Verdict) -> None:
    (verified,) = cards.verify_results(evaluate("once", WRONG), evaluate("again", again))
    assert verified.verdict is verdict
    assert verified.verdict.holds == (verdict is not Verdict.DISAGREES)


@pytest.mark.parametrize("metric", ["em", "sub_em", "f1"])
def test_a_number_that_was_changed_by_hand_does_not_hold(evaluate: Any, metric: str) -> None:
    card = evaluate("once", WRONG)
    forged = card.results[0].model_copy(update={metric: cards.Interval(mean=0.9, low=0.8, high=0.95)})
    (verified,) = cards.verify_results(card.model_copy(update={"results": (forged,)}), evaluate("again", WRONG))
    assert verified.verdict is Verdict.DISAGREES


def test_what_failed_both_times_agrees_with_nothing(evaluate: Any) -> None:
    once, again = evaluate("once", {0: None}), evaluate("again", {0: None})
    assert not cards.verify_results(once, again)[0].verdict.holds


def test_a_number_that_is_missing_does_not_hold(evaluate: Any) -> None:
    card = evaluate("once", {})
    assert not cards.verify_results(card, card.model_copy(update={"results": ()}))[0].verdict.holds


def test_another_corpus_does_not_verify_and_another_index_is_said(evaluate: Any) -> None:
    card = evaluate("once", {})
    assert cards.describe_searched(card, evaluate("same", {})) == ("", False)
    other = Provenance(corpus_digest="c", encoder_digest="e", index_digest="j", mode="hybrid")
    text, is_other = cards.describe_searched(card, evaluate("index", {}, index=other))
    assert "another index of the same corpus" in text
    assert not is_other
    assert cards.describe_searched(card, card.model_copy(update={"searched": ()}))[1] is False
    other.corpus_digest = "another"
    text, is_other = cards.describe_searched(card, evaluate("corpus", {}, index=other))
    assert "another corpus" in text
    assert is_other


def test_running_services_get_no_card() -> None:
    with pytest.raises(UserError, match="cannot say with which settings running services answer"):
        cards.require_known([POLICY, EvaluatedPolicy("running", Kind.RUNNING, "running")])


def test_a_wrong_card_is_refused_with_its_field(evaluate: Any, tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    with pytest.raises(DataError, match=r"card\.json cannot be read .*--card FILE"):
        cards.read_card(file)
    content = json.loads(evaluate("once", {}).model_dump_json())
    for change, field in [
        ({"format": 2}, "format"),
        ({"policies": []}, "policies"),
        ({"extra": 1}, "extra"),
        ({"methods": ["newer"]}, r"methods\.0"),
        ({"results": []}, "results"),
        ({"settings": {"security.user_code": "off"}}, "settings"),
    ]:
        file.write_text(json.dumps(content | change))
        with pytest.raises(DataError, match=rf"is no card \({field}: "):
            cards.read_card(file)
    file.write_text("{")
    with pytest.raises(DataError, match=r"is no card \(the file: "):
        cards.read_card(file)


def test_verify_refuses_other_questions_before_a_service_starts(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, model = tmp_path / "card.json", REPOSITORY / "models/tiny-policy"
    card = evaluate("once", {}).model_copy(update={"settings": {}, "own_code": {}})
    policies = tuple(one.model_copy(update={"source": str(model)}) for one in card.policies)
    cards.write_card(card.model_copy(update={"policies": policies}), file)
    questions = tmp_path / "other.parquet"
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Another?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["yes"]}},
        "extra_info": {"split": "test", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([row]), questions)
    monkeypatch.setattr("forage_cli.local.serving.is_running", lambda *_: False)
    done = CliRunner().invoke(app, ["eval", "--verify", str(file), str(questions), f"run.dir={tmp_path}"])
    assert isinstance(done.exception, UserError), done.output
    assert "questions: " in str(done.exception)
    assert "policy mine: other weights" in str(done.exception)
