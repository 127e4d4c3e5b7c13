"""Deals the kinds to episodes, and plays these one after the other."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ports import reserve_ports
from s3_server import S3Server, await_bucket

from chaos.arithmetic import shuffle_deck
from chaos.disks import SmallDisk
from chaos.episode import Episode, Outcome, Tally
from chaos.kinds import KINDS, RANK_KINDS, STORE_KINDS, SUPERVISOR, Arsenal
from chaos.recomputation import Keeper, recompute
from chaos.stack import STORE, Stack
from chaos.transports import TRANSPORTS, count_ways, list_settings

DISKS_MIB = {"checkpoints": 256, "redis": 512}
SETTINGS = (
    "trainer.save_freq=2",
    "trainer.val_before_train=false",
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
    """What a chaos run is asked for.

    transports: episodes take them in turn. calm_s: time without faults in each episode, which gives the undisturbed
    speed. minutes: after so long the episode under way ends, and no other one begins.
    """

    kills: int
    seed: int
    folder: Path
    kinds: Sequence[str] = KINDS
    per_episode: int = 40
    calm_s: float = 20.0
    hang_s: float = 180.0
    transports: Sequence[str] = TRANSPORTS
    minutes: float = math.inf

    def name_transport(self, episode: int) -> str:
        return self.transports[episode % len(self.transports)]


def deal_hands(plan: Plan) -> list[list[str]]:
    """Deal the faults to episodes; each ends with a kill of the supervisor.

    Those of ranks are dealt to their own, those of an object store to episodes that have one.
    """
    generator = random.Random(plan.seed)
    others = [kind for kind in plan.kinds if kind not in (*RANK_KINDS, *STORE_KINDS)]
    ranks = [kind for kind in plan.kinds if kind in RANK_KINDS]
    stores = [kind for kind in plan.kinds if kind in STORE_KINDS]
    rank_count, store_count = (round(plan.kills * len(some) / len(plan.kinds)) for some in (ranks, stores))
    store_count = min(store_count, plan.kills - 1)  # an episode has its last fault in any case
    fewest = -(-(plan.kills - store_count) // plan.per_episode)
    if "s3" not in map(plan.name_transport, range(fewest)):
        store_count = 0
    hands: list[list[str]] = []
    for kinds, count in ((others, plan.kills - rank_count - store_count), (ranks, rank_count)):
        if count <= 0:
            continue
        # Every episode ends with this kind: the others are dealt.
        episodes = -(-count // plan.per_episode)
        supervisors = max(episodes, round(count / len(kinds)) if SUPERVISOR in kinds else 0)
        deck = shuffle_deck([kind for kind in kinds if kind != SUPERVISOR], max(0, count - supervisors), generator)
        deck += [SUPERVISOR] * (supervisors - episodes)
        generator.shuffle(deck)
        hands += [[*deck[number::episodes], SUPERVISOR] for number in range(episodes)]
    with_store = [hand for number, hand in enumerate(hands) if plan.name_transport(number) == "s3"]
    for number, kind in enumerate(shuffle_deck(stores, store_count, generator)):
        hand = with_store[number % len(with_store)]
        hand.insert(generator.randrange(len(hand)), kind)
    return hands


def play(plan: Plan, repository: Path, tally: Tally, say: Callable[[str], None]) -> None:
    """Play all episodes; what was measured is in `tally`, also if this is interrupted."""
    hands = deal_hands(plan)
    total, done = sum(map(len, hands)), itertools.count(1)
    until = time.time() + 60 * plan.minutes

    def tell(line: str) -> None:
        say(f"{next(done):4}/{total} {line}")

    for number, hand in enumerate(hands):
        if time.time() > until:
            break
        generator = random.Random(plan.seed * 1000 + number)
        folder = plan.folder / f"episode-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        has_ranks = bool(set(hand) & set(RANK_KINDS))
        transport, base_port = plan.name_transport(number), reserve_ports(60)
        settings = [*SETTINGS, *list_settings(transport, folder)]
        settings += [f"run.seed={plan.seed + number}", f"retriever.cache_dir={folder / 'retriever-cache'}"]
        settings += _TWO_RANKS if has_ranks else ()
        store = S3Server(str(base_port + STORE), folder / "store.log") if transport == "s3" else None
        stack = Stack(repository, folder, base_port, settings, f"chaos-{number}", store)
        _copy_index(repository, folder / "retriever-cache")
        disks = {name: SmallDisk(stack.run / name, size) for name, size in DISKS_MIB.items()}
        what = "two trainer processes" if has_ranks else "one trainer process"
        say(f"episode {number + 1} of {len(hands)}: {len(hand)} faults, {what}, policies by {transport}, {folder}")
        keeper = Keeper(stack.run, folder / "kept")
        try:
            if store is not None:
                store.start()
                await_bucket(store)
            arsenal = Arsenal(stack, generator, disks)
            outcome = Episode(stack, arsenal, generator, tally, plan.hang_s, tell, transport).play(
                hand[:-1], plan.calm_s, until, _ENDLESS
            )
            judge_transport(outcome, transport, repository, stack.run, keeper)
            tally.outcomes.append(outcome)
        finally:
            keeper.close()
            if store is not None:
                store.kill()
            for disk in disks.values():
                disk.unmount()
        say(
            f"episode {number + 1}: {outcome.steps} steps, groups issued {outcome.issued}, trained {outcome.trained},"
            f" lost {outcome.lost}, twice {outcome.duplicated}, stale {outcome.stale}; {outcome.ways};"
            f" {outcome.recomputed}{'; ' if outcome.problem else ''}{outcome.problem}"
        )


def judge_transport(outcome: Outcome, transport: str, repository: Path, run: Path, keeper: Keeper) -> None:
    """Add to an outcome how policies went, and whether tokens were sampled under those that they name."""
    outcome.transport = transport
    keeper.close()
    try:
        outcome.ways = count_ways(run)
        outcome.recomputed = recompute(repository, run, keeper.kept)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        outcome.problem = outcome.problem or str(error)
    outcome.stale += outcome.recomputed.stale


def _copy_index(repository: Path, target: Path) -> None:
    """Give the run its own copy of what the retriever has built before, so that it may be damaged."""
    source = repository / ".cache/retriever"
    if source.is_dir():
        shutil.copytree(source, target)
