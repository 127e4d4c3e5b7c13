"""`forage trajectories` on real files: filtering, sorting, colours, comparison and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from rich.text import Text
from typer.testing import CliRunner

from forage_cli.commands.trajectories import trajectories
from forage_cli.terminal.token_table import colour_response, compute_scale
from forage_proto.v1.trajectory_pb2 import GroundTruth, Role, Score, Span, Status, Trajectory
from forage_records.step_file import StepRow, step_file_path, write_step
from forage_records.trajectory_rows import Filter, compute_sort_value, find_changes, read_step_rows, sort_rows
from forage_records.view_options import Colour, SortKey
from forage_runtime.errors import DataError, UserError
from forage_runtime.settings import Settings
from forage_runtime.text.token_texts import TokenTexts

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / "models" / "tiny-policy"
PROMPT = "Answer. Question: Who is {}?\n<|im_end|>\n<|im_start|>assistant\n"

app = typer.Typer()
app.command()(trajectories)


@pytest.fixture(scope="module")
def ids() -> dict[str, int]:
    content = json.loads((MODEL / "tokenizer.json").read_text())
    return dict(content["model"]["vocab"])


def build_row(
    ids: dict[str, int], step: int, name: str, sample: int, reward: float | None, gap: float = 0.0, source: str = "nq"
) -> StepRow:
    """Three tokens of the policy around one of an observation; advantages -1, 1 (and 2 on the last)."""
    tokens = [ids[text] for text in ("!", "Ġ", '"', "#")]
    failed = reward is None
    trajectory = Trajectory(
        id=f"run/{source}/train/{name}/{step}/{sample}",
        group_uid=f"{source}/train/{name}/{step}",
        sample=sample,
        data_source=source,
        token_ids=[5, *tokens],
        prompt_length=1,
        loss_mask=[1, 0, 1, 1],
        turn_ids=[1, -1, 2, 2],
        logprobs=[-1.0, 0.0, -1.0, -1.0],
        spans=[
            Span(role=Role.ROLE_PROMPT, begin=0, end=1, text=PROMPT.format(name)),
            Span(role=Role.ROLE_MODEL, begin=1, end=2, text="!"),
            Span(role=Role.ROLE_ENV, begin=2, end=3, text=" "),
            Span(role=Role.ROLE_MODEL, begin=3, end=5, text='"#'),
        ],
        score=Score(status=Status.STATUS_OK, total=reward or 0.0),
        validation_score=Score(status=Status.STATUS_OK, total=float(reward == 1)),
        status=Status.STATUS_TIMEOUT if failed else Status.STATUS_OK,
        ground_truth=GroundTruth(targets=["x"]),
    )
    if failed:
        return StepRow(trajectory, step, step - 1, trained=False)
    sign = 1.0 if reward == 1 else -1.0
    return StepRow(
        trajectory,
        step,
        step - 1,
        trained=True,
        loss_mask=[1, 0, 1, 1],
        advantages=[sign, 0.0, sign, 2 * sign],
        log_probs=[-1.0, 0.0, -1.0 + gap, -1.0],
        engine_log_probs=[-1.0, 0.0, -1.0, -1.0],
    )


@pytest.fixture
def run(tmp_path: Path, ids: dict[str, int]) -> Path:
    settings = Settings().model_dump(mode="json")
    settings["model"]["path"] = str(MODEL)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    first = [
        build_row(ids, 10, "a", 0, 0.0),
        build_row(ids, 10, "a", 1, 0.2),
        build_row(ids, 10, "b", 0, 1.0),
        build_row(ids, 10, "c", 0, 0.1),
    ]
    second = [
        build_row(ids, 20, "a", 0, 1.0, gap=0.25),
        build_row(ids, 20, "a", 1, 1.0),
        build_row(ids, 20, "b", 0, 0.2, gap=-0.5),
        build_row(ids, 20, "d", 0, None, source="hotpotqa"),
    ]
    write_step(step_file_path(tmp_path, 10), "<|im_end|>", first)
    write_step(step_file_path(tmp_path, 20), "<|im_end|>", second)
    (tmp_path / "validation").mkdir()
    for label, rewards in (("before", (0.0, 1.0)), ("after", (1.0, 1.0))):
        lines = [
            {"uid": f"nq/test/{i}/0", "question": f"q{i}", "targets": ["x"], "em": r, "reward": r, "spans": []}
            for i, r in enumerate(rewards)
        ]
        (tmp_path / "validation" / f"{label}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def show_run(run: Path, *options: str) -> str:
    done = CliRunner().invoke(app, [str(run), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_trace_id_of_a_trajectory_is_printed(run: Path, ids: dict[str, int]) -> None:
    assert "trace" not in show_run(run, "--step", "10")
    traced = build_row(ids, 30, "a", 0, 1.0)
    traced.trajectory.trace_id = "0123456789abcdef" * 2
    write_step(step_file_path(run, 30), "<|im_end|>", [traced])
    assert "trace" in show_run(run, "--step", "30")
    assert "0123456789abcdef" * 2 in show_run(run, "--step", "30").replace("│", "").replace("\n", "").replace(" ", "")


def test_a_steps_rows_read_like_those_of_a_validation(run: Path) -> None:
    rows = read_step_rows(step_file_path(run, 20))
    assert [r["question"] for r in rows] == ["Who is a?", "Who is a?", "Who is b?", "Who is d?"]
    assert [r["reward"] for r in rows] == [1.0, 1.0, 0.2, None]
    assert [compute_sort_value(r, SortKey.ADVANTAGE) for r in rows] == pytest.approx([4 / 3, 4 / 3, -4 / 3, None])
    assert [compute_sort_value(r, SortKey.MISMATCH) for r in rows] == pytest.approx([0.25, 0.0, 0.5, None])
    by = sort_rows(rows, SortKey.MISMATCH)
    assert [r["question"][7] for r in by] == ["b", "a", "a", "d"], "those without the metric come last"
    assert [r["question"][7] for r in sort_rows(rows, SortKey.REWARD)] == ["a", "a", "b", "d"]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (Filter(), "aabd"),
        (Filter(right=True), "aa"),
        (Filter(right=False), "bd"),
        (Filter(source="hotpotqa"), "d"),
        (Filter(source="nq", text="Who is b"), "b"),
        (Filter(min_reward=0.2), "aab"),
        (Filter(min_reward=0.3), "aa"),
    ],
)
def test_rows_are_filtered_by_answer_source_text_and_reward(run: Path, chosen: Filter, names: str) -> None:
    rows = read_step_rows(step_file_path(run, 20))
    assert "".join(r["question"][7] for r in filter(chosen, rows)) == names


def test_two_steps_are_compared_by_question_in_any_epoch(run: Path) -> None:
    changes = find_changes(read_step_rows(step_file_path(run, 10)), read_step_rows(step_file_path(run, 20)))
    assert [(c.after[0]["question"], len(c.before)) for c in changes] == [("Who is a?", 2), ("Who is b?", 1)]
    assert [c.gain for c in changes] == pytest.approx([0.9, -0.8])
    output = show_run(run, "--step", "20", "--against", "10")
    assert "2 questions in both: 1 better, 1 worse, 0 the same; mean reward 0.550 → 0.600" in " ".join(output.split())
    assert "1 better, 0 worse, 1 the same" in " ".join(show_run(run, "--against", "before").split())


def test_colour_follows_the_sign_and_the_strength_of_the_advantage(run: Path) -> None:
    rows = read_step_rows(step_file_path(run, 20))
    steps = [r["step"] for r in rows]
    scale = compute_scale(steps, Colour.ADVANTAGE)
    assert scale == 2.0
    right, wrong = (colour_response(step, TokenTexts(MODEL), Colour.ADVANTAGE, scale) for step in (steps[0], steps[2]))
    assert right.plain == wrong.plain == '! "#'
    assert list_styles(right) == ["rgb(75,175,75)", "cyan", "rgb(75,175,75)", "rgb(0,200,0)"]
    assert list_styles(wrong) == ["rgb(185,95,95)", "cyan", "rgb(185,95,95)", "rgb(220,40,40)"]
    assert list_styles(colour_response(steps[3], TokenTexts(MODEL), Colour.ADVANTAGE, scale)) == [
        "bold",
        "cyan",
        "bold",
        "bold",
    ]


def list_styles(text: Text) -> list[str]:
    return [str(span.style) for span in text.spans]


def test_tokens_are_listed_by_their_difference_of_log_probabilities(run: Path) -> None:
    lines = show_run(run, "--step", "20", "--sort", "mismatch", "--count", "1", "--tokens", "2").splitlines()
    place = next(number for number, line in enumerate(lines) if line.split()[:2] == ["token", "text"])
    assert "3 tokens of the policy, trainer − engine: mean 0.17" in lines[place - 1]
    assert lines[place + 1].split() == ["2", '"', "-1.0000", "-1.5000", "-0.5", "-1.0000"]
    assert "Who is b?" in "\n".join(lines)
    assert "has no log-probabilities of it" in show_run(run, "--step", "20", "--source", "hotpotqa", "--tokens", "3")


def test_the_error_for_a_missing_validation_or_step_lists_the_existing_ones(run: Path) -> None:
    for options, error, sentence in (
        (["--step", "15"], DataError, "no trajectories of step 15 (saved: 10, 20)"),
        (["--label", "step-3"], DataError, "no trajectories of 'step-3' yet (there are: before, after)"),
        (["--colour", "advantage"], UserError, "name one, for instance --step 10"),
        (["--tokens", "3"], UserError, "name one, for instance --step 10"),
    ):
        done = CliRunner().invoke(app, [str(run), *options])
        assert isinstance(done.exception, error)
        assert sentence in str(done.exception)


def test_texts_of_tokens_are_those_of_the_tokenizer(ids: dict[str, int], tmp_path: Path) -> None:
    texts = TokenTexts(MODEL)
    assert texts([ids["<|im_end|>"], ids["ĠItaly"], 10**6]) == ["<|im_end|>", " Italy", "<1000000>"]
    assert TokenTexts(tmp_path)([7]) == ["<7>"], "a model that is gone leaves the rest to be read"


def test_a_character_of_several_tokens_is_shown_at_the_last_of_them(tmp_path: Path) -> None:
    vocabulary = {"å": 0, "Ń": 1, "Ĺ": 2, "a": 3}  # the three bytes of 字
    content = {"model": {"vocab": vocabulary}, "added_tokens": [], "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert TokenTexts(tmp_path)([0, 1, 2, 3]) == ["", "", "字", "a"]


def test_a_file_of_scores_among_the_validations_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(Settings().to_yaml())
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation/after.scores.jsonl").write_text('{"line": 1, "total": 1.0}\n')
    ended = CliRunner().invoke(app, [str(tmp_path), "--label", "after.scores"])
    assert isinstance(ended.exception, DataError)
    assert "after.scores.jsonl holds no trajectories: move it elsewhere" in str(ended.exception)
