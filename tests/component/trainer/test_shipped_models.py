"""The policies that Forage ships, and a policy that learns as they have: models of a million parameters and more."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import torch
from tiny_episodes import GUESSES, NAMER, TWO_HOPS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forage_cli.datasets import countdown as problems
from forage_models.tiny_policy.countdown import Demonstrations, Puzzle, measure_share_solved, read_puzzles
from forage_models.tiny_policy.demonstrations import Demonstrator, Mode, Role, Segment, build_prompt_segment, encode
from forage_models.tiny_policy.tokenizer import VOCABULARY
from forage_models.tiny_policy.train import compute_loss, make_model

MODELS = Path(__file__).parents[3] / "models"
POLICY, COUNTDOWN = MODELS / "tiny-policy", MODELS / "tiny-countdown"


def test_the_shipped_model_is_small_tied_and_finite() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 12e6
    assert AutoConfig.from_pretrained(POLICY).model_type == "qwen2"
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    assert 1e6 <= model.num_parameters() <= 5e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) == VOCABULARY
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    ids = torch.tensor([encode(tokenizer, [build_prompt_segment(tokenizer, TWO_HOPS.question)])])
    assert torch.isfinite(model(ids).logits).all()


def test_the_shipped_policy_searches_for_an_unseen_name_and_copies_the_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    names = {"Erdenet": "Velkam", "Mongolia": "Ostrunia", "Ulaanbaatar": "Quelby", "Tugrik": "Zarnik"}

    def invent(text: str) -> str:
        return re.sub("|".join(names), lambda match: names[match[0]], text)

    turns = Demonstrator(NAMER, GUESSES).write_turns(TWO_HOPS, Mode.RIGHT, random.Random(0), simple=True)
    turns = [Segment(turn.role, invent(turn.text)) for turn in turns]
    ids = encode(tokenizer, [build_prompt_segment(tokenizer, invent(TWO_HOPS.question))])
    for turn in turns:
        own = encode(tokenizer, [turn])
        if turn.role is Role.MODEL:  # after its first thought's first token the policy must go on by itself
            start = ids + own[:2]
            out = model.generate(torch.tensor([start]), do_sample=False, max_new_tokens=len(own) - 2)
            assert out[0, len(start) :].tolist() == own[2:], tokenizer.decode(out[0])
        ids += own


def test_cloning_lowers_the_loss_on_problems_read_from_a_file(tmp_path: Path) -> None:
    problems.build_countdown(tmp_path, {"train": 60, "test": 5}, [3], 99, 0, max_number=12)
    puzzles = read_puzzles(tmp_path / "train.parquet")
    assert len(puzzles) == 60
    assert all(len(puzzle.numbers) == 3 for puzzle in puzzles)
    data = Demonstrations(puzzles, seed=0)
    model = make_model(data.tokenizer, seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = compute_loss(model, data.draw_batch(1.0)[:4], model.config.pad_token_id)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_shipped_countdown_policy_is_small_and_starts_low_with_room_to_learn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(COUNTDOWN)
    assert sum(file.stat().st_size for file in COUNTDOWN.iterdir()) <= 6e6
    model = AutoModelForCausalLM.from_pretrained(COUNTDOWN, dtype=torch.float32).eval()
    assert model.config.vocab_size == len(tokenizer)
    drawn = islice(problems.generate_problems([3], 99, 0, 12), 4000, 4050)  # the first of the test file
    puzzles = [Puzzle(problem.numbers, problem.target) for problem in drawn]
    torch.manual_seed(0)
    assert 0.05 <= measure_share_solved(model, tokenizer, puzzles, sample=True) <= 0.5
    assert measure_share_solved(model, tokenizer, puzzles, sample=False) < 0.2
