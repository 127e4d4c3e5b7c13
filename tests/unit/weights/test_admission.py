"""Announcements that an engine reads, and those that it refuses before it reads anything."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from key_pairs import make_keys, make_signatures
from policy_files import Publications

from forage_proto.v1.trajectory_pb2 import DirectSender, Policy, PolicyFile, PolicyPart
from forage_runtime.settings import Settings
from forage_weights import storage
from forage_weights.announcement import Admission, PolicyError, sign_announcement
from forage_weights.cache import PolicyCache


class Engine:
    """What loads the policies of a run `run` in `<folder>/runs`.

    Args:
        settings: of the section `security`.
    """

    def __init__(self, folder: Path, publish: dict[str, Any] | None = None, **settings: Any) -> None:
        security = make_keys(folder / "keys", **settings)
        self.settings = Settings.model_validate(
            {"run": {"id": "run", "dir": folder / "runs"}, "trainer": {"publish": publish or {}}}
        ).model_copy(update={"security": security})
        self._cache = PolicyCache(folder / "cache", 20, 20, check=Admission(self.settings).check)

    def load(self, policy: Policy) -> None:
        with self._cache.hold(policy):
            pass


@pytest.fixture
def published(tmp_path: Path) -> Publications:
    return Publications(str(tmp_path / "runs/run/policies"), tmp_path / "scratch")


def sign(policy: Policy, folder: Path, run: str = "run") -> Policy:
    sign_announcement(policy, make_signatures(folder / "keys", run))
    return policy


def test_a_signed_policy_and_its_deltas_are_loaded(published: Publications, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for _ in range(3):
        engine.load(sign(published.publish(), tmp_path))


def change_version(policy: Policy) -> None:
    policy.version += 1


def change_epoch(policy: Policy) -> None:
    policy.epoch += 1


def change_digest(policy: Policy) -> None:
    policy.files[0].digest = policy.files[1].digest


def swap_files(policy: Policy) -> None:
    policy.files[0].name, policy.files[1].name = policy.files[1].name, policy.files[0].name


def remove_file(policy: Policy) -> None:
    del policy.files[1]


def add_file(policy: Policy) -> None:
    policy.files.append(PolicyFile(name="more.safetensors", digest="0" * 64))


def change_size(policy: Policy) -> None:
    policy.files[0].bytes += 1


def make_adapter(policy: Policy) -> None:
    policy.adapter = True


def redirect(policy: Policy) -> None:
    policy.direct.host, policy.direct.port = "127.0.0.1", 9


def move(policy: Policy) -> None:
    policy.uri += "/"


def drop_parts(policy: Policy) -> None:
    del policy.parts[:]


def change_part(policy: Policy) -> None:
    policy.parts[-1].files[0].digest = policy.files[0].digest


def take_off(policy: Policy) -> None:
    policy.signature = ""


CHANGES = [
    change_version,
    change_epoch,
    change_digest,
    swap_files,
    remove_file,
    add_file,
    change_size,
    make_adapter,
    redirect,
    move,
    drop_parts,
    change_part,
    take_off,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_of_an_announcement_is_changed_it_is_refused(
    change: Any, published: Publications, tmp_path: Path
) -> None:
    published.publish()
    policy = sign(published.publish(), tmp_path)
    change(policy)
    with pytest.raises(PolicyError) as refused:
        Engine(tmp_path).load(policy)
    assert "is refused: " in str(refused.value) or "parts do not make it" in str(refused.value)


def test_a_file_that_was_changed_after_it_was_signed_is_refused(published: Publications, tmp_path: Path) -> None:
    first = sign(published.publish(), tmp_path)
    file = Path(first.uri) / "a.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-1] + b"x", whole[:-1], whole + b"x", b""):
        file.write_bytes(content)
        with pytest.raises(PolicyError, match=r"does not have the digest|announced were"):
            Engine(tmp_path).load(first)
    file.unlink()
    with pytest.raises(PolicyError, match=r"cannot be read"):
        Engine(tmp_path).load(first)
    file.write_bytes(whole)
    second = sign(published.publish(), tmp_path)
    delta = Path(second.uri) / "delta"
    delta.write_bytes(delta.read_bytes()[:-1] + b"x")
    with pytest.raises(PolicyError, match=r"does not have the digest"):
        Engine(tmp_path).load(second)


def test_another_runs_or_another_keys_policy_is_refused(published: Publications, tmp_path: Path) -> None:
    policy = published.publish()
    with pytest.raises(PolicyError, match=r"is not what the key .* has signed for run 'run'"):
        Engine(tmp_path).load(sign(policy, tmp_path, "other"))
    sign_announcement(policy, make_signatures(tmp_path / "others"))
    with pytest.raises(PolicyError, match=r"which is not one of security.verify_key_file"):
        Engine(tmp_path).load(policy)


def test_an_announcement_of_before_is_refused_and_a_rollback_is_not(published: Publications, tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    old, new = (sign(published.publish(delta=False), tmp_path) for _ in range(2))
    engine.load(new)
    engine.load(new)
    with pytest.raises(PolicyError, match=r"older than version 2 of epoch 1, which was announced before"):
        engine.load(old)
    rolled_back = Policy.FromString(old.SerializeToString())
    rolled_back.epoch = 2
    engine.load(sign(rolled_back, tmp_path))
    with pytest.raises(PolicyError, match=r"older than version 1 of epoch 2"):
        engine.load(new)


def test_a_forged_announcement_does_not_make_true_ones_old(published: Publications, tmp_path: Path) -> None:
    engine, policy = Engine(tmp_path), sign(published.publish(), tmp_path)
    forged = Policy.FromString(policy.SerializeToString())
    forged.epoch = 2**63
    with pytest.raises(PolicyError):
        engine.load(forged)
    engine.load(policy)


def test_without_require_signed_a_wrong_signature_is_refused_and_a_missing_one_is_not(
    published: Publications, tmp_path: Path
) -> None:
    engine, policy = Engine(tmp_path, require_signed=False), published.publish()
    engine.load(policy)
    policy.signature = "ed25519:0000000000000000:" + 86 * "A" + "=="
    with pytest.raises(PolicyError, match=r"signed by the key 0000000000000000"):
        engine.load(policy)
    old, new = sign(policy, tmp_path), published.publish()
    engine.load(new)
    engine.load(old)  # the trainer decides what is served


def unprotected(folder: Path, **settings: Any) -> Engine:
    return Engine(folder, **{"require_signed": False, "signing_key_file": None, "verify_key_file": None} | settings)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        "{tmp}/elsewhere",
        "{tmp}/runs/run/../../elsewhere",
        "file:///etc",
        "http://169.254.169.254/latest",
        "simplecache::http://127.0.0.1:1/x",
        "s3://another/v1",
        "memory://x",
        "",
    ],
)
def test_nothing_outside_is_read_and_no_connection_is_made(
    address: str, parts: bool, published: Publications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish()
    policy = published.publish(delta=parts)
    (policy.parts[0] if parts else policy).uri = address.format(tmp=tmp_path)

    def touch(uri: str) -> Any:
        raise AssertionError(f"{uri} was opened")

    monkeypatch.setattr(storage, "open_address", touch)
    with pytest.raises(PolicyError, match=r"is refused: .*(is not allowed|is no address)"):
        unprotected(tmp_path).load(policy)


def test_links_and_names_do_not_lead_out_of_the_folder(published: Publications, tmp_path: Path) -> None:
    policy = published.publish()
    file = Path(policy.uri) / "a.safetensors"
    file.rename(tmp_path / "secret.safetensors")
    file.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(PolicyError, match=r"'a\.safetensors' is not allowed: it is a link to elsewhere"):
        unprotected(tmp_path).load(policy)
    for name in ("../v1/b.safetensors", "/etc/passwd", "..", "a\\b", "x\0"):
        policy.files[0].name = name
        with pytest.raises(PolicyError, match=r"expected a plain name within its folder"):
            unprotected(tmp_path).load(policy)


def test_the_settings_allow_more(tmp_path: Path) -> None:
    for place in (f"memory://{tmp_path.name}/copies", f"memory://{tmp_path.name}/more"):
        policy = Publications(f"{place}/run/x", tmp_path / "scratch").publish()
        engine = unprotected(
            tmp_path,
            publish={"uri": f"memory://{tmp_path.name}/copies/"},
            allowed_addresses=(f"memory://{tmp_path.name}/more",),
        )
        engine.load(policy)
    other = Publications(f"memory://{tmp_path.name}/copies/other", tmp_path / "scratch").publish()
    with pytest.raises(PolicyError, match=r"below trainer\.publish\.uri or one of security\.allowed_addresses"):
        engine.load(other)
    own = Publications(str(engine.settings.model.path.absolute()), tmp_path / "scratch")
    own.uri = str(tmp_path / "model")
    policy = own.publish()
    with pytest.raises(PolicyError, match=r"is not allowed"):
        engine.load(policy)


SENDERS = itertools.product(("", "a b", "http://x", "x/y", 300 * "a", "é"), (80,))


@pytest.mark.parametrize(("host", "port"), [*SENDERS, ("127.0.0.1", 0), ("127.0.0.1", 70_000), ("10.0.0.9", 80)])
def test_a_sender_is_an_address_and_the_one_that_the_settings_name(
    host: str, port: int, published: Publications, tmp_path: Path
) -> None:
    policy = published.publish()
    policy.direct.host, policy.direct.port = host, port
    with pytest.raises(PolicyError, match=r"is no address|is not trainer.publish.direct_address"):
        unprotected(tmp_path, publish={"direct_address": "10.0.0.8:0"}).load(policy)


WORDS = ["..", "/", "/etc/passwd", "s3://b/x", "::", "a.safetensors", "%2e", 300 * "a"]
TEXTS = st.text(max_size=8) | st.sampled_from(WORDS)
DIGESTS = st.sampled_from(["0" * 64, "blake3:" + "0" * 64, "", "x"])
FILES = st.lists(st.builds(PolicyFile, name=TEXTS, digest=DIGESTS, bytes=st.integers(0, 2**64 - 1)), max_size=2)
PARTS = st.lists(st.builds(PolicyPart, uri=TEXTS, files=FILES, content=DIGESTS), max_size=2)
SENDER = st.none() | st.builds(DirectSender, host=TEXTS, port=st.integers(0, 2**32 - 1))
POLICIES = st.builds(
    Policy,
    version=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    uri=TEXTS,
    digest=DIGESTS,
    files=FILES,
    parts=PARTS,
    direct=SENDER,
    signature=TEXTS,
    adapter=st.booleans(),
)


@pytest.mark.parametrize("signed", [False, True])
def test_whatever_a_message_says_it_is_refused_with_one_bounded_sentence(signed: bool, tmp_path: Path) -> None:
    engine = Engine(tmp_path) if signed else unprotected(tmp_path)

    @settings(max_examples=40, deadline=None)
    @given(POLICIES)
    def check(policy: Policy) -> None:
        with pytest.raises(PolicyError) as refused:
            engine.load(policy)
        assert len(str(refused.value)) < 3000
        assert not set(map(ord, str(refused.value))) & {*range(32)}

    check()
