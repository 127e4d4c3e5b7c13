"""The audit record: whole lines of several processes, callers by name, and no secret."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from structlog.testing import capture_logs

from forage_runtime.security.audit import name_caller, name_grpc_caller, name_http_caller, record_act
from forage_runtime.security.http.guard import CLIENT_CERTIFICATE

WRITER = """
import sys
from pathlib import Path
from forage_runtime.security.audit import record_act
for number in range(200):
    record_act("publish_policy", "trainer", Path(sys.argv[1]), writer=sys.argv[2], number=number, text=400 * "x")
"""


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    command = [sys.executable, "-c", WRITER, str(file)]
    writers = [subprocess.Popen([*command, str(n)], stdout=subprocess.DEVNULL) for n in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for writer in range(2):
        assert [record["number"] for record in records if record["writer"] == str(writer)] == list(range(200))
    assert len({record["pid"] for record in records}) == 2


def test_a_record_is_one_bounded_line_whatever_a_message_said(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    file.write_text("before\n")
    record_act("refuse_policy", "a\nb\x1b[2J\ud800", file, uri="\n{}\u2028" + 10_000 * "x", version=2**63, drain=True)
    before, line = file.read_text().splitlines()
    assert (before, line.isascii(), "\x1b" in line) == ("before", True, False)
    record = json.loads(line)
    assert len(record["uri"]) == 500
    assert (record["act"], record["version"], record["drain"]) == ("refuse_policy", 2**63, True)
    assert set(record) == {"time", "act", "actor", "service", "host", "pid", "uri", "version", "drain"}
    assert not file.stat().st_mode & 0o002


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with capture_logs() as logs:
        record_act("publish_policy", "trainer", tmp_path / "missing/audit.jsonl")
        record_act("publish_policy", "trainer", Path("/dev/full"))
        record_act("publish_policy", "trainer")
    assert [log["event"] for log in logs] == ["audit", "audit_file_failed", "audit", "audit_file_failed", "audit"]
    assert logs[0]["act"] == "publish_policy"
    assert "No such file" in logs[1]["detail"]
    assert "No space left" in logs[3]["detail"]


def test_a_caller_is_its_certificate_else_its_tokens_fingerprint_else_its_address() -> None:
    fingerprint = hashlib.sha256(b"secret").hexdigest()[:12]
    assert name_caller("1.2.3.4") == {"actor": "1.2.3.4", "peer": "1.2.3.4"}
    assert name_caller("1.2.3.4", "Bearer secret")["actor"] == f"token {fingerprint}"
    assert name_caller("1.2.3.4", "Bearer secret", "trainer")["actor"] == "certificate trainer"

    def call(has_token: bool, **auth: list[bytes]) -> str:
        context = SimpleNamespace(
            auth_context=lambda: auth,
            invocation_metadata=lambda: (("authorization", "Bearer secret"), ("x-bin", b"\xff")),
            peer=lambda: "ipv4:1.2.3.4:5",
        )
        return name_grpc_caller(context, has_token)["actor"]

    assert call(True) == f"token {fingerprint}"
    assert call(False) == "ipv4:1.2.3.4:5", "what nobody has checked names nobody"
    request = SimpleNamespace(
        client=SimpleNamespace(host="1.2.3.4"), headers={"authorization": "Bearer secret"}, scope={"state": {}}
    )
    assert name_http_caller(request, True)["actor"] == f"token {fingerprint}"
    assert name_http_caller(request, False)["actor"] == "1.2.3.4"
    request.scope["state"][CLIENT_CERTIFICATE] = "console"
    assert name_http_caller(request, True)["actor"] == "certificate console"
    assert call(True, x509_common_name=[b"trainer"]) == "certificate trainer"
