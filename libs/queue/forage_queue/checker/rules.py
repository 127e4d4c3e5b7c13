"""The rules that the history of every run obeys, whatever died: each finds the operations that break it.

An operation without a known result may have happened or not: it is never a violation by itself, and it may be what
another operation needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from forage_queue.checker.operations import Operation
from forage_queue.checker.recorded_run import TRAINING, Attempt, RecordedRun, attempt_of

PROMPTS = "prompts"
_OF_TRAINER = ("issue", "claim_groups", "reclaim_groups", "acknowledge", "discard", "close_replies", "publish")


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold, and the fewest operations that show it."""

    rule: str
    sentence: str
    operations: tuple[Operation, ...]


def _find_lost(run: RecordedRun) -> Iterator[Violation]:
    """Every position of every step up to the last was acknowledged, and every step was."""
    maybe = {one["step"] for one in run.acknowledgements}
    last = max(run.acknowledged, default=0)
    for step in range(1, last + 1):
        if step not in maybe:
            later = min(other for other in run.acknowledged if other > step)
            sentence = f"step {step} was never acknowledged, and step {later} was"
            yield Violation("lost", sentence, (run.acknowledged[later],))
    size = run.limits.batch_size or 0
    for step, done in sorted(run.acknowledged.items()):
        own = {*done["uids"], *done["dropped"]}
        if not run.is_strict and size and len(own) != size:
            yield Violation("lost", f"step {step} settled {len(own)} groups, and a step settles {size}", (done,))
        for batch in [step] if run.is_strict else done["ends"]:
            issued = run.positions[batch]
            covered = {issued.get(uid) for uid in (own if run.is_strict else run.counted)}
            expected = set(range(size)) | set(issued.values())
            for position in sorted(expected - covered):
                asked = TRAINING, batch, position
                issues = [one for attempt, found in run.issues.items() if attempt[:3] == asked for one in found]
                yield Violation("lost", f"position {position} of batch {batch} was never acknowledged", (*issues, done))


def _find_twice(run: RecordedRun) -> Iterator[Violation]:
    """No group counts for two steps, and nothing that can happen once has happened twice."""
    owners: dict[str, Operation] = {}
    for one in run.acknowledgements:
        if not one.happened:
            continue
        first = run.acknowledged[one["step"]]
        content = ("uids", "dropped", "entries")
        if any(first[name] != one[name] for name in content) and not run.was_lost(first, one):
            yield Violation("twice", f"step {one['step']} was acknowledged with two sets of groups", (first, one))
        for uid, times in Counter(one["uids"]).items():
            if times > 1:
                yield Violation("twice", f"step {one['step']} counts group {uid} {times} times", (one,))
            owner = owners.get(uid, one)
            if owner["step"] == one["step"] or run.was_lost(owner, one):
                owners[uid] = one
            else:
                steps = f"steps {owner['step']} and {one['step']}"
                yield Violation("twice", f"group {uid} counts for {steps}", (owner, one))
        if run.is_strict:
            positions = Counter(run.positions[one["step"]].get(uid) for uid in set(one["uids"]))
            for position, times in positions.items():
                if times > 1 and position is not None:
                    yield Violation("twice", f"step {one['step']} counts {times} groups of position {position}", (one,))
    if not run.is_strict:
        yield from _find_settled_twice(run)
    for (stream, batch, position, attempt), issues in run.issues.items():
        if stream == TRAINING:  # a validation that is closed may be opened anew
            what = f"attempt {attempt} of position {position} of batch {batch} was issued twice"
            yield from _find_repeated(run, issues, what)
    finished: dict[str, list[Operation]] = defaultdict(list)
    for one in run.finishes:
        finished[one["entry"]].append(one)
    for entry, finishes in finished.items():
        yield from _find_repeated(run, finishes, f"the prompt of entry {entry} was finished twice")
    for of, kind in ((run.claims, "claim_prompts"), (run.takes, "claim_groups")):
        for (_, entry), found in of.items():
            claims = [one for one, _ in found if one.kind == kind]
            yield from _find_repeated(run, claims, f"entry {entry} was delivered as new twice")


def _find_settled_twice(run: RecordedRun) -> Iterator[Violation]:
    """Whichever step settles a slot, no other does, and none does with two groups."""
    settled: dict[tuple[int, int], tuple[str, Operation]] = {}
    for one in run.acknowledgements:
        for uid in {*one["uids"], *one["dropped"]} if one.happened else ():
            slot = run.slots.get(uid)
            if slot is None:
                continue
            other, first = settled.get(slot, (uid, one))
            if (other, first["step"]) == (uid, one["step"]) or run.was_lost(first, one):
                settled[slot] = uid, one
            else:
                what = f"position {slot[1]} of batch {slot[0]} was settled by steps {first['step']} and {one['step']}"
                yield Violation("twice", what, (first, one))


def _find_repeated(run: RecordedRun, operations: Iterable[Operation], sentence: str) -> Iterator[Violation]:
    happened = [one for one in operations if one.happened]
    for first, second in pairwise(happened):
        if not run.was_lost(first, second):
            yield Violation("twice", sentence, (first, second))


