"""Groups that arrive have arrays for their tokens, in memory or in files, and both train alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from arrived_groups import arrive
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from trainer_parts import build_trajectory, make_group

from forage_proto.v1.trajectory_pb2 import Status, TrajectoryGroup
from forage_queue.streams.client import Entry
from forage_queue.trainer.batcher import Batch
from forage_queue.trainer.decoder import GroupDecoder
from forage_queue.trainer.replay_groups import ReplayGroups
from forage_runtime.errors import DiskFullError
from forage_runtime.retries import DiskRetry
from forage_runtime.settings import AlgorithmSettings, load_settings
from forage_runtime.stop import Stop
from forage_runtime.telemetry.health import Health
from forage_trainer.data.digests import digest_tokens
from forage_trainer.data.tensors import StepTensors, build_step_tensors, leave_out_unusable, select_trajectories
from forage_trainer.reporting.metrics import compute_trajectory_metrics
from forage_trajectory.codec import decode_group, pack_group, restore_group, restore_trajectory
from forage_trajectory.trajectory import ColumnFolder, Columns, Group, StoredColumns, find_runs

TRAINER = load_settings(None, ["trainer.actor.ppo_max_token_len_per_gpu=60"], {}).trainer


def build_groups() -> list[TrajectoryGroup]:
    """Sound rows, failed ones, one without tokens of the policy, one whose fields differ in length, one too long."""
    first, second = make_group("a", [0.0, 1.0, 1.0]), make_group("b", [0.5, 1.0], position=1)
    first.trajectories[0].turn_ids[:] = [1] * 6 + [-1] * 7 + [2] * 5
    first.trajectories.append(build_trajectory("a", 3, 1.0, status=Status.STATUS_TIMEOUT))
    first.trajectories.append(build_trajectory("a", 4, 1.0, turns=()))
    first.trajectories.append(build_trajectory("a", 5, 1.0, turns=(40, 30)))
    second.trajectories.append(build_trajectory("b", 2, 0.0))
    second.trajectories[2].logprobs.pop()
    second.trajectories[1].score.components.add(name="turn_1", weighted=0.25)
    return [first, second]


def arrive_all(groups: list[TrajectoryGroup], folder: ColumnFolder | None = None) -> list[Group]:
    return [arrive(group, folder) for group in groups]


def build_tensors(groups: list[Group], algorithm: AlgorithmSettings) -> StepTensors:
    result = build_step_tensors(select_trajectories(groups, algorithm), 0, 1, 0, algorithm)
    assert result is not None
    return result


def assert_same(one: Any, other: Any) -> None:
    if isinstance(other, torch.Tensor):
        if other.is_nested:
            assert torch.equal(one.offsets(), other.offsets())
            one, other = one.values(), other.values()
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("algorithm", [{}, {"state_masking": False}, {"adv_estimator": "grpo_multiturn"}])
def test_columns_in_files_train_as_those_in_memory_do(algorithm: dict[str, Any], tmp_path: Path) -> None:
    chosen = AlgorithmSettings(**algorithm)
    stored, held = arrive_all(build_groups(), ColumnFolder(tmp_path)), arrive_all(build_groups())
    assert compute_trajectory_metrics(stored, 3) == compute_trajectory_metrics(held, 3)
    (stored, counts), (held, expected_counts) = (leave_out_unusable(groups, TRAINER) for groups in (stored, held))
    assert counts == expected_counts == {"too_long_trajectories": 1, "cut_trajectories": 0}
    assert digest_tokens(stored) == digest_tokens(held)
    result, expected = build_tensors(stored, chosen), build_tensors(held, chosen)
    assert len(result) == 5
    assert all(isinstance(one, StoredColumns) for one in result.columns)
    assert all(isinstance(one, Columns) for one in expected.columns)
    names = ("mask", "state", "token_rewards", "engine_log_probs", "turn_ids", "turn_rewards", "whole_rewards")
    for name in (*names, "current", "uids", "responses", "prompts", "positions"):
        assert_same(getattr(result, name), getattr(expected, name))
    for name in expected.data.keys():  # noqa: SIM118
        assert_same(result.data[name], expected.data[name])


def test_what_arrives_is_what_the_message_says() -> None:
    for message, group in zip(build_groups(), arrive_all(build_groups()), strict=True):
        for facts, one in zip(message.trajectories, group.trajectories, strict=True):
            response, sampled = len(facts.loss_mask), sum(facts.loss_mask)
            whole = len(facts.token_ids) - facts.prompt_length == response == len(facts.logprobs)
            assert one.counts == (len(facts.token_ids), response, sampled, whole)
            assert (one.id, one.status, one.score, [*one.segments]) == (
                facts.id,
                facts.status,
                facts.score,
                [*facts.segments],
            )
            if not whole:
                with pytest.raises(ValueError, match="lacks values of some tokens"):
                    _ = one.columns
                continue
            columns = one.columns.load()
            assert columns.token_ids.tolist() == [*facts.token_ids]
            assert columns.spread_log_probs().tolist() == [*facts.logprobs]
            assert [values.tolist() for values in one.read_mask()] == [[*facts.loss_mask], [*facts.turn_ids]]
            own = [turn for turn, is_own in zip(facts.turn_ids, facts.loss_mask, strict=True) if is_own]
            assert one.list_turns() == list(dict.fromkeys(own))


def test_what_is_left_out_of_a_step_changes_neither_the_group_nor_what_is_restored_but_for_its_status() -> None:
    messages, arrived = build_groups(), arrive_all(build_groups())
    left, _ = leave_out_unusable(arrived, TRAINER)
    assert [restore_group(group) for group in arrived] == [[*group.trajectories] for group in messages]
    long = messages[0].trajectories[5]
    long.status, long.status_detail = Status.STATUS_INVALID_INPUT, left[0].trajectories[5].status_detail
    assert "too long" in long.status_detail
    assert [restore_group(group) for group in left] == [[*group.trajectories] for group in messages]
    assert restore_trajectory(left[1].trajectories[1]) == messages[1].trajectories[1]
    assert left[0].read_packed() == pack_group(build_groups()[0]), "as it was on the stream"


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([-1, 1, 2])), max_size=30))
def test_runs_hold_mask_and_turns(tokens: list[tuple[int, int]]) -> None:
    mask, turns = (torch.tensor([one[place] for one in tokens], dtype=torch.int32).numpy() for place in (0, 1))
    runs = find_runs(mask, turns)
    again = [(own, turn) for length, own, turn in runs.tolist() for _ in range(length)]
    assert again == tokens
    assert all(tuple(one[1:]) != tuple(other[1:]) for one, other in pairwise(runs))


# Files.


@pytest.fixture
def collect() -> Iterator[Callable[[], object]]:
    """Collects what nobody refers to any more, and looks only at what the test has made."""
    gc.freeze()
    yield gc.collect
    gc.unfreeze()


def test_a_file_lasts_as_long_as_a_group_of_it_and_no_longer(tmp_path: Path, collect: Callable[[], object]) -> None:
    left = tmp_path / "1-dead"
    left.mkdir()
    (left / "0").write_bytes(b"of a process that died")
    folder = ColumnFolder(tmp_path)
    assert left.exists(), "until this process may claim groups, another one may work"
    groups = arrive_all([make_group("a", [0.0, 1.0]), make_group("b", [1.0])], folder)
    assert not left.exists()
    assert len(list(tmp_path.glob("*/*"))) == 2
    kept = groups.pop().trajectories[0]
    groups.clear()
    collect()
    (file,) = tmp_path.glob("*/*")
    columns = kept.columns
    del kept
    assert columns.load().token_ids.tolist() == list(make_group("b", [1.0]).trajectories[0].token_ids)
    file.write_bytes(file.read_bytes()[:9])
    with pytest.raises(OSError, match=r"has \d+ bytes at 0, \d+ wanted"):
        columns.load()
    del columns
    collect()
    assert not file.exists()
    del folder
    collect()
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_was_replaced_deletes_no_columns_of_its_successor(tmp_path: Path) -> None:
    older, newer, newest = ColumnFolder(tmp_path), ColumnFolder(tmp_path), ColumnFolder(tmp_path)
    older.read_epoch, newer.read_epoch, newest.read_epoch = lambda: 9, lambda: 10, lambda: 11
    (good,) = arrive_all([make_group("a", [1.0])], newer)
    arrive_all([make_group("a", [1.0])], older)  # it does not know yet that a later one has taken over
    assert good.trajectories[0].columns.load().token_ids.size > 0
    (last,) = arrive_all([make_group("a", [1.0])], newest)
    assert [folder.name.partition("-")[0] for folder in tmp_path.iterdir()] == ["e11"]
    assert last.trajectories[0].columns.load().token_ids.size > 0


def test_columns_wait_for_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collect: Callable[[], object]
) -> None:
    folder, calls = ColumnFolder(tmp_path), []
    monkeypatch.setattr("forage_runtime.retries._DISK_INTERVAL_S", 0.01)
    fill = folder._fill

    def fail_twice(path: Path, columns: Any, rest: bytes) -> None:
        calls.append(path)
        if len(calls) < 3:
            path.write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        fill(path, columns, rest)

    monkeypatch.setattr(folder, "_fill", fail_twice)
    with pytest.raises(DiskFullError, match="free some space"):
        decode_group(pack_group(make_group("a", [1.0])), folder)
    collect()
    assert list(tmp_path.glob("*/*")) == [], "no part is left"
    decoder = GroupDecoder(DiskRetry(Stop(), Health()))
    decoder.folder = folder
    (group,) = decoder([pack_group(make_group("a", [1.0]))])
    assert len(calls) == 3
    assert not isinstance(group, DecodeError)
    assert isinstance(group.trajectories[0].columns, StoredColumns)


# Many at a time.


def test_groups_are_decoded_in_order_and_a_damaged_one_is_an_error_of_its_own() -> None:
    packed = [pack_group(make_group(f"q{n}", [0.0, 1.0], position=n)) for n in range(20)]
    packed[7].columns = packed[7].columns[:-9]
    packed[9].facts = b"none"
    decoder = GroupDecoder(DiskRetry(Stop(), Health()))
    result = decoder(packed)
    assert [n for n, one in enumerate(result) if isinstance(one, DecodeError)] == [7, 9]
    sound = [one.position for one in result if not isinstance(one, DecodeError)]
    assert sound == [n for n in range(20) if n not in (7, 9)]
    assert isinstance(decoder(packed[7:8])[0], DecodeError)
    assert decoder([]) == []


# Kept groups.


def test_kept_groups_are_as_they_were_on_the_stream(tmp_path: Path) -> None:
    kept = ReplayGroups(tmp_path)
    arrived, _ = leave_out_unusable(arrive_all(build_groups()), TRAINER)
    kept.write(Batch(3, tuple(Entry(b"1-0", group) for group in arrived), 0))
    again = kept.read(3)
    assert [group.read_packed() for group in again.groups] == [pack_group(group) for group in build_groups()]
    assert digest_tokens(again.groups) == digest_tokens(arrive_all(build_groups()))
    assert leave_out_unusable(again.groups, TRAINER)[1]["too_long_trajectories"] == 1, "as in the first take"
    assert kept.has(range(3, 4))
    kept.prune(3)
    assert not kept.has(range(3, 4))
