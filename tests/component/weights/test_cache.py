"""Copies of policies on a machine: whole, patched, damaged, and shared by processes that may die at any instant."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest
from full_disk import SmallDisk
from google.protobuf import json_format
from policy_files import Publications
from waiting import WAIT_S

from forage_proto.v1.trajectory_pb2 import Policy, PolicyFile
from forage_runtime.errors import ForageError
from forage_weights import cache as cache_module
from forage_weights.announcement import PolicyError
from forage_weights.cache import MAX_KEPT, PolicyCache
from forage_weights.delta import apply_delta
from forage_weights.tensors import open_tensors

HOLDER = Path(__file__).resolve().parents[2] / "support/policy_holder.py"


@pytest.fixture
def cache(tmp_path: Path) -> PolicyCache:
    return PolicyCache(tmp_path / "cache", WAIT_S, WAIT_S)


@pytest.fixture
def published(tmp_path: Path) -> Publications:
    return Publications(f"memory://{tmp_path.name}", tmp_path / "scratch")


@pytest.fixture
def run_folder(tmp_path: Path) -> Publications:
    """Policies at a path, which other processes read too."""
    return Publications(str(tmp_path / "run"), tmp_path / "scratch")


def list_policies(tmp_path: Path) -> list[Path]:
    return [entry for entry in (tmp_path / "cache").iterdir() if entry.name != ".lock"]


def publish_twice(published: Publications) -> tuple[Policy, Policy]:
    """Two policies that are copied, as both have a delta."""
    published.publish()
    return published.publish(), published.publish(share=0.3)


class Engine:
    """Another process that holds policies of the cache."""

    def __init__(self, cache: Path, instant: str = "", number: int = 0) -> None:
        """
        Args:
            instant, number: where it sends itself a signal, as of `policy_holder`.
        """
        self._cache = cache
        command = [sys.executable, str(HOLDER), *([instant, str(number)] if instant else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, policy: Policy, limit_s: float = WAIT_S) -> None:
        announced = json.dumps(json_format.MessageToDict(policy))
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self._cache} {limit_s} {announced}\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(instant: str = "", number: int = 0) -> Engine:
        engines.append(Engine(tmp_path / "cache", instant, number))
        return engines[-1]

    yield start
    for engine in engines:
        engine.process.kill()
        engine.process.communicate()


def test_a_whole_policy_of_this_machine_is_read_in_place_and_hashed_each_time(
    cache: PolicyCache, tmp_path: Path
) -> None:
    published = Publications(str(tmp_path / "run"), tmp_path / "scratch")
    policy = published.publish()
    with cache.hold(policy) as held:
        assert [file.parent for file in held.files] == 2 * [tmp_path / "run/v1"]
        assert published.is_held(held)
    assert not (tmp_path / "cache").exists()
    stat = held.files[0].stat()
    data = bytearray(held.files[0].read_bytes())
    data[-1] ^= 1
    held.files[0].write_bytes(data)
    os.utime(held.files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(PolicyError, match="does not have the digest"), cache.hold(policy):
        pass


def test_a_late_replica_takes_the_whole_part_and_the_deltas_after_it(
    cache: PolicyCache, published: Publications, tmp_path: Path
) -> None:
    contents = []
    for _ in range(4):
        policy = published.publish()
        contents.append(published.parts[-1].content)
    with cache.hold(policy) as held:
        assert published.is_held(held)
        assert [(delta.base, delta.content) for delta in held.deltas] == list(pairwise(contents))
    [folder] = list_policies(tmp_path)
    assert folder.name == held.content.removeprefix("blake3:") == contents[-1].removeprefix("blake3:")


def test_a_replica_that_has_a_middle_part_applies_only_the_rest(cache: PolicyCache, published: Publications) -> None:
    published.publish()
    with cache.hold(published.publish()) as before:
        tensors = {file.stem: open_tensors(file)[file.stem].bits.copy() for file in before.files}
    published.publish()
    policy = published.publish()
    # What it does not need any more is gone.
    for version in (1, 2):
        fsspec.filesystem("memory").rm(f"{published.uri.removeprefix('memory:/')}/v{version}", recursive=True)
    with cache.hold(policy) as held:
        assert published.is_held(held)
        # An engine that has the policy before in its memory gets there by the deltas alone.
        newest = [delta.base for delta in held.deltas].index(before.content)
        for delta in held.deltas[newest:]:
            for file in delta.files:
                apply_delta(file, tensors)
    assert all(tensors[name].tobytes() == bits.tobytes() for name, bits in published.tensors.items())


def test_a_policy_is_fetched_once_and_hashed_once(
    cache: PolicyCache, published: Publications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish()
    policy = published.publish()
    with cache.hold(policy):
        pass
    fsspec.filesystem("memory").rm(published.uri.removeprefix("memory:/"), recursive=True)
    monkeypatch.setattr(cache_module, "verify_files", lambda *_: pytest.fail("hashed again"))
    with PolicyCache(tmp_path / "cache").hold(policy) as held:
        assert published.is_held(held)
        assert len(held.deltas) == 1


@pytest.mark.parametrize("damage", ["altered", "shortened", "removed"])
def test_a_damaged_copy_is_replaced(cache: PolicyCache, published: Publications, tmp_path: Path, damage: str) -> None:
    published.publish()
    policy = published.publish()
    with cache.hold(policy) as held:
        file = held.files[1]
    if damage == "removed":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data[: -1 if damage == "shortened" else None])
    with cache.hold(policy) as held:
        assert published.is_held(held)
    assert len(list_policies(tmp_path)) == 1


def test_a_damaged_base_is_fetched_again(cache: PolicyCache, published: Publications, tmp_path: Path) -> None:
    with cache.hold(published.publish()) as held:
        data = bytearray(held.files[0].read_bytes())
    data[-1] ^= 1
    held.files[0].write_bytes(data)
    with cache.hold(published.publish()) as held:
        assert published.is_held(held)
    assert len(list_policies(tmp_path)) == 1


def test_a_copy_of_before_the_last_boot_is_hashed(
    cache: PolicyCache, published: Publications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = published.publish()
    with cache.hold(policy) as held:
        folder = held.files[0].parent
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    monkeypatch.setattr(cache_module, "_BOOT", boot)
    assert not cache_module._is_trusted(folder)
    with cache.hold(policy) as held:
        assert published.is_held(held)
    assert cache_module._is_trusted(folder)


def test_steps_that_change_nothing_are_followed(cache: PolicyCache, published: Publications) -> None:
    for _ in range(4):
        policy = published.publish(share=0)
        with cache.hold(policy) as held:
            assert published.is_held(held)
    published.publish()
    with cache.hold(published.publish(share=0)) as held:
        assert published.is_held(held)


@pytest.mark.parametrize("whole", [True, False])
def test_a_policy_that_cannot_be_fetched_leaves_nothing_and_takes_nothing_away(
    cache: PolicyCache, published: Publications, tmp_path: Path, whole: bool
) -> None:
    policy = published.publish()
    with cache.hold(policy):
        pass
    before = sorted(list_policies(tmp_path))
    failing = published.publish(delta=not whole)
    path = f"{published.uri.removeprefix('memory:/')}/v2/{'b.safetensors' if whole else 'delta'}"
    content = fsspec.filesystem("memory").cat_file(path)
    for data, message in ((content[:-5], "upload is not complete"), (content[:-1] + b"?", "does not have the digest")):
        fsspec.filesystem("memory").pipe_file(path, data)
        with pytest.raises(PolicyError, match=message), cache.hold(failing):
            pass
    fsspec.filesystem("memory").rm(path)
    with pytest.raises(PolicyError, match=r"cannot be fetched: .*check that its bucket or folder exists"):
        cache.hold(failing).__enter__()
    assert sorted(list_policies(tmp_path)) == before
    fsspec.filesystem("memory").pipe_file(path, content)
    with cache.hold(failing) as held:
        assert published.is_held(held)


def test_a_delta_of_other_versions_is_refused_before_the_base_is_touched(
    cache: PolicyCache, published: Publications
) -> None:
    policy = published.publish()
    with cache.hold(policy):
        pass
    published.publish()
    wrong = published.publish()
    del wrong.parts[1]  # the delta of version 3 applies to version 2
    with pytest.raises(PolicyError, match="delta of other versions"), cache.hold(wrong):
        pass
    fsspec.filesystem("memory").rm(published.uri.removeprefix("memory:/"), recursive=True)
    with cache.hold(policy):
        pass


def test_an_announcement_whose_parts_do_not_make_it_is_refused(cache: PolicyCache, published: Publications) -> None:
    published.publish()
    policy = published.publish()
    for change in (
        lambda wrong: wrong.parts[-1].__setattr__("content", "blake3:" + 64 * "0"),
        lambda wrong: wrong.parts[0].__setattr__("content", "blake3:" + 64 * "0"),
        lambda wrong: wrong.parts[0].files[0].__setattr__("digest", "blake3:" + 64 * "0"),
        lambda wrong: wrong.files[0].__setattr__("digest", "blake3:" + 64 * "0"),
    ):
        wrong = Policy()
        wrong.CopyFrom(policy)
        change(wrong)
        with pytest.raises(PolicyError, match="2 parts do not make it"), cache.hold(wrong):
            pass


@pytest.mark.parametrize("name", ["../delta", "/delta", ".lock", "", "a\\b", "a\0"])
def test_a_name_that_leads_outside_is_refused(cache: PolicyCache, published: Publications, name: str) -> None:
    published.publish()
    policy = published.publish()
    policy.parts[1].files[0].name = name
    with pytest.raises(PolicyError, match="expected a plain name"), cache.hold(policy):
        pass


def test_the_policies_used_last_stay_and_those_in_use(
    cache: PolicyCache, published: Publications, tmp_path: Path
) -> None:
    policies = [published.publish(delta=False) for _ in range(MAX_KEPT + 3)]
    other = PolicyCache(tmp_path / "cache")
    with cache.hold(policies[0]) as oldest:
        for policy in policies[1:]:
            with other.hold(policy) as held:
                pass
        names = {folder.name for folder in list_policies(tmp_path)}
    assert oldest.files[0].parent.name in names
    assert held.files[0].parent.name in names
    assert len(names) == MAX_KEPT + 1


def test_what_else_is_in_the_folder_stays(published: Publications, tmp_path: Path) -> None:
    """Somebody sets `rollout.weights.cache_dir` to a folder in use."""
    others = [tmp_path / "cache" / name for name in ("thesis", ".partial-host.1.0123abcd-step_4", "0" * 63, "0" * 65)]
    for other in others:
        (other / "inner").mkdir(parents=True)
        os.utime(other, (0, 0))
    cache = PolicyCache(tmp_path / "cache", WAIT_S, WAIT_S)
    for number in range(2 * MAX_KEPT):
        with cache.hold(published.publish(delta=number % 2 == 1)) as held:
            assert published.is_held(held)
    assert all((other / "inner").is_dir() for other in others)
    assert len(list_policies(tmp_path)) == len(others) + MAX_KEPT


def test_engines_of_a_machine_share_one_copy(run_folder: Publications, start_engine: Callable[[], Engine]) -> None:
    run_folder.publish()
    policy = run_folder.publish()
    engines = [start_engine() for _ in range(3)]
    for engine in engines:
        engine.ask(policy)
    answers = {engine.read() for engine in engines}
    assert len(answers) == 1
    assert answers.pop().startswith("held /")


def test_a_patch_waits_for_the_readers_of_its_base(
    run_folder: Publications, start_engine: Callable[[], Engine], tmp_path: Path, cache: PolicyCache
) -> None:
    first, second = publish_twice(run_folder)
    reader, patcher = start_engine(), start_engine()
    reader.ask(first)
    assert reader.read().startswith("held ")
    [folder] = list_policies(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    patcher.ask(second, limit_s=0.3)
    error = patcher.read()
    assert "waited 0.3 s for engines that read the policy before" in error
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == before
    patcher.ask(second)
    reader.process.kill()  # a reader that dies is none
    assert patcher.read().startswith("held ")
    with cache.hold(second) as held:
        assert run_folder.is_held(held)


def test_a_process_that_hangs_at_its_work_holds_up_others_for_a_limited_time(
    run_folder: Publications, start_engine: Callable[..., Engine], cache: PolicyCache
) -> None:
    run_folder.publish()
    policy = run_folder.publish()
    hanging, other = start_engine("fetched", signal.SIGSTOP), start_engine()
    hanging.ask(policy)
    os.waitid(os.P_PID, hanging.process.pid, os.WSTOPPED)
    other.ask(policy, limit_s=0.3)
    assert "waited 0.3 s for another engine's copy of a policy" in other.read()
    other.ask(policy)
    hanging.process.kill()
    assert other.read().startswith("held ")
    with cache.hold(policy) as held:
        assert run_folder.is_held(held)


@pytest.mark.parametrize("instant", ["taken", "half patched", "patched", "verified"])
def test_a_kill_in_the_middle_of_a_patch_leaves_nothing_that_looks_like_a_policy(
    run_folder: Publications, start_engine: Callable[..., Engine], tmp_path: Path, cache: PolicyCache, instant: str
) -> None:
    first, second = publish_twice(run_folder)
    with cache.hold(first) as held:
        base = held.files[0].parent
    victim = start_engine(instant, signal.SIGKILL)
    victim.ask(second)
    assert victim.process.wait(WAIT_S) == -signal.SIGKILL
    assert not base.exists()
    assert [folder.name[0] for folder in list_policies(tmp_path)] == ["."] * len(list_policies(tmp_path))
    with cache.hold(second) as held:
        assert run_folder.is_held(held)
    assert len(list_policies(tmp_path)) == 1


def test_threads_that_follow_many_versions_never_see_another_one(
    cache: PolicyCache, published: Publications, tmp_path: Path
) -> None:
    policies = [(published.publish(), dict(published.tensors)) for _ in range(12)]
    failures: list[BaseException] = []

    def follow(first: int) -> None:
        own = PolicyCache(tmp_path / "cache", WAIT_S, WAIT_S)
        try:
            for policy, tensors in policies[first:]:
                with own.hold(policy) as held:
                    for file in held.files:
                        assert open_tensors(file)[file.stem].bits.tobytes() == tensors[file.stem].tobytes()
        except (AssertionError, PolicyError) as error:
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(first,)) for first in (0, 0, 1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_files_are_received_where_they_are_sent_and_read_where_that_fails(
    published: Publications, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    damage: list[bytes] = [b""]

    def receive(policy: Policy, files: Sequence[PolicyFile], folder: Path) -> None:
        asked.append([file.name for file in files])
        if damage[0] == b"refused":
            raise ForageError("the trainer refuses")
        for file in files:
            content = (tmp_path / f"scratch/v{policy.version}/{file.name}").read_bytes()
            (folder / file.name).write_bytes(content + damage[0])

    cache = PolicyCache(tmp_path / "cache", WAIT_S, WAIT_S, receive)
    for version, how in enumerate([b"", b"", b"refused", b"damaged"], 1):
        damage[0] = how
        policy = published.publish()
        policy.direct.host = "trainer"
        uri = f"{published.uri.removeprefix('memory:/')}/v{version}"
        if not how:  # nothing is read
            fsspec.filesystem("memory").rm(uri, recursive=True)
        with cache.hold(policy) as held:
            assert published.is_held(held)
    assert asked == [["a.safetensors", "b.safetensors"], ["delta"], ["delta"], ["delta"]]


def test_a_full_disk_is_a_clear_error_and_leaves_the_cache_usable(
    small_disk: SmallDisk,
    tmp_path: Path,
) -> None:
    published = Publications(f"memory://{tmp_path.name}", tmp_path / "scratch", elements=500_000)
    cache = PolicyCache(small_disk.path / "cache", WAIT_S, WAIT_S)
    first = published.publish()
    with cache.hold(first):
        small_disk.fill()
        whole = published.publish(delta=False)
        with pytest.raises(PolicyError, match="its disk has 0 bytes free: free some space"), cache.hold(whole):
            pass
    with cache.hold(first):  # what was in use is still there
        pass
    with cache.hold(whole) as held:  # what is not makes room
        assert published.is_held(held)
    assert len([entry for entry in (small_disk.path / "cache").iterdir() if entry.name[0] != "."]) == 1
    small_disk.fill()
    second = published.publish(share=0.2)
    with pytest.raises(PolicyError, match="free some space"), cache.hold(second):
        pass
    small_disk.free()
    with cache.hold(second) as held:
        assert published.is_held(held)
    assert [entry.name[0] for entry in (small_disk.path / "cache").iterdir()].count(".") == 1
    shutil.rmtree(small_disk.path / "cache")


def test_an_address_that_no_file_system_reads_is_refused(cache: PolicyCache) -> None:
    policy = Policy(version=1, epoch=1, uri="nowhere://bucket/v1", digest="0" * 64)
    with pytest.raises(PolicyError, match="no file system reads this address"):
        cache.hold(policy).__enter__()


def test_a_cache_that_cannot_be_written_is_a_clear_error(published: Publications, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PolicyError, match=r"cannot be kept in .*/file/cache"):
        PolicyCache(tmp_path / "file/cache").hold(published.publish()).__enter__()