def _find_late(run: RecordedRun) -> Iterator[Violation]:
    """Epochs grow, every process works under the one that it acquired last, and a trainer stops at its successor's."""
    for first, second in combinations(run.acquisitions, 2):
        is_wrong = first["epoch"] == second["epoch"] or (first["epoch"] > second["epoch"] and first.precedes(second))
        if is_wrong and not run.was_lost(first, second):
            sentence = f"epoch {second['epoch']} was acquired after epoch {first['epoch']}"
            yield Violation("epoch", sentence, (first, second))
    own: dict[str, list[Operation]] = defaultdict(list)
    for one in run.acquisitions:
        own[one.process].append(one)
    for one in run.operations:
        if one.kind not in _OF_TRAINER or not one.happened:
            continue
        mine = [other for other in own[one.process] if other.ended_before(one)]
        if not mine or mine[-1]["epoch"] != one["epoch"]:
            sentence = f"epoch {one['epoch']} was used by a process that had not acquired it"
            yield Violation("epoch", sentence, (*mine[-1:], one))
            continue
        for other in run.acquisitions:
            if other["epoch"] > one["epoch"] and other.precedes(one) and not run.was_lost(other, one):
                sentence = f"{one.kind} succeeded under epoch {one['epoch']} after epoch {other['epoch']} was acquired"
                yield Violation("epoch", sentence, (other, one))
                break


def _find_unfounded(run: RecordedRun) -> Iterator[Violation]:
    """What is acknowledged was taken before, what is taken was finished, what is finished was claimed and issued."""
    finishes: dict[Attempt, list[Operation]] = defaultdict(list)
    for one in run.finishes:
        attempt = attempt_of(one["stream"], one.fields)
        finishes[attempt].append(one)
        claims = [
            (claim, entry)
            for claim, entry in run.claims[TRAINING, one["entry"]]
            if claim.ended_before(one) and attempt_of(entry["stream"], entry) == attempt and entry["uid"] == one["uid"]
        ]
        if not one.happened:
            continue
        if not claims:
            yield Violation("unfounded", f"group {one['uid']} was finished, and its prompt not claimed before", (one,))
            continue
        issues = [issue for issue in run.issues[attempt] if issue["uid"] == one["uid"]]
        if not any(not claim.precedes(issue) for issue in issues for claim, _ in claims):
            sentence = f"the prompt of group {one['uid']} was claimed, and not issued before"
            yield Violation("unfounded", sentence, (claims[0][0], *issues, one))
    for one in run.acknowledgements:
        if not one.happened:
            continue
        step = one["step"]
        for uid in {*one["uids"], *one["dropped"]} - (run.positions[step] if run.is_strict else run.slots).keys():
            yield Violation("unfounded", f"step {step} counts group {uid}, which was not issued for it", (one,))
        if len(one["uids"]) != len(one["entries"]):
            sentence = f"step {step} counts {len(one['uids'])} groups, and {len(one['entries'])} left the stream"
            yield Violation("unfounded", sentence, (one,))
        for uid, entry in zip(one["uids"], one["entries"], strict=False):
            takes = [
                (take, group)
                for take, group in run.takes[TRAINING, entry]
                if take.ended_before(one) and group["uid"] == uid and (group["batch"] == step or not run.is_strict)
            ]
            if not takes:
                yield Violation("unfounded", f"step {step} counts group {uid}, which no trainer took", (one,))
                continue
            found = [
                other for _, group in takes for other in finishes[attempt_of(TRAINING, group)] if other["uid"] == uid
            ]
            if not any(not take.precedes(other) for other in found for take, _ in takes):
                sentence = f"step {step} counts group {uid}, which no worker had finished"
                yield Violation("unfounded", sentence, (takes[0][0], *found, one))


def _find_foreign(run: RecordedRun) -> Iterator[Violation]:
    """What a trainer discards it had taken, and the answers of a validation that it takes were finished."""
    rejected = {(one["stream"], entry) for one in run.removals if one.kind == "reject" for entry in one["entries"]}
    for one in run.removals:
        if one.kind != "discard" or one["stream"] == PROMPTS or not one.happened:
            continue
        for entry in one["entries"]:
            if not any(take.ended_before(one) for take, _ in run.takes[one["stream"], entry]):
                yield Violation("unfounded", f"entry {entry} was discarded, and not taken before", (one,))
    finishes: dict[Attempt, list[Operation]] = defaultdict(list)
    for one in run.finishes:
        finishes[attempt_of(one["stream"], one.fields)].append(one)
    for (stream, entry), takes in run.takes.items():
        if stream == TRAINING or (stream, entry) in rejected:  # what is trained on has a rule of its own
            continue
        for take, group in takes[:1]:
            if not any(not take.precedes(other) for other in finishes[attempt_of(stream, group)]):
                yield Violation("unfounded", f"answer {group['uid']} was taken, and not finished before", (take,))


