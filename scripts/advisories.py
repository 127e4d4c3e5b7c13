"""Known vulnerabilities in the OSV format: whether one affects a version, how severe it is, and what is waived.

The format: https://ossf.github.io/osv-schema/. Versions of Python packages are compared by PEP 440, all others by
semantic versioning.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cvss
import semver
import yaml
from locked_packages import Package, normalize
from packaging.version import InvalidVersion, Version

SEVERITIES = ("LOW", "MEDIUM", "HIGH", "CRITICAL")
UNKNOWN = "UNKNOWN"
FAILING = ("HIGH", "CRITICAL", UNKNOWN)
"""An advisory whose severity nobody has stated counts as high: look at it, then waive it or update."""


class AdvisoryError(Exception):
    """A file of advisories or waivers is not as expected; the message names field, value and remedy."""


@dataclass(frozen=True)
class Waiver:
    """A finding that is accepted until a date, for a reason."""

    id: str
    package: str
    reason: str
    expires: datetime.date


@dataclass(frozen=True)
class Finding:
    """An advisory that affects a locked version.

    Attributes:
        ids: its id, then its aliases.
        fixed: the versions that fix it, empty if there is none.
        waiver: the waiver of it, which may have expired.
    """

    package: Package
    ids: tuple[str, ...]
    severity: str
    summary: str
    fixed: tuple[str, ...]
    places: tuple[str, ...]
    waiver: Waiver | None = None

    def fails(self, today: datetime.date) -> bool:
        """Whether the audit fails by it: high or unknown, and not waived today."""
        return self.severity in FAILING and (self.waiver is None or self.waiver.expires < today)


def load_advisories(file: Path) -> tuple[list[dict[str, Any]], datetime.date]:
    """Load the records, and the day of which they are.

    Raises:
        AdvisoryError: not such a file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for record in content["advisories"]:
            if not {"id", "modified", "affected"} <= set(record):
                raise AdvisoryError(f"{file.name}: {record.get('id', 'a record')} lacks id, modified or affected")
        return content["advisories"], datetime.date.fromisoformat(content["as_of"])
    except (ValueError, KeyError, TypeError) as error:
        raise AdvisoryError(
            f"{file} is no file of advisories ({error!r}): restore it, or run 'make audit-update'"
        ) from None


def load_waivers(file: Path) -> list[Waiver]:
    """Load the waivers.

    Raises:
        AdvisoryError: one lacks its id, package, reason or date.
    """
    waivers = []
    for entry in yaml.safe_load(file.read_text(encoding="utf-8"))["waivers"]:
        missing = {"id", "package", "reason", "expires"} - {name for name, value in entry.items() if value}
        if missing:
            raise AdvisoryError(
                f"{file.name}: the waiver of {entry.get('id')} has no {', '.join(sorted(missing))}: add it"
            )
        if not isinstance(entry["expires"], datetime.date):
            raise AdvisoryError(f"{file.name}: expires of {entry['id']} is '{entry['expires']}', expected YYYY-MM-DD")
        waivers.append(Waiver(entry["id"], entry["package"], entry["reason"], entry["expires"]))
    return waivers


def _parse(ecosystem: str, version: str) -> Any:
    """Make a version comparable. "0" in an event is below every version."""
    if ecosystem == "PyPI":
        return Version(Version(version).public)  # 2.13.0+cpu is a build of 2.13.0
    return semver.Version.parse(version.removeprefix("v"), optional_minor_and_patch=True)


def is_in_range(ecosystem: str, version: str, events: Iterable[dict[str, str]]) -> bool:
    """Whether a version is between the events of a range: from `introduced` until before `fixed`, or `last_affected`.

    Raises:
        AdvisoryError: one of the versions cannot be read.
    """
    try:
        own = _parse(ecosystem, version)
        marks = []
        for event in events:
            [(kind, value)] = event.items()
            # At the same version what is introduced comes after what is fixed.
            marks.append((value != "0", value if value == "0" else _parse(ecosystem, value), kind))
    except (InvalidVersion, ValueError) as error:
        raise AdvisoryError(f"a version of {ecosystem} cannot be compared: {error}") from None
    affected = False
    for mark in sorted(marks, key=lambda mark: (mark[0], mark[1] if mark[0] else own, mark[2] == "introduced")):
        is_number, value, kind = mark
        if kind == "introduced" and (not is_number or own >= value):
            affected = True
        elif (kind == "fixed" and own >= value) or (kind == "last_affected" and own > value):
            affected = False
    return affected


