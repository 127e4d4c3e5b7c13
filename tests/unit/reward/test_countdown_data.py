"""`forage data countdown` and its reward: every problem is solvable, and its solution earns the full score."""

from __future__ import annotations

import random
import re
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from forage_cli.datasets.countdown import MAX_NUMBER, PROMPT, SIZES, draw_problem, generate_problems
from forage_reward.parsing.arithmetic import evaluate
from forage_reward.rewards.countdown import REWARD, Params
from forage_reward.trajectory import GroundTruth, Role, Span, TrajectoryView


def compute_score(answer: str, truth: GroundTruth, prompt: str = "") -> float:
    spans = (Span(Role.PROMPT, prompt), Span(Role.MODEL, f"<think>t</think>\n<answer> {answer} </answer><|im_end|>"))
    return REWARD.compute_score(TrajectoryView(spans), truth, Params()).total


@given(st.integers(), st.sampled_from(SIZES))
def test_the_solution_of_the_generator_earns_the_full_score(seed: int, size: int) -> None:
    problem = draw_problem(size, random.Random(seed))
    truth = GroundTruth(countdown_target=problem.target, countdown_numbers=problem.numbers)
    prompt = PROMPT.format(numbers=", ".join(map(str, problem.numbers)), target=problem.target)
    assert len(problem.numbers) == size
    assert all(1 <= number <= MAX_NUMBER for number in problem.numbers)
    assert compute_score(problem.solution, truth, prompt) == 1.0
    assert compute_score(f"({problem.solution}) + 1 - 1", truth, prompt) == 0.1
    other = GroundTruth(countdown_target=problem.target + 1, countdown_numbers=problem.numbers)
    assert compute_score(problem.solution, other, prompt) == 0.1


def test_every_problem_of_a_data_set_is_unique_within_its_limits_and_solvable() -> None:
    sample = list(islice(generate_problems((3, 4), 50, seed=7), 3_000))
    assert len({(p.target, *sorted(p.numbers)) for p in sample}) == len(sample)
    for problem in sample:
        assert len(problem.numbers) in (3, 4)
        assert 1 <= problem.target <= 50
        assert evaluate(problem.solution) == problem.target
        assert sorted(map(int, re.findall(r"\d+", problem.solution))) == sorted(problem.numbers)
    used = "".join(problem.solution for problem in sample)
    assert all(used.count(operator) > 100 for operator in "+-*/")
    assert {len(problem.numbers) for problem in sample} == {3, 4}
