"""Child processes: frames, their limits, their ends, and what a confined one is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forage_runtime.errors import UserError
from forage_sandbox import child as child_module
from forage_sandbox.child import Child, ChildDiedError, ChildTimeoutError, remove_folder
from forage_sandbox.confinement import Confinement, build_environment

PROGRAM = """
import os, sys, time
from forage_sandbox.child import ParentConnection
from forage_sandbox.confinement import Confinement
from forage_runtime.errors import UserError

connection = ParentConnection(int(sys.argv[1]), Confinement.from_json(sys.argv[2]))
with connection.report_start():
    if "refuse" in sys.argv:
        raise UserError("no such model")
while (frame := connection.receive()) is not None:
    order, _, rest = frame.decode().partition(" ")
    if order == "exit":
        os._exit(int(rest))
    if order == "kill":
        os.kill(os.getpid(), 9)
    if order == "sleep":
        time.sleep(60)
    if order == "variables":
        rest = " ".join(sorted(os.environ))
    connection.send(rest.encode() * (100 if order == "hundred" else 1))
"""


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """The variables by which a child finds its module and the library."""
    (tmp_path / "orders.py").write_text(PROGRAM)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def child(places: dict[str, str]) -> Iterator[Child]:
    started = Child("orders", environment=places, confinement=Confinement("reward.user.a", is_on=False))
    yield started.wait_until_ready()
    started.kill()


def test_frames_of_any_size_are_answered_in_turn(child: Child) -> None:
    assert child.call(b"echo " + b"x" * 3_000_000, 300) == b"x" * 3_000_000
    assert child.call(b"echo ", 300) == b""
    assert child.call(b"hundred ab", 300) == b"ab" * 100


def test_a_call_without_answer_ends_in_time(child: Child) -> None:
    with pytest.raises(ChildTimeoutError, match=r"no answer within 0\.2 s"):
        child.call(b"sleep", 0.2)
    child.kill()
    assert not child.is_alive


@pytest.mark.parametrize(("order", "sentence"), [(b"exit 3", "exit code 3"), (b"kill", "was killed by SIGKILL")])
def test_an_end_is_described(child: Child, order: bytes, sentence: str) -> None:
    with pytest.raises(ChildDiedError, match=sentence):
        child.call(order, 300)
    with pytest.raises(ChildDiedError, match=sentence):
        child.call(b"echo late", 300)


def test_a_reason_not_to_start_is_the_callers_error(places: dict[str, str]) -> None:
    started = Child("orders", ["refuse"], environment=places, confinement=Confinement("reward.user.a", is_on=False))
    with pytest.raises(UserError, match="no such model"):
        started.wait_until_ready()
    assert not started.is_alive


def test_a_confined_child_gets_few_variables_and_no_long_answers(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", places["PYTHONPATH"])
    monkeypatch.setenv("FORAGE_TOKEN", "secret")
    monkeypatch.setattr(child_module, "MAX_ANSWER_BYTES", 1000)
    started = Child("orders", confinement=Confinement("reward.user.a", memory_mib=4096)).wait_until_ready()
    try:
        variables = started.call(b"variables", 300).decode().split()
        assert "HOME" in variables
        assert "FORAGE_TOKEN" not in variables
        with pytest.raises(ChildDiedError, match="answer of 2000 bytes, allowed are 1000"):
            started.call(b"hundred " + b"x" * 20, 300)
        folder = started._folder
        assert folder is not None
        assert folder.is_dir()
    finally:
        started.kill()
    assert not folder.exists()


def test_a_confinement_travels_as_text() -> None:
    full = Confinement("reward.user.a", ("/a",), ("/b", "/c"), True, True, 7, 4, True, "/tmp/x", False)
    assert Confinement.from_json(full.to_json()) == full


def test_an_environment_keeps_what_python_runs_by() -> None:
    kept = build_environment(
        {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}, "/t"
    )
    assert kept == {
        **{"PATH": "/bin", "OMP_NUM_THREADS": "1", "LC_ALL": "C"},
        **{"HOME": "/t", "TMPDIR": "/t", "USER": "forage", "PYTHONUNBUFFERED": "1"},
    }


def test_a_deep_temporary_folder_is_removed(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "0").write_text("a file with the name of a folder that is moved up")
    here = os.open(deep, os.O_RDONLY)
    for number in range(3000):
        os.mkdir("a", dir_fd=here)
        inner = os.open("a", os.O_RDONLY, dir_fd=here)
        os.symlink(tmp_path, "link", dir_fd=inner)
        if number % 100 == 0:
            os.fchmod(here, 0o500)
        os.close(here)
        here = inner
    os.close(here)
    kept = tmp_path / "kept"
    kept.write_text("x")
    remove_folder(deep)
    assert not deep.exists()
    assert kept.exists()