def affects(record: dict[str, Any], package: Package) -> bool:
    """Whether an advisory affects a package in its version."""
    return any(_is_affected(entry, package) for entry in _list_entries(record, package))


def _list_entries(record: dict[str, Any], package: Package) -> list[dict[str, Any]]:
    def compared(name: str) -> str:
        return normalize(name) if package.ecosystem == "PyPI" else name

    return [
        entry
        for entry in record["affected"]
        if entry["package"]["ecosystem"] == package.ecosystem
        and compared(entry["package"]["name"]) == compared(package.name)
    ]


def _is_affected(entry: dict[str, Any], package: Package) -> bool:
    if package.version in entry.get("versions", ()):
        return True
    return any(
        is_in_range(package.ecosystem, package.version, found["events"])
        for found in entry.get("ranges", ())
        if found["type"] != "GIT"
    )


def find_severity(record: dict[str, Any]) -> str:
    """The severity that the database states, else that of the highest score of its vectors, else unknown."""
    stated = str(record.get("database_specific", {}).get("severity", "")).upper().replace("MODERATE", "MEDIUM")
    if stated in SEVERITIES:
        return stated
    readers = {"CVSS_V2": cvss.CVSS2, "CVSS_V3": cvss.CVSS3, "CVSS_V4": cvss.CVSS4}
    levels = []
    for entry in record.get("severity", ()):
        try:
            levels.append(readers[entry["type"]](entry["score"]).severities()[0].upper())
        except (KeyError, cvss.exceptions.CVSSError):
            continue
    known = [level for level in levels if level in SEVERITIES]
    return max(known, key=SEVERITIES.index) if known else UNKNOWN


def find_fixes(record: dict[str, Any], package: Package) -> tuple[str, ...]:
    """The versions that fix an advisory, in all lines of releases."""
    events = [
        event
        for entry in _list_entries(record, package)
        for found in entry.get("ranges", ())
        for event in found["events"]
    ]
    return tuple(event["fixed"] for event in events if "fixed" in event)


def find_vulnerabilities(
    packages: dict[Package, list[str]], records: list[dict[str, Any]], waivers: list[Waiver]
) -> list[Finding]:
    """Every advisory of every package, the severest first; records of one vulnerability are one finding."""
    findings: list[Finding] = []
    for package, places in packages.items():
        groups: list[list[dict[str, Any]]] = []
        for record in (record for record in records if affects(record, package)):
            same = [group for group in groups if any(_list_ids(record) & _list_ids(other) for other in group)]
            groups = [group for group in groups if group not in same] + [
                [record, *(one for group in same for one in group)]
            ]
        findings += [_make_finding(package, places, group, waivers) for group in groups]
    return sorted(findings, key=lambda finding: (-_rank(finding.severity), finding.package, finding.ids))


def _make_finding(package: Package, places: list[str], group: list[dict[str, Any]], waivers: list[Waiver]) -> Finding:
    severities = [find_severity(record) for record in group]
    known = [severity for severity in severities if severity != UNKNOWN]
    ids = sorted(set().union(*map(_list_ids, group)), key=lambda name: (name not in {one["id"] for one in group}, name))
    waiver = next((one for one in waivers if one.id in ids and normalize(one.package) == normalize(package.name)), None)
    return Finding(
        package=package,
        ids=tuple(ids),
        severity=max(known, key=SEVERITIES.index) if known else UNKNOWN,
        summary=next((record["summary"] for record in group if record.get("summary")), ""),
        fixed=tuple(sorted({fix for record in group for fix in find_fixes(record, package)})),
        places=tuple(places),
        waiver=waiver,
    )


def _list_ids(record: dict[str, Any]) -> set[str]:
    return {record["id"], *record.get("aliases", ())}


def _rank(severity: str) -> float:
    return SEVERITIES.index("HIGH") - 0.5 if severity == UNKNOWN else SEVERITIES.index(severity)
