"""What the services do with a stored trajectory: score it again, sample it again, explain its score."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
from upath import UPath

from forage_console.details.trajectory import judge, split_texts
from forage_console.errors import NotFoundError
from forage_console.live.ask import find_served
from forage_console.live.run_services import load_run_settings
from forage_console.models.services import Explanation, ReplayResult
from forage_console.models.trajectories import Judgement
from forage_console.store.run_store import UNREADABLE, RunStore
from forage_proto.v1.trajectory_pb2 import Trajectory
from forage_records.replay import find_divergence, is_repeatable, is_scored, make_rerun, make_rescore
from forage_records.step_file import read_step_row
from forage_records.trajectory_file import read_header
from forage_runtime.clients.calls import RefusedError
from forage_runtime.clients.health import ANSWER_S, ask_service, list_health_urls
from forage_runtime.clients.reward import RewardClient, build_score_item
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import ForageError, UnavailableError
from forage_runtime.settings import Settings

_SCORE_S, _SAMPLE_S = 60.0, 300.0


@dataclass(frozen=True)
class Stored:
    """A trajectory of a step, and the text with which its policy ends a turn."""

    trajectory: Trajectory
    end_of_turn: str


def read_stored(store: RunStore, place: str, row: int) -> Stored | None:
    """Read a trajectory of a step whole; None of a validation, whose file has no tokens.

    Raises:
        NotFoundError: there is none, or its file is damaged.
    """
    file = store.require(place)
    if file.step is None:
        return None
    try:
        header = read_header(file.path)
        if row < header.rows:
            return Stored(read_step_row(file.path, row).trajectory, header.end_of_turn)
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise NotFoundError(f"{place} cannot be read ({reason}): it is damaged or was just replaced") from error
    raise NotFoundError(f"there is no trajectory {row} in {place}: it has {header.rows}, from 0")


async def replay(folder: UPath, own: Settings, stored: Stored | None, kind: str) -> ReplayResult:
    """Score the same text again, or sample the same prompt again.

    Raises:
        RefusedError: the trajectory cannot be replayed.
        UnavailableError: the service that it needs does not answer.
    """
    if stored is None:
        raise RefusedError("only trajectories of training steps can be replayed: those of validations have no tokens")
    before = stored.trajectory
    try:
        if kind == "score":
            if not is_scored(before):
                raise RefusedError("it was never scored, because it failed before: sample it again")
            async with asyncio.timeout(_SCORE_S):
                after = await _score(await asyncio.to_thread(_find_reward, folder, own), stored)
        else:
            settings, _ = await asyncio.to_thread(find_served, folder, own)
            async with asyncio.timeout(_SAMPLE_S), RolloutClient(settings) as rollout:
                after = await make_rerun(rollout, settings.run.id)(before)
    except TimeoutError:
        raise UnavailableError("the replay took too long: the page Health says what the services wait for") from None
    known = {one.name: one.weighted for one in before.score.components}
    new = judge(after.score)
    return ReplayResult(
        kind=kind,
        version=after.segments[-1].version if kind == "sample" and after.segments else None,
        stored=judge(before.score),
        new=new,
        changed=[one for one in new.components if one.weighted != known.get(one.name)],
        divergence=find_divergence(before, after) if kind == "sample" else "",
        blocks=split_texts(after)[1],
        is_repeatable=is_repeatable(before),
    )


def _find_reward(folder: UPath, own: Settings) -> Settings:
    """The settings with which a running reward service is asked.

    Raises:
        RefusedError: the settings of the run name other machines.
        UnavailableError: it does not run.
    """
    settings = load_run_settings(folder, own)
    state = ask_service(list_health_urls(settings)["reward"], settings.tls).state
    if state in ("not running", "silent"):
        address = settings.reward.health_address
        raise UnavailableError(
            f"the reward service of the run is {state} at {address}: 'forage demo --resume' or 'forage up' starts one"
        )
    return settings


async def _score(settings: Settings, stored: Stored) -> Trajectory:
    client = RewardClient(settings)
    try:
        return await make_rescore(client, stored.end_of_turn)(stored.trajectory)
    finally:
        await client.close()


async def explain(folder: UPath, own: Settings, stored: Stored | None, judgement: Judgement) -> Explanation:
    """Explain a score as `forage reward explain` does; from what is stored, where no reward service answers."""
    if stored is None:
        return _describe(judgement, "The file of a validation has no score to explain.")
    try:
        client = RewardClient(await asyncio.to_thread(_find_reward, folder, own))
        try:
            item = build_score_item(stored.trajectory, stored.end_of_turn)
            async with asyncio.timeout(ANSWER_S):
                return Explanation(text=await client.explain(item, stored.trajectory.score), is_live=True)
        finally:
            await client.close()
    except TimeoutError:
        return _describe(judgement, "The reward service of the run gave no answer in time, so this is what it stored.")
    except ForageError:
        return _describe(judgement, "The reward service of the run is not running, so this is what it stored.")
    except grpc.RpcError as error:
        return _describe(judgement, f"The reward service cannot explain it: {error.details()}.")


def _describe(judgement: Judgement, why: str) -> Explanation:
    lines = [why, "", f"reward     {judgement.reward or '-'}", f"status     {judgement.status}"]
    for one in judgement.components:
        lines.append(f"{one.name:<10} {one.raw:.4g}, adds {one.weighted:+.4g}")
    lines.append(f"total      {'-' if judgement.total is None else f'{judgement.total:.4g}'}")
    if judgement.detail:
        lines.append(f"rule       {judgement.detail}")
    return Explanation(text="\n".join(lines), is_live=False)
