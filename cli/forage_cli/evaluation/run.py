"""Runs a plan: every item once, each written to the journal when it is finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from forage_cli.evaluation import cards, engines, results
from forage_cli.evaluation.methods import Method
from forage_cli.evaluation.plan import EvaluationPlan, Item
from forage_cli.evaluation.policies import EvaluatedPolicy, group_by_engine
from forage_cli.runs.journal import Journal
from forage_cli.terminal.progress import show_progress
from forage_proto.v1.trajectory_pb2 import Document, Prompt, Status, Trajectory, TrajectoryGroup
from forage_queue.streams.prompt_identity import build_group, with_prompt_identity
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.clients.concurrency import map_concurrently
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.clients.rollout import RolloutClient
from forage_runtime.errors import UnavailableError
from forage_runtime.settings import Settings

JOURNAL = "journal.bin"
_RETRYABLE = (Status.STATUS_TIMEOUT, Status.STATUS_INTERNAL)


def find_unfinished(plan: EvaluationPlan, journal: Journal[TrajectoryGroup]) -> dict[tuple[str, str], Item]:
    """Key → item that is not finished; items that failed with a temporary error are retried."""
    items = {item.key: item for item in plan.items()}
    done = {}
    for group in journal.read():
        done[group.run_id, group.group_uid] = not _is_retryable(group)
    return {key: item for key, item in items.items() if not done.get(key)}


def read_finished(plan: EvaluationPlan, journal: Journal[TrajectoryGroup]) -> Iterator[tuple[Item, TrajectoryGroup]]:
    """Iterate over finished items with their trajectories, one in memory at a time; of several tries the last."""
    tries = Counter((group.run_id, group.group_uid) for group in journal.read())
    items = {item.key: item for item in plan.items()}
    for group in journal.read():
        key = group.run_id, group.group_uid
        tries[key] -= 1
        if tries[key] == 0 and key in items:
            yield items[key], group


def run_unfinished(plan: EvaluationPlan, settings: Settings, folder: Path, console: Console) -> None:
    """Run the items of the plan that the folder's journal lacks. Ctrl-C keeps every finished item.

    Raises:
        UserError: something is missing for a start.
        UnavailableError: a service stays unavailable; finished items are in the journal.
    """
    with Journal(folder / JOURNAL, TrajectoryGroup) as journal:
        items = find_unfinished(plan, journal)
        total = sum(1 for _ in plan.items())
        if not items:
            return
        if len(items) < total:
            console.print(f"{total - len(items)} of {total} were finished before", highlight=False)
        waiting: dict[str, list[Item]] = {}
        for item in items.values():
            waiting.setdefault(item.policy.label, []).append(item)
        try:
            for policies in group_by_engine([policy for policy in plan.policies if policy.label in waiting]):
                labels = [policy.label for policy in policies]
                left = sum(len(waiting[label]) for label in labels)
                with (
                    engines.start_engine(policies, settings, console) as served,
                    show_progress(console, ", ".join(labels), left) as advance,
                ):
                    asyncio.run(_run_policies(plan, policies, waiting, served, folder, journal, advance))
        except KeyboardInterrupt:
            done = total - len(find_unfinished(plan, journal))
            console.print(f"stopped: {done} of {total} are finished; run the same command to continue", highlight=False)
            raise


def write_finished(plan: EvaluationPlan, folder: Path, turn_ends: Mapping[str, str]) -> None:
    """Write results.parquet and the trajectory files of everything that is finished.

    Args:
        turn_ends: label of a policy → text with which its tokenizer ends a turn.
    """
    with Journal(folder / JOURNAL, TrajectoryGroup) as journal:
        results.write_results(folder, read_finished(plan, journal), turn_ends)


async def _note_index(retriever: RetrieverClient, folder: Path) -> None:
    """Note which index the retriever searches: a policy that never searches, and a prompt of one-shot RAG, do not say.

    Without an answer nothing is noted: what needs the retriever says that it is missing.
    """
    with suppress(UnavailableError, RefusedError, MalformedReplyError):
        cards.record_searched(folder, (await retriever.search(["index"])).provenance)


async def _run_policies(
    plan: EvaluationPlan,
    policies: Sequence[EvaluatedPolicy],
    waiting: dict[str, list[Item]],
    settings: Settings,
    folder: Path,
    journal: Journal[TrajectoryGroup],
    advance: Callable[[], None],
) -> None:
    retriever = RetrieverClient.from_settings(settings, settings.rollout.retrieve_timeout_s)
    async with RolloutClient(settings) as rollout, retriever:
        await _note_index(retriever, folder)
        for policy in policies:
            await engines.switch_policy(policy, settings, rollout)
            run = partial(_run_item, plan, rollout, retriever)
            work = map_concurrently(waiting[policy.label], run, settings.rollout.max_groups_in_flight)
            async with aclosing(work):
                async for _, group in work:
                    journal.append(group)
                    advance()


async def _run_item(
    plan: EvaluationPlan, rollout: RolloutClient, retriever: RetrieverClient, item: Item
) -> TrajectoryGroup:
    """Return the item's trajectories; an error of this item alone becomes their status."""
    documents: Sequence[Document] = ()
    if item.method is Method.RAG:
        try:
            documents = (await retriever.search([item.question.text])).documents[0]
        except (UnavailableError, RefusedError, MalformedReplyError) as error:
            return _make_failed_group(plan.build_prompt(item), Status.STATUS_INTERNAL, str(error))
    prompt = plan.build_prompt(item, documents)
    try:
        return await rollout.run(prompt)
    except RefusedError as error:
        return _make_failed_group(prompt, Status.STATUS_INVALID_INPUT, str(error))


def _make_failed_group(prompt: Prompt, status: Status.ValueType, detail: str) -> TrajectoryGroup:
    blank = Trajectory(status=status, status_detail=detail)
    return build_group(prompt, [with_prompt_identity(blank, prompt, sample) for sample in range(prompt.samples)])


def _is_retryable(group: TrajectoryGroup) -> bool:
    """Whether a sample failed with a temporary error, so that a retry may succeed."""
    return any(
        trajectory.status in _RETRYABLE
        or (trajectory.status == Status.STATUS_OK and trajectory.validation_score.status in _RETRYABLE)
        for trajectory in group.trajectories
    )
