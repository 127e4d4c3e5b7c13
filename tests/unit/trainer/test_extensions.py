"""Estimators, losses and samplers of the user's own: used as they are, checked, and named where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loss_parts import build_batch, draw_matrices, run_actor_loss

from forage_proto.v1.trajectory_pb2 import ChatMessage, GroundTruth
from forage_queue.trainer.feeder import Batches, make_batches
from forage_records.questions import Question
from forage_runtime.errors import SettingsError
from forage_runtime.settings import ActorSettings, AlgorithmSettings, CorrectionSettings, load_settings
from forage_trainer.algorithms.estimators.registry import Rewards, estimate_advantages
from forage_trainer.extensions import ExtensionError, check_functions, find_sampler, load_function

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/training"
QUESTIONS = tuple(
    Question("q", "train", i, (ChatMessage(role="user", content="x" * (20 - i % 7)),), GroundTruth(), str(i))
    for i in range(20)
)
BROKEN = {
    "raise ValueError('no such table')": "ValueError: no such table",
    "def other(): pass": "has no 'f': define it",
    "f = 3": "is 3: expected a function",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "def f(:": "SyntaxError",
}


def write(folder: Path, text: str) -> str:
    file = folder / f"user_{abs(hash(text))}.py"
    file.write_text(text)
    return f"{file}:f"


@pytest.mark.parametrize("text", BROKEN)
def test_a_function_that_cannot_be_loaded_is_named_before_anything_is_built(tmp_path: Path, text: str) -> None:
    source = write(tmp_path, text)
    for setting in ("trainer.algorithm.estimator", "trainer.actor.policy_loss.loss_mode", "data.sampler"):
        with pytest.raises(SettingsError) as caught:
            check_functions(load_settings(None, [f"{setting}={source}"], {}))
        assert str(caught.value).startswith(f"{setting} = '{source}'")
        assert BROKEN[text] in str(caught.value)


def test_a_place_without_code_is_named() -> None:
    with pytest.raises(
        SettingsError, match=r"^data\.sampler = '/nowhere/a\.py' is not a Python file: expected an existing"
    ):
        load_function("data.sampler", "/nowhere/a.py:f")
    with pytest.raises(SettingsError, match=r"^data\.sampler = 'no_such_module:f' cannot be loaded .*correct it"):
        load_function("data.sampler", "no_such_module:f")


@pytest.mark.parametrize("value", ["f", "a b:f", "file.py", "module:f()", ":f", "a.py:1"])
def test_what_names_no_function_is_refused_with_the_settings(value: str) -> None:
    with pytest.raises(SettingsError, match=r"data\.sampler.*FILE\.py:FUNCTION or MODULE:FUNCTION"):
        load_settings(None, [f"data.sampler={value}"], {})


def test_a_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user.py").write_text("def f(a, b=2): return a + b")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("data.sampler", "of_a_user:f")(1, b=4) == 5


def build_rewards() -> Rewards:
    """Two groups of two rows; the last token of the first row is outside the mask."""
    mask = torch.ones(4, 3)
    mask[0, 2] = 0
    scores = torch.tensor([[0.0, 1.0, 9.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
    turns: list[dict[int, float]] = [{}] * 4
    return Rewards(scores, mask, ["a", "a", "b", "b"], torch.ones(4, 3).long(), turns, torch.zeros(4))


def test_an_estimator_of_the_users_own_gives_the_advantages() -> None:
    settings = AlgorithmSettings(estimator=f"{EXAMPLES / 'estimator.py'}:beat_the_best")
    result = estimate_advantages(build_rewards(), settings)
    expected = torch.tensor([[0.75, 0.75, 0.0], [-0.75] * 3, [0.5] * 3, [-0.5] * 3])
    assert torch.equal(result.advantages, expected)
    assert torch.equal(result.returns, expected)


def test_returns_of_an_estimator_are_kept_apart_and_nothing_is_outside_the_mask(tmp_path: Path) -> None:
    source = write(tmp_path, "def f(r, s): return (1 - r.mask) * 7, r.mask * 0 + 3")
    result = estimate_advantages(build_rewards(), AlgorithmSettings(estimator=source))
    assert not result.advantages.any()
    assert result.returns.sum() == 3 * 11


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("None", "gave NoneType None"),
        ("r.mask[:, :1]", r"gave a tensor of shape \(4, 1\)"),
        ("r.mask / 0", "gave a value that is NaN or infinite"),
        ("(r.mask,)", "gave 1 values"),
        ("()", "gave 0 values"),
        ("(r.mask, [1])", "gave list"),
        ("1 // 0", "raised ZeroDivisionError: integer division"),
    ],
)
def test_what_an_estimator_gives_is_checked(tmp_path: Path, given: str, found: str) -> None:
    source = write(tmp_path, f"def f(r, s): return {given}")
    with pytest.raises(ExtensionError, match=rf"trainer\.algorithm\.estimator = '{source}' {found}"):
        estimate_advantages(build_rewards(), AlgorithmSettings(estimator=source))


def compute(loss: str, own: torch.Tensor) -> torch.Tensor:
    tensors = build_batch()
    actor = ActorSettings(policy_loss={"loss_mode": loss} if loss else {}, kl_loss_coef=0.02, entropy_coeff=0.03)
    return run_actor_loss(tensors, draw_matrices(tensors), actor, CorrectionSettings(mode="tis"), own=own)


def draw_own() -> torch.Tensor:
    return torch.tensor(draw_matrices(build_batch())["own"], requires_grad=True)


def test_a_loss_of_the_users_own_takes_the_place_of_the_policy_loss_alone(tmp_path: Path) -> None:
    """KL, entropy and the weights of tokens stay: a user's function that calls verl's loss gives what verl's gives."""
    text = "from verl.trainer.ppo.core_algos import get_policy_loss_fn\ndef f(**given):\n"
    same = write(tmp_path, text + "    return get_policy_loss_fn('vanilla')(**given)")
    mine, theirs = draw_own(), draw_own()
    result, expected = compute(same, mine), compute("", theirs)
    assert result == expected
    result.backward()
    expected.backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_the_gradient_of_the_example_is_that_of_its_formula() -> None:
    own = draw_own()
    with_loss = compute(f"{EXAMPLES / 'loss.py'}:clipped_reinforce", own)
    with_loss.backward()
    tensors = build_batch()
    given = {name: torch.tensor(value).double() for name, value in draw_matrices(tensors).items()}
    mask, free = tensors.mask.double(), given["own"].clone().requires_grad_()
    weights = torch.exp(given["old"] - given["engine"]).clamp(max=2.0)
    weights = torch.where(tensors.state == 1, weights, 1.0)
    ratio = torch.exp(given["own"] - given["old"]).clamp(max=1.28)
    log_ratio = given["reference"] - free
    kl = (torch.exp(log_ratio) - log_ratio - 1).clamp(-10, 10)
    loss = ((-given["advantages"] * ratio * weights * free + 0.02 * kl) * mask).sum() / mask.sum()
    loss.backward()
    entropy = 0.03 * (given["entropy"] * mask).sum() / mask.sum()
    torch.testing.assert_close(with_loss.double(), loss - entropy, atol=1e-5, rtol=1e-5)
    assert own.grad is not None
    assert free.grad is not None
    torch.testing.assert_close((own.grad * mask).double(), free.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("given", ["None", "log_prob", "log_prob.detach().sum()", "3.0"])
def test_what_a_loss_gives_is_checked(tmp_path: Path, given: str) -> None:
    source = write(tmp_path, f"def f(log_prob, **others): return {given}")
    with pytest.raises(ExtensionError, match=rf"policy_loss\.loss_mode = '{source}' gave .*expected a scalar tensor"):
        compute(source, draw_own())


def list_issued(batches: Batches, count: int) -> list[int]:
    return [
        batches.group(batch, position)[1].index
        for batch in range(1, count // batches.batch_size + 1)
        for position in range(batches.batch_size)
    ]


def test_a_sampler_orders_the_questions_of_each_epoch() -> None:
    settings = load_settings(
        None, [f"data.sampler={EXAMPLES / 'sampler.py'}:short_first", "data.train_batch_size=5"], {}
    )
    batches = make_batches(QUESTIONS, settings, find_sampler(settings))
    first, second = list_issued(batches, 40)[:20], list_issued(batches, 40)[20:]
    for order in (first, second):
        lengths = [len(QUESTIONS[index].messages[-1].content) for index in order]
        assert lengths == sorted(lengths)
        assert sorted(order) == list(range(20))
    assert first != second, "equal lengths are in an order of the epoch's own"
    again = make_batches(QUESTIONS, settings, find_sampler(settings))
    assert again.group(7, 3) == batches.group(7, 3), "as a resumed run asks, without those before"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("[0] * len(q)", "other numbers, or one twice"),
        ("range(3)", r"int64 of shape \(3,\)"),
        ("None", r"object of shape \(\)"),
        ("[i + 0.5 for i in range(len(q))]", "other numbers, or one twice"),
    ],
)
def test_what_a_sampler_gives_is_checked(tmp_path: Path, given: str, found: str) -> None:
    settings = load_settings(None, [f"data.sampler={write(tmp_path, f'def f(q, e, s): return {given}')}"], {})
    batches = make_batches(QUESTIONS, settings, find_sampler(settings))
    with pytest.raises(SettingsError, match=f"data.sampler gave {found}: expected the indexes 0 to 19, each once"):
        batches.group(1, 0)
