"""Signatures: keys in files, what a signature is bound to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from key_pairs import make_keys, make_signatures
from structlog.testing import capture_logs

from forage_runtime.errors import SettingsError
from forage_runtime.security.signatures import (
    SIGNING_KEY,
    VERIFY_KEY,
    Purpose,
    RunSignatures,
    SignatureError,
    Signer,
    VerifyKeys,
    write_key_pair,
)

CONTENT = {"epoch": 2, "version": 7, "files": {"a": "blake3:00"}}


def encode_private(key: Any, passphrase: bytes = b"") -> bytes:
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))


def encode_public(key: Any) -> bytes:
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))


def test_a_key_pair_is_its_owners_alone_and_is_not_overwritten(tmp_path: Path) -> None:
    key = write_key_pair(tmp_path / "new")
    assert (tmp_path / "new" / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    assert Signer(tmp_path / "new" / SIGNING_KEY).key_id == key
    assert list(VerifyKeys(tmp_path / "new" / VERIFY_KEY).keys) == [key]
    with pytest.raises(SettingsError, match=r"signing-key\.pem exists: name another folder"):
        write_key_pair(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"cannot be written"):
        write_key_pair(tmp_path / "file" / "keys")


def test_what_is_signed_is_verified_by_the_keys_of_the_run(tmp_path: Path) -> None:
    signatures = make_signatures(tmp_path)
    signature = signatures.sign(Purpose.FOLDER, CONTENT)
    reordered = json.loads(json.dumps(dict(reversed(CONTENT.items()))))
    assert signatures.require(Purpose.FOLDER, reordered, signature, "it") == signatures.key_id


def test_a_signature_is_of_one_purpose_and_one_run(tmp_path: Path) -> None:
    signatures = make_signatures(tmp_path)
    signature = signatures.sign(Purpose.FOLDER, CONTENT)
    with pytest.raises(SignatureError, match=r"it is not what the key .* has signed for run 'run'"):
        signatures.require(Purpose.CHECKPOINT, CONTENT, signature, "it")
    with pytest.raises(SignatureError, match=r"of another run"):
        make_signatures(tmp_path, "other").require(Purpose.FOLDER, CONTENT, signature, "it")


def flip(text: str, position: int) -> str:
    other = "A" if text[position] != "A" else "B"
    return text[:position] + other + text[position + 1 :]


def test_a_changed_signature_is_refused_wherever_it_is_changed(tmp_path: Path) -> None:
    signatures = make_signatures(tmp_path)
    signature = signatures.sign(Purpose.FOLDER, CONTENT)
    for position in range(len(signature)):
        with pytest.raises(SignatureError):
            signatures.require(Purpose.FOLDER, CONTENT, flip(signature, position), "it")
    for text in (signature[:-1], signature + "=", signature + "\n", "ed25519::", "x", signature.upper(), 999 * "ü"):
        with pytest.raises(SignatureError, match=r"it has a damaged signature|not one of security.verify_key_file"):
            signatures.require(Purpose.FOLDER, CONTENT, text, "it")


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_other_content_is_never_verified(tmp_path: Path) -> None:
    signatures = make_signatures(tmp_path)

    @given(st.dictionaries(st.text(), TREES, max_size=3), st.dictionaries(st.text(), TREES, max_size=3))
    def verify(one: dict[str, Any], other: dict[str, Any]) -> None:
        signature = signatures.sign(Purpose.FOLDER, one)
        assert signatures.require(Purpose.FOLDER, one, signature, "it")
        if json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
            with pytest.raises(SignatureError):
                signatures.require(Purpose.FOLDER, other, signature, "it")

    verify()


def test_a_missing_signature_is_refused_only_where_it_is_required(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"it is not signed, and security.require_signed is set"):
        make_signatures(tmp_path).require(Purpose.FOLDER, CONTENT, "", "it")
    lenient = make_signatures(tmp_path, require_signed=False)
    assert lenient.require(Purpose.FOLDER, CONTENT, "", "it") == ""
    with pytest.raises(SignatureError, match=r"damaged signature"):
        lenient.require(Purpose.FOLDER, CONTENT, "x", "it")
    blind = make_signatures(tmp_path, require_signed=False, verify_key_file=None)
    assert blind.require(Purpose.FOLDER, CONTENT, "x", "it") == ""
    assert not RunSignatures(make_keys(tmp_path, signing_key_file=None), "run").sign(Purpose.FOLDER, CONTENT)


def test_keys_are_replaced_while_a_process_runs(tmp_path: Path) -> None:
    old, new = make_signatures(tmp_path / "old"), make_signatures(tmp_path / "new")
    file = tmp_path / "old" / VERIFY_KEY
    by_new = new.sign(Purpose.FOLDER, CONTENT)
    with pytest.raises(SignatureError, match=f"signed by the key {new.key_id}, which is not one of"):
        old.require(Purpose.FOLDER, CONTENT, by_new, "it")
    file.write_bytes(file.read_bytes() + (tmp_path / "new" / VERIFY_KEY).read_bytes())
    assert old.require(Purpose.FOLDER, CONTENT, by_new, "it") == new.key_id
    assert old.require(Purpose.FOLDER, CONTENT, old.sign(Purpose.FOLDER, CONTENT), "it") == old.key_id
    file.write_text("half a file")
    with capture_logs() as logs:
        assert old.require(Purpose.FOLDER, CONTENT, by_new, "it") == new.key_id
    assert [log["event"] for log in logs] == ["verify_keys_kept"]
    file.write_bytes((tmp_path / "new" / VERIFY_KEY).read_bytes())
    with pytest.raises(SignatureError, match=f"signed by the key {old.key_id}"):
        old.require(Purpose.FOLDER, CONTENT, old.sign(Purpose.FOLDER, CONTENT), "it")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no private key in PEM"),
        (b"\0" * 70_000, "has more than 65536 bytes"),
        (encode_private(ec.generate_private_key(ec.SECP256R1())), "of another kind .*expected Ed25519"),
        (encode_private(ed25519.Ed25519PrivateKey.generate(), b"secret"), "has a passphrase"),
        (encode_public(ed25519.Ed25519PrivateKey.generate()), "holds no private key in PEM"),
    ],
)
def test_a_wrong_signing_key_file_is_named(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match=rf"security\.signing_key_file .*key\.pem {sentence}|{sentence}"):
        Signer(file)


@pytest.mark.parametrize("mode", [0o604, 0o640 | 0o020, 0o602, 0o601])
def test_a_signing_key_that_is_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    write_key_pair(tmp_path)
    (tmp_path / SIGNING_KEY).chmod(mode)
    with pytest.raises(SettingsError, match=r"is open to others .*chmod 600"):
        Signer(tmp_path / SIGNING_KEY)
    (tmp_path / SIGNING_KEY).chmod(0o440)  # as Kubernetes mounts secrets for a group
    assert Signer(tmp_path / SIGNING_KEY)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "key 1 is damaged"),
        (encode_public(rsa.generate_private_key(65537, 2048)), "key 1 is of another kind .*expected Ed25519"),
        (encode_private(ed25519.Ed25519PrivateKey.generate()), "holds a private key: give public ones alone"),
    ],
)
def test_a_wrong_file_of_public_keys_is_named(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(SettingsError, match=rf"security\.verify_key_file .*key\.pem.*{sentence}"):
        VerifyKeys(tmp_path / "key.pem")


def test_a_missing_file_and_keys_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"signing_key_file .*none cannot be read \(no such file\)"):
        Signer(tmp_path / "none")
    with pytest.raises(SettingsError, match=r"verify_key_file .* cannot be read \(no such file\)"):
        VerifyKeys(tmp_path)
    one, other = make_keys(tmp_path / "one"), make_keys(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"which is not one of security\.verify_key_file .*add its public key"):
        RunSignatures(one.model_copy(update={"verify_key_file": other.verify_key_file}), "run")
    with pytest.raises(SettingsError, match=r"the trainer has no security\.signing_key_file"):
        RunSignatures(make_keys(tmp_path, signing_key_file=None), "run").require_signer("the trainer")


def test_a_signing_key_is_replaced_while_the_trainer_runs_and_is_not_needed_to_verify(tmp_path: Path) -> None:
    signatures = make_signatures(tmp_path / "old", verify_key_file=None, require_signed=False)
    file, before = tmp_path / "old" / SIGNING_KEY, signatures.key_id
    new = write_key_pair(tmp_path / "new")
    file.write_text("half a file")
    with capture_logs() as logs:
        assert signatures.key_id == before
    assert logs[0]["event"] == "signing_key_kept"
    file.write_bytes((tmp_path / "new" / SIGNING_KEY).read_bytes())
    signature = signatures.sign(Purpose.FOLDER, CONTENT)
    file.unlink()
    verifying = RunSignatures.verifying(make_keys(tmp_path / "new", signing_key_file=file), "run")
    assert verifying.require(Purpose.FOLDER, CONTENT, signature, "it") == new
    assert verifying.sign(Purpose.FOLDER, CONTENT) == ""
