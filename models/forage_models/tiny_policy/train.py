"""Behaviour cloning of the search policy; models/README.md has the command."""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from forage_models.tiny_policy import demonstrations as demos
from forage_models.tiny_policy.evaluate import measure_start
from forage_models.tiny_policy.facts import Episode, World, rename_entities
from forage_models.tiny_policy.names import Namer
from forage_models.tiny_policy.tokenizer import PAD, TURN_END, VOCABULARY, list_added_tokens, train_tokenizer

LOG = logging.getLogger("tiny_policy")
BATCH_TOKENS = 3072
COPY_SHARE = 0.6
"""Share of the run in which most demonstrations search right; the mixture follows."""
SIMPLE_SHARE = 0.05
"""Share of the run that shows one hop and one document only."""


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Make the policy with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
    )
    return Qwen2ForCausalLM(config)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write model and tokenizer to `out` atomically; a README in it stays."""
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=[model.config.eos_token_id, model.config.pad_token_id],
    )
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", fresh / "README.md")
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def iterate_tokenizer_texts(episodes: list[Episode], namer: Namer, rng: random.Random) -> Iterator[str]:
    """Texts to learn the merges from: questions and passages, real and renamed, and the thoughts."""
    for episode in episodes:
        for version in (episode, rename_entities(episode, namer, rng)):
            yield f" {version.question}"
            for document in version.hops:
                yield f'"{document.title}") {document.text}\n'
    thoughts = (demos.LOOK, demos.FURTHER, demos.FOUND, demos.KNOW, demos.MAYBE, demos.PERHAPS, demos.MUSING)
    for _ in range(len(episodes)):
        yield " " + " ".join(thoughts)


class Batches:
    """Batches of about `BATCH_TOKENS` tokens, sampled without end; a batch has sequences of similar length."""

    def __init__(self, world: World, seed: int) -> None:
        """Read the training split; learn names and the tokenizer from it."""
        self.rng = random.Random(f"demonstrations-{seed}")
        self.episodes = world.read_episodes("train")
        guesses: dict[str, set[str]] = {}
        for episode in self.episodes:
            guesses.setdefault(episode.asked, set()).add(episode.targets[0])
        real = {document.title for episode in self.episodes for document in episode.hops}
        self.namer = Namer(real, [name.split(" ")[-1] for name in guesses["currency"]])
        self.demonstrator = demos.Demonstrator(self.namer, {k: sorted(v) for k, v in guesses.items()})
        texts = iterate_tokenizer_texts(self.episodes, self.namer, random.Random(f"tokenizer-{seed}"))
        self.tokenizer = train_tokenizer(texts, list_added_tokens(), VOCABULARY)

    def draw_sequence(self, progress: float) -> list[int]:
        """Draw the token ids of one demonstration; `progress` is the share of the run that is over (0 to 1)."""
        rng = self.rng
        episode = rng.choice(self.episodes)
        simple = progress < SIMPLE_SHARE
        while simple and len(episode.hops) > 1:
            episode = rng.choice(self.episodes)
        if rng.random() < 0.85:
            episode = rename_entities(episode, self.namer, rng)
        mode = rng.choices(list(demos.MIXTURE), list(demos.MIXTURE.values()))[0]
        if progress < COPY_SHARE and rng.random() < 0.8:
            mode = demos.Mode.RIGHT
        turns = self.demonstrator.write_turns(episode, mode, rng, simple=simple)
        return demos.encode(self.tokenizer, [demos.build_prompt_segment(self.tokenizer, episode.question), *turns])

    def draw_batches(self, progress: float) -> list[list[list[int]]]:
        """Draw a few batches with rows of similar length, in random order."""
        pool: list[list[int]] = []
        while sum(map(len, pool)) < 6 * BATCH_TOKENS:
            pool.append(self.draw_sequence(progress))
        pool.sort(key=len)
        batches: list[list[list[int]]] = [[]]
        for row in pool:
            if (len(batches[-1]) + 1) * len(row) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        self.rng.shuffle(batches)
        return batches


def compute_learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps, then constant, then a cosine down to 1 % while the mixture is shown."""
    if step < 100:
        return peak * (step + 1) / 100
    late = (step / steps - COPY_SHARE) / (1 - COPY_SHARE)
    return peak if late <= 0 else peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * late)))


def compute_loss(model: Qwen2ForCausalLM, rows: list[list[int]], pad: int) -> torch.Tensor:
    """Mean cross-entropy over all tokens but the padding, of right-padded rows."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.bool)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    keep = real[:, 1:]
    return torch.nn.functional.cross_entropy(logits[keep].float(), ids[:, 1:][keep])


def make_optimisers(model: Qwen2ForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Make Muon for the layers' matrices and AdamW for the rest; each comes with a factor on its learning rate.

    Muon (K. Jordan, 2024) copied names after 200 steps, when AdamW alone copied none.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    taken = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        (torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01), 1.0),
        (torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01), 5.0),
    ]


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the arguments of either training, and send its log to stderr."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=200)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return parser.parse_args()


def main() -> None:
    """Train; log metrics and save every `--every` steps."""
    args = parse_arguments(__doc__)
    world = World(args.data)
    data = Batches(world, args.seed)
    model = make_model(data.tokenizer, args.seed)
    LOG.info("parameters %d", model.num_parameters())
    save(model, data.tokenizer, args.out)
    pad = model.config.pad_token_id
    optimisers = make_optimisers(model)
    pool: list[list[list[int]]] = []
    started, losses = time.monotonic(), []
    for step in range(args.steps):
        for optimiser, factor in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = factor * compute_learning_rate(step, args.steps, args.lr)
        pool = pool or data.draw_batches(step / args.steps)
        loss = compute_loss(model, pool.pop(), pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, _ in optimisers:
            optimiser.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % args.every == 0:
            mean, seconds = sum(losses) / len(losses), time.monotonic() - started
            losses.clear()
            metrics = measure_start(model, data.tokenizer, world, world.read_episodes("validation")[:80])
            LOG.info("step %d seconds %.0f loss %.3f %s", step + 1, seconds, mean, json.dumps(metrics))
            save(model, data.tokenizer, args.out)
    save(model, data.tokenizer, args.out)
    LOG.info("test %s", json.dumps(measure_start(model, data.tokenizer, world, world.read_episodes("test"))))


if __name__ == "__main__":
    main()
