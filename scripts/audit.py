"""Compares what is locked with known vulnerabilities: packages of every lock, and images of others.

    audit.py           print what is known; exit code 1 for one that is high, critical or of unknown severity and not
                       waived, 2 for a file that cannot be read
    audit.py update    ask osv.dev about every locked package, and write security/advisories.json

Without a network: the advisories are in security/advisories.json, and what is accepted, why and until when in
security/waivers.yaml.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from advisories import AdvisoryError, Finding, find_vulnerabilities, load_advisories, load_waivers
from locked_packages import Package, list_packages, list_unversioned_images
from third_party_images import ImageListError

REPOSITORY = Path(__file__).resolve().parents[1]
ADVISORIES = "security/advisories.json"
WAIVERS = "security/waivers.yaml"
DATABASE = "https://api.osv.dev"
OLD_AFTER_DAYS = 30
_BATCH = 1000  # queries that the database takes in one call
_KEPT = ("id", "modified", "published", "withdrawn", "aliases", "summary", "severity", "affected", "references")


def audit(root: Path, today: datetime.date) -> int:
    """Print the findings and a summary, and return the exit code."""
    records, as_of = load_advisories(root / ADVISORIES)
    waivers = load_waivers(root / WAIVERS)
    packages = list_packages(root)
    findings = find_vulnerabilities(packages, [one for one in records if "withdrawn" not in one], waivers)
    for finding in findings:
        _print_finding(finding, today)
    used = {finding.waiver for finding in findings}
    for waiver in waivers:
        if waiver not in used:
            print(f"note      {waiver.id} ({waiver.package}) is waived and not found: remove the waiver")
    for image in list_unversioned_images(root):
        print(f"note      {image} has a tag that moves: build the images again for its patches")
    if (age := (today - as_of).days) > OLD_AFTER_DAYS:
        print(f"note      the advisories are {age} days old: run 'make audit-update' where osv.dev can be reached")
    failing = sum(finding.fails(today) for finding in findings)
    print(
        f"audit: {len(packages)} packages and images, {len(records)} advisories of {as_of}: "
        f"{len(findings)} found, {failing} of them high and not waived"
    )
    return int(failing > 0)


def _print_finding(finding: Finding, today: datetime.date) -> None:
    package = finding.package
    state = ""
    if finding.waiver is not None:
        verb = "waived until" if finding.waiver.expires >= today else "the waiver expired on"
        state = f"; {verb} {finding.waiver.expires}: {finding.waiver.reason}"
    print(f"{finding.severity:<9} {package.name} {package.version} ({package.ecosystem}): {', '.join(finding.ids)}")
    print(f"          {finding.summary}; fixed in {', '.join(finding.fixed) or 'no version'}{state}")
    print(f"          in {', '.join(finding.places)}")


def update(root: Path, client: httpx.Client, today: datetime.date) -> int:
    """Ask the database about every locked package, write the answers beside the records that are known, count them.

    Records of packages that are no longer locked, or no longer affected, stay: they find a lock that goes back.

    Raises:
        AdvisoryError: the database cannot be reached, or answers with an error; nothing is written then.
    """
    records = {record["id"]: record for record in load_advisories(root / ADVISORIES)[0]}
    try:
        ids = _query_ids(list(list_packages(root)), client)
        for name in sorted(ids | records.keys()):
            answer = client.get(f"/v1/vulns/{name}")
            if answer.status_code == 404 and name in records:
                continue  # a record by its CVE, which the database has under another id
            record = answer.raise_for_status().json()
            severity = record.get("database_specific", {}).get("severity")
            kept = {key: record[key] for key in _KEPT if key in record}
            records[name] = kept | ({"database_specific": {"severity": severity}} if severity else {})
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise AdvisoryError(
            f"{client.base_url.host} gave no advisories ({error or type(error).__name__}): run this where it can be "
            "reached; nothing was changed, and 'make audit' goes on with the file"
        ) from None
    content = {"as_of": today.isoformat(), "advisories": [records[name] for name in sorted(records)]}
    (root / ADVISORIES).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(records)


def _query_ids(packages: list[Package], client: httpx.Client) -> set[str]:
    ids: set[str] = set()
    queries: list[dict[str, Any]] = [
        {"package": {"ecosystem": one.ecosystem, "name": one.name}, "version": one.version.partition("+")[0]}
        for one in packages
    ]
    while queries:
        batch, queries = queries[:_BATCH], queries[_BATCH:]
        answer = client.post("/v1/querybatch", json={"queries": batch}).raise_for_status().json()
        for query, result in zip(batch, answer["results"], strict=True):
            ids |= {found["id"] for found in result.get("vulns", ())}
            if token := result.get("next_page_token"):
                queries.append(query | {"page_token": token})
    return ids


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("check", "update"), default="check")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="another checkout")
    parser.add_argument("--database", default=DATABASE, help=f"a mirror of {DATABASE}")
    options = parser.parse_args(arguments)
    today = datetime.datetime.now(datetime.UTC).date()
    try:
        if options.command == "update":
            with httpx.Client(base_url=options.database, timeout=30, follow_redirects=True) as client:
                print(f"audit: {update(options.root, client, today)} advisories are in {ADVISORIES}")
            return 0
        return audit(options.root, today)
    except (AdvisoryError, ImageListError, OSError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
