"""Deals the kinds to episodes, and plays these one after the other."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.arithmetic import shuffle_deck
from chaos.disks import SmallDisk
from chaos.episode import Episode, Tally
from chaos.kinds import KINDS, RANK_KINDS, SUPERVISOR, Arsenal
from chaos.stack import Stack, find_free_ports

DISKS_MIB = {"checkpoints": 256, "redis": 512}
SETTINGS = (
    "trainer.save_freq=2",
    "trainer.val_before_train=false",
    "trainer.rollout_data_freq=0",
    "data.train_batch_size=4",
    "trainer.actor.ppo_mini_batch_size=4",
    "rollout.n=4",
    "data.val_max_samples=8",
    "reward.workers=2",
    "run.record_history=true",
)
"""Short steps: the demo's recipe with small batches. Two workers of the reward, so that one can die."""
_ENDLESS = "trainer.total_training_steps=1000000"
_TWO_RANKS = ("trainer.n_gpus_per_node=2", "trainer.threads=1")


@dataclass(frozen=True)
class Plan:
    """What a chaos run is asked for. calm_s: time without faults in each episode, which gives the undisturbed speed."""

    kills: int
    seed: int
    folder: Path
    kinds: Sequence[str] = KINDS
    per_episode: int = 40
    calm_s: float = 20.0
    hang_s: float = 180.0


def deal_hands(plan: Plan) -> list[list[str]]:
    """Deal the faults to episodes; each ends with a kill of the supervisor. Those of ranks are dealt to their own."""
    generator = random.Random(plan.seed)
    others = [kind for kind in plan.kinds if kind not in RANK_KINDS]
    ranks = [kind for kind in plan.kinds if kind in RANK_KINDS]
    rank_count = round(plan.kills * len(ranks) / len(plan.kinds))
    hands = []
    for kinds, count in ((others, plan.kills - rank_count), (ranks, rank_count)):
        if count <= 0:
            continue
        # Every episode ends with this kind: the others are dealt.
        episodes = -(-count // plan.per_episode)
        supervisors = max(episodes, round(count / len(kinds)) if SUPERVISOR in kinds else 0)
        deck = shuffle_deck([kind for kind in kinds if kind != SUPERVISOR], max(0, count - supervisors), generator)
        deck += [SUPERVISOR] * (supervisors - episodes)
        generator.shuffle(deck)
        hands += [[*deck[number::episodes], SUPERVISOR] for number in range(episodes)]
    return hands


def play(plan: Plan, repository: Path, tally: Tally, say: Callable[[str], None]) -> None:
    """Play all episodes; what was measured is in `tally`, also if this is interrupted."""
    hands = deal_hands(plan)
    total, done = sum(map(len, hands)), itertools.count(1)

    def tell(line: str) -> None:
        say(f"{next(done):4}/{total} {line}")

    for number, hand in enumerate(hands):
        generator = random.Random(plan.seed * 1000 + number)
        folder = plan.folder / f"episode-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        has_ranks = bool(set(hand) & set(RANK_KINDS))
        settings = [*SETTINGS, f"run.seed={plan.seed + number}", f"retriever.cache_dir={folder / 'retriever-cache'}"]
        settings += _TWO_RANKS if has_ranks else ()
        stack = Stack(repository, folder, find_free_ports(), settings, f"chaos-{number}")
        _copy_index(repository, folder / "retriever-cache")
        disks = {name: SmallDisk(stack.run / name, size) for name, size in DISKS_MIB.items()}
        what = "two trainer processes" if has_ranks else "one trainer process"
        say(f"episode {number + 1} of {len(hands)}: {len(hand)} faults, {what}, {folder}")

        try:
            arsenal = Arsenal(stack, generator, disks)
            episode = Episode(
                stack, arsenal, generator, tally, plan.hang_s, lambda line: say(f"{next(done):4}/{total} {line}")
            )
            outcome = episode.play(hand[:-1], plan.calm_s, _ENDLESS)
            tally.outcomes.append(outcome)
        finally:
            for disk in disks.values():
                disk.unmount()
        say(
            f"episode {number + 1}: {outcome.steps} steps, groups issued {outcome.issued}, trained {outcome.trained},"
            f" lost {outcome.lost}, twice {outcome.duplicated}{'; ' if outcome.problem else ''}{outcome.problem}"
        )


def _copy_index(repository: Path, target: Path) -> None:
    """Give the run its own copy of what the retriever has built before, so that it may be damaged."""
    source = repository / ".cache/retriever"
    if source.is_dir():
        shutil.copytree(source, target)
