"""Files of tokens and keys that cannot be used: a sentence, and no question on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import Issuer
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from forage_runtime.errors import SettingsError
from forage_runtime.security.tls import make_grpc_server_credentials, make_server_context
from forage_runtime.security.token_file import TokenFile
from forage_runtime.settings import TlsSettings


def encrypt(key: Path) -> None:
    plain = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


@pytest.fixture
def encrypted(tmp_path: Path) -> dict[str, Any]:
    issuer = Issuer(tmp_path / "authority")
    issued = issuer.issue("service")
    encrypt(issued.key)
    return issuer.make_settings(issued)


@pytest.mark.parametrize(
    "make", [make_server_context, lambda tls: make_grpc_server_credentials(tls, "reward")], ids=["HTTP", "gRPC"]
)
def test_a_key_with_a_passphrase_is_refused(encrypted: dict[str, Any], make: Callable[[TlsSettings], object]) -> None:
    with pytest.raises(SettingsError, match=r"tls\.key .* has a passphrase.*give a key without one"):
        make(TlsSettings(**encrypted))


def test_a_key_that_gets_a_passphrase_later_keeps_the_last_good_one(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "authority")
    issued = issuer.issue("service")
    context = make_server_context(TlsSettings(**issuer.make_settings(issued)))
    assert context is not None
    encrypt(issued.key)
    import ssl

    assert isinstance(context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True), ssl.SSLObject)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_tokens_in_a_folder_that_may_not_be_entered_are_a_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "tokens").write_text("word\n")
    closed.chmod(0)
    code = (
        "import os, sys; from pathlib import Path; from forage_runtime.errors import SettingsError\n"
        "from forage_runtime.security.token_file import TokenFile\n"
        "os.seteuid(65534)\n"
        f"try: TokenFile(Path({str(closed / 'tokens')!r}), 'reward.auth_token_file')\n"
        "except SettingsError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("reward.auth_token_file ")
    assert "cannot be read (Permission denied): give a file with a token" in ended.stdout


def test_a_missing_file_of_tokens_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be read \(No such file or directory\)"):
        TokenFile(tmp_path / "none")
    with pytest.raises(SettingsError, match=r"cannot be read \(Is a directory\)"):
        TokenFile(tmp_path)
