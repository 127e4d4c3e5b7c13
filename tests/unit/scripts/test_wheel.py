"""The wheel's archive has what the environments of the services are made of, and its requirements are the lock's."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import wheel

ROOT = Path(__file__).resolve().parents[3]


def test_the_archive_has_every_path_that_the_setup_of_a_service_reads() -> None:
    shipped = [Path(name) for name in wheel.SHIPPED]

    def is_shipped(path: str) -> bool:
        return any(Path(path).is_relative_to(one) for one in shipped)

    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    read = {path for path in re.findall(r"\bscripts/[\w./-]+", setup) if (ROOT / path).exists()}
    assert {path for path in read if not is_shipped(path)} == {"scripts/console.sh"}, "the pages are built before"
    homes = [line.split()[1] for line in (ROOT / "scripts/services.txt").read_text().splitlines()]
    assert all(is_shipped(home) for home in homes)
    libraries = {
        name for home in homes for name in re.findall(r"libs/\w+", (ROOT / home / "requirements.in").read_text())
    }
    assert libraries
    assert all(is_shipped(library) for library in libraries)


def test_the_archive_is_the_same_for_the_same_files_and_keeps_modes() -> None:
    files = [Path("LICENSE"), Path("scripts/setup.sh")]
    content = wheel.make_archive(files)
    assert content == wheel.make_archive(files)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        modes = {member.name: member.mode for member in archive}
        assert modes == {"LICENSE": 0o644, "scripts/setup.sh": 0o755}
        read = archive.extractfile("LICENSE")
        assert read is not None
        assert read.read() == (ROOT / "LICENSE").read_bytes()


def test_requirements_are_those_of_the_lock_without_hashes() -> None:
    lock = (
        'a-b==1.2 \\\n    --hash=sha256:00\nc==3 ; sys_platform == "linux" \\\n    --hash=sha256:01\nd.e==4.5.post2\n'
    )
    assert wheel.list_requirements(lock) == ["a-b==1.2", 'c==3 ; sys_platform == "linux"', "d.e==4.5.post2"]
    real = (ROOT / "cli/requirements.lock").read_text(encoding="utf-8")
    assert len(wheel.list_requirements(real)) == len(re.findall(r"(?m)^[^\s#]", real))