def _find_unannounced(run: RecordedRun) -> Iterator[Violation]:
    """A policy is loaded once it was announced, and tokens are sampled under one that was loaded."""
    announced, loaded = _index_policies(run.publishes), _index_policies(run.loads)
    for load in run.loads:
        policy = load["version"], load["epoch"]
        if not _began_before(announced[policy], load):
            sentence = f"version {policy[0]} of epoch {policy[1]} was loaded and not announced before"
            yield Violation("unannounced", sentence, (load, *announced[policy][:1]))
    for one in run.finishes:
        if not one.happened:
            continue
        for version, epoch in sorted({tuple(policy) for row in one["versions"] for policy in row}):
            what = f"group {one['uid']} has tokens of version {version} of epoch {epoch}"
            if not _began_before(announced[version, epoch], one):
                sentence = f"{what}, which was not announced before"
                yield Violation("unannounced", sentence, (one, *announced[version, epoch][:1]))
            # The endpoint of somebody else loads nothing.
            elif run.loads and not _began_before(loaded[version, epoch], one):
                sentence = f"{what}, which no engine had loaded"
                yield Violation("unannounced", sentence, (one, *loaded[version, epoch][:1]))


def _find_altered(run: RecordedRun) -> Iterator[Violation]:
    """A version of an epoch has one content; an engine says that it serves it after it loaded it."""
    announced = _index_policies(run.publishes)
    for policy, publishes in announced.items():
        what = f"version {policy[0]} of epoch {policy[1]}"
        for one in publishes[1:]:
            if _differ(publishes[0], one) and not run.was_lost(publishes[0], one):
                yield Violation("altered", f"{what} was announced with two contents", (publishes[0], one))
    for one in (*run.loads, *run.serves):
        known = announced[one["version"], one["epoch"]]
        if known and all(_differ(other, one) for other in known):
            sentence = f"an engine has other files of version {one['version']} than were announced"
            yield Violation("altered", sentence, (one, known[0]))
    loads: dict[str, list[Operation]] = defaultdict(list)
    for load in run.loads:
        # An error of this kind says that the engine went on with what it served.
        if not load.error.startswith(("PolicyError", "_ReplacedError")):
            loads[load.process].append(load)
    for one in run.serves:
        own = [load for load in loads[one.process] if load.began_before(one)]
        later = [load for load in own if load.happened and load.precedes(one)]
        last = [load for load in own if not any(load.precedes(other) for other in later)]
        if not any((load["version"], load["epoch"]) == (one["version"], one["epoch"]) for load in last):
            sentence = f"an engine says that it serves version {one['version']}, which it has not loaded last"
            yield Violation("altered", sentence, (one, *last[-1:]))


def _differ(one: Operation, other: Operation) -> bool:
    """Whether two policies have different files."""
    return bool(one.fields.get("digests") != other.fields.get("digests"))


def _find_deleted(run: RecordedRun) -> Iterator[Violation]:
    """A group that a step counts stays on the stream until the step is acknowledged.

    A trainer that finds the file of a group gone removes the entry. An earlier trainer may have read the file before,
    and have trained on the group: then its checkpoint counts, and a later trainer acknowledges it.
    """
    counted = {entry: one for one in run.acknowledged.values() for entry in one["entries"]}
    for removal in run.removals:
        if not removal.happened or removal["stream"] != TRAINING:
            continue
        for entry in removal["entries"]:
            one = counted.get(entry)
            if one is None or not removal.precedes(one) or run.was_lost(removal, one):
                continue
            takes = [take for take, _ in run.takes[TRAINING, entry] if take.precedes(removal)]
            if removal.kind != "reject" or not any(run.was_lost(take, removal) for take in takes):
                sentence = f"a group of step {one['step']} left the stream before the step was acknowledged"
                yield Violation("deleted", sentence, (removal, one))


def _find_stale(run: RecordedRun) -> Iterator[Violation]:
    """No token that counts is older than `trainer.max_staleness` allows."""
    if run.limits.max_staleness is None:
        return
    oldest: dict[tuple[Attempt, str], tuple[int, Operation]] = {}
    for one in run.finishes:
        versions = [version for row in one["versions"] for version, _ in row]
        if versions and one.happened:
            oldest[attempt_of(one["stream"], one.fields), one["uid"]] = min(versions), one
    for step, done in run.acknowledged.items():
        bound = step - 1 - run.limits.max_staleness
        for entry in done["entries"]:
            for _, group in run.takes[TRAINING, entry][:1]:
                version, finish = oldest.get((attempt_of(TRAINING, group), group["uid"]), (bound, done))
                if version < bound:
                    sentence = f"step {step} counts tokens of version {version}, and {bound} is the oldest allowed"
                    yield Violation("stale", sentence, (finish, done))


def _index_policies(operations: Iterable[Operation]) -> dict[tuple[int, int], list[Operation]]:
    found: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for one in operations:
        found[one["version"], one["epoch"]].append(one)
    return found


def _began_before(causes: Sequence[Operation], effect: Operation) -> bool:
    return any(cause.began_before(effect) for cause in causes)


RULES: tuple[Callable[[RecordedRun], Iterator[Violation]], ...] = (
    _find_lost,
    _find_twice,
    _find_late,
    _find_unfounded,
    _find_foreign,
    _find_unannounced,
    _find_altered,
    _find_deleted,
    _find_stale,
)
