"""Runs every command line and code block of the documentation as a reader would, page by page.

.venvs/cli/bin/python lab/documented.py [PAGE …]          in a new clone of this checkout
.venvs/cli/bin/python lab/documented.py --wheel           in an empty folder, with a wheel in an environment of its own

Prints for each: what became of it, exit code, seconds, and the last line that it printed. Exit code 1: a command
failed or did not do what its page says. Commands that this machine cannot run are listed with the reason
(`documented_rules.py`); --list lists all without running any.

Blocks with a title are files, which are written before the page's commands run. Others are checked: YAML as settings,
Python by its compiler, JSON by its reader. What readers bring is made small (`documented_inputs.py`). A program that
serves runs until the page ends, or until another one needs its ports, and must end with exit code 0 at Ctrl-C. The
first command that asks services where none run has `forage up` started, which serves all later pages. Variables of the
environment make trainings short; a command line that says how long it trains is run as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from documented_inputs import bring
from documented_rules import Kind, find_kind, find_reason, find_recipe, list_missing, list_outputs
from pages import COMMANDS_PAGE, REPOSITORY, Block, CommandLine, list_pages, read_blocks, read_examples, read_lines

from forage_runtime.errors import UserError
from forage_runtime.settings import load_settings

ORDER = ("README.md", "docs/start/train", "docs/start", "docs/guide", "examples", "docs/reference", "docs/explanation")
"""Where the names of the first pages begin; others follow."""
SHORT = {"FORAGE__TRAINER__TOTAL_TRAINING_STEPS": "3", "FORAGE__DATA__VAL_MAX_SAMPLES": "16"}
LIMITS_S = {Kind.ALONE: 300.0, Kind.ASKS: 600.0, Kind.STARTS: 1500.0, Kind.SERVES: 300.0}
"""Seconds until a command must have ended; until one that serves must be ready."""
_CURL = "fail-with-body\nsilent\nshow-error\n"
"""Settings of curl: an HTTP error fails, and no progress is the last line."""
STOP_S = 120.0
POLL_S = 0.5
PORTS = range(18600, 18660)
KEPT = {"data", "runs", ".venvs", ".git"}
"""What is kept between pages: a reader makes data and runs on one page and reads them on another."""


@dataclass
class Result:
    """What became of a command line or a block; outcome: passed, failed or left."""

    page: str
    line: int
    text: str
    outcome: str
    code: int | None = None
    seconds: float = 0.0
    last: str = ""

    def __str__(self) -> str:
        code = "" if self.code is None else str(self.code)
        place, text = f"{self.page}:{self.line}", " ".join(self.text.split())
        return f"{self.outcome:<6} {code:>3} {self.seconds:7.1f} s  {place}  {text}\n{'':22}{self.last:.300}"


@dataclass
class Serving:
    """A program that serves; command: None of `forage up` for all who ask. log: what it prints."""

    command: CommandLine | None
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Reader:
    """A reader in a folder, with the programs that she has started.

    Attributes:
        forage: the command of an installed wheel; None: the folder is a clone of this checkout.
        light: commands that start or ask services are left out.
        dry: nothing is run.
    """

    folder: Path
    forage: Path | None = None
    light: bool = False
    dry: bool = False
    serving: list[Serving] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    """Command lines that were run, and where."""
    unmade: set[str] = field(default_factory=set)
    """Files that lines would have written that were left out."""
    taken: set[int] = field(default_factory=set)
    """Ports that were listened to before the last program was started."""
    started: int = 0
    """Programs so far."""
    variables: dict[str, str] = field(default_factory=dict)
    """Those that the lines of a page assign."""

    def __post_init__(self) -> None:
        self.log = self.folder.with_name("log")
        """What the last program prints."""
        self.state = self.folder.with_name(f"{self.folder.name}.env")
        self.folder.with_name(".curlrc").write_text(_CURL, encoding="utf-8")
        if self.forage is not None:
            self.folder.mkdir(parents=True)
            return
        subprocess.run(["git", "clone", "--quiet", "--local", REPOSITORY, self.folder], check=True)
        (self.folder / ".venvs").symlink_to(REPOSITORY / ".venvs")
        pages = Path("services/console/forage_console/static")
        if (REPOSITORY / pages).is_dir():  # `make console` built them; `make demo` would build them again
            shutil.copytree(REPOSITORY / pages, self.folder / pages, dirs_exist_ok=True)

    def read_page(self, page: Path) -> Iterator[Result]:
        """Do what a page says, in its order."""
        self._tidy()
        blocks = read_blocks(page)
        for block in (block for block in blocks if block.title):
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
            if not self.dry:
                bring(block.text, self.folder, page, self._run_alone)
        for block in (block for block in blocks if block.language in CHECKS):
            yield self._check(block)
        lines = [line for block in blocks if is_shell(block) for line in read_lines(block)]
        for command in read_examples() if page == COMMANDS_PAGE else lines:
            yield from self._do(command)
        yield from self.stop(keep_own=True)

    def _tidy(self) -> None:
        """Remove what the page before left: files that it named, variables, the folder that it changed to."""
        self.state.unlink(missing_ok=True)
        self.variables.clear()
        self.unmade.clear()
        self._tidy_runs()
        if self.forage is None:
            kept = [word for name in KEPT for word in ("--exclude", f"/{name}")]
            subprocess.run(["git", "clean", "-dfq", *kept], cwd=self.folder, check=True)
            return
        for path in self.folder.iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _tidy_runs(self) -> None:
        """Remove the runs that a page has named, as the next page may give the same name; `runs/latest` is a demo's."""
        runs = self.folder / "runs"
        demos = sorted(runs.glob("demo-*"), key=lambda run: run.stat().st_mtime)
        for run in runs.glob("*"):
            if run not in demos and not run.is_symlink() and not (run / "processes.json").exists():
                shutil.rmtree(run, ignore_errors=True)
        if demos:
            (runs / "latest").unlink(missing_ok=True)
            (runs / "latest").symlink_to(demos[-1].name)

    def _do(self, command: CommandLine) -> Iterator[Result]:
        page, text, kind = name(command.page), command.text, find_kind(command.text)
        if assigned := re.fullmatch(r"(\w+)=(\S+)", text):
            self.variables[assigned[1]] = assigned[2]
        meant = re.sub(r"\$(\w+)", lambda match: self.variables.get(match[1], match[0]), text)
        missing = self._list_missing(meant)
        reason = find_reason(meant, missing, self._exists, self.forage is not None)
        if not reason and self.light and kind is not Kind.ALONE:
            reason = f"{kind} (--light)"
        if not reason and text in self.seen and kind is Kind.STARTS and "my.yaml" not in text:
            reason = f"as {self.seen[text]}"
        read = self.unmade & set(text.split()) - set(list_outputs(text))
        unmade = [path for path in read if not (self.folder / path).exists()]
        if not reason and unmade and not self.dry:
            reason = f"needs {unmade[0]} of a line that was left out"
        if reason:
            self.unmade |= set(list_outputs(text))
        if reason or self.dry:
            yield Result(page, command.line, text, "left" if reason else "run", last=reason or kind)
            return
        self.seen[text] = f"{page}:{command.line}"
        bring(text, self.folder, command.page, self._run_alone)
        if kind is Kind.STARTS or (kind is Kind.SERVES and "-m forage_" not in text):  # those run beside each other
            yield from self.stop(keep_beside=True)
        elif kind is Kind.ASKS and not self._serves() and "forage ask" not in text:  # which starts what it asks
            yield from self.stop()
            process = self._start("forage up --no-console")
            self.serving.append(Serving(None, process, self.log))
            self._wait_until_served("forage up", process)
        began = time.monotonic()
        if kind is Kind.SERVES:
            self.taken = {port for port in PORTS if is_listened_to(port)}
            process = self._start(text.removesuffix("&").rstrip())
            self.serving.append(Serving(command, process, self.log))
            code = self._wait_until_served(text, process)
            if process.poll() is not None:
                self.serving.pop()
        else:
            code = self._call(text, LIMITS_S[kind])
        found = Result(page, command.line, text, "passed", code, time.monotonic() - began, read_last_line(self.log))
        self._judge(found, missing if "config check" in text else [])
        yield found

    def _judge(self, found: Result, missing: Sequence[str]) -> None:
        """Compare with what the page says: it succeeds and writes its files, or names every file that is not here."""
        printed = self.log.read_text(encoding="utf-8", errors="replace").replace("\n", "")
        if found.code != (2 if missing else 0):
            found.outcome = "failed"
        elif unnamed := [path for path in missing if path not in printed]:
            found.outcome, found.last = "failed", f"does not name {', '.join(unnamed)}"
        elif not missing:
            unwritten = [path for path in list_outputs(found.text) if not (self.folder / path).exists()]
            if unwritten:
                found.outcome, found.last = "failed", f"has not written {', '.join(unwritten)}"

    def _serves(self) -> bool:
        """Whether services run: a console alone answers for none."""
        return any(one.command is None or "forage console" not in one.command.text for one in self.serving)

    def _exists(self, path: str) -> bool:
        return (self.dry and path == "runs/latest") or (self.folder / path).exists()

    def _list_missing(self, text: str) -> list[str]:
        recipe = find_recipe(text)
        if recipe is None:
            return []
        file = (REPOSITORY if recipe.startswith("configs/") else self.folder) / recipe
        with suppress(UserError):  # a file that is not here or cannot be read: the command says so
            return list_missing(load_settings(file, environ={}), self._exists)
        return []

    def _start(self, text: str) -> subprocess.Popen[bytes]:
        """Start a line of shell; its variables and its folder stay for the next one, as in a terminal."""
        # `make` would install the environments anew, as their place is part of them, over those of this checkout.
        command = re.sub(r"\bmake demo\b", ".venvs/cli/bin/forage demo --seed 0", text)
        command = command.replace(".venvs/cli/bin/", "") if self.forage is not None else command
        state = shlex.quote(str(self.state))
        kept = "export -p | grep -vE '^declare -x (PWD|OLDPWD|SHLVL|_|code)='; printf 'cd %q' \"$PWD\""
        script = f"[ ! -f {state} ] || . {state}\nset -a\n{command}\ncode=$?\n{{ {kept}; }} > {state}\nexit $code"
        own = (self.forage or REPOSITORY / ".venvs/cli/bin/forage").absolute().parent
        path = {"PATH": f"{own}:{os.environ['PATH']}", "CURL_HOME": str(self.log.parent)}
        environment = {**os.environ, **SHORT, **path, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        self.started += 1
        self.log = self.folder.with_name(f"{self.started}.log")
        with self.log.open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _run_alone(self, text: str) -> int:
        return self._call(text, LIMITS_S[Kind.ALONE])

    def _call(self, text: str, limit_s: float) -> int:
        process = self._start(text)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"\nit had not ended after {limit_s:.0f} s\n")
            return 124
        finally:
            if process.poll() is None:  # at Ctrl-C, too
                end(process)

    def _wait_until_served(self, text: str, process: subprocess.Popen[bytes]) -> int:
        """Wait until a program is ready; returns 0, or what it ended with."""
        deadline = time.monotonic() + LIMITS_S[Kind.SERVES]
        while time.monotonic() < deadline:
            if (code := process.poll()) is not None:
                return code or 1
            if self._is_served(text):
                return 0
            time.sleep(POLL_S)  # wait: pause between two looks
        return 124

    def _is_served(self, text: str) -> bool:
        if "forage up" not in text:
            return any(port not in self.taken and is_listened_to(port) for port in PORTS)
        command = [self.forage or REPOSITORY / ".venvs/cli/bin/forage", "status"]
        return subprocess.run(command, cwd=self.folder, capture_output=True).returncode == 0

    def stop(self, keep_own: bool = False, keep_beside: bool = False) -> Iterator[Result]:
        """End the programs that serve as Ctrl-C does; yields those that end otherwise than with 0.

        Args:
            keep_own: keep `forage up` for all who ask; keep_beside: keep what a page starts in the background.
        """
        kept = [
            one
            for one in self.serving
            if (one.command is None and keep_own) or (one.command and one.command.text.endswith("&") and keep_beside)
        ]
        for one in self.serving:
            if one in kept:
                continue
            code, command = end(one.process), one.command
            if command is not None and code not in (0, -signal.SIGINT, 128 + signal.SIGINT):
                last = f"at Ctrl-C: {read_last_line(one.log)}"
                yield Result(name(command.page), command.line, command.text, "failed", code, last=last)
        self.serving = kept

    def _check(self, block: Block) -> Result:
        first = block.text.strip().splitlines()[0]
        found = Result(name(block.page), block.line, first, "passed", last=block.language)
        try:
            CHECKS[block.language](block)
        except Exception as error:  # noqa: BLE001 - what the reader of such a block refuses is the result
            found.outcome, found.last = "failed", " ".join(str(error).split())
        return found


def install_wheel(folder: Path) -> Path:
    """Build a wheel and install it into an environment of its own; returns its command."""
    uv, python = REPOSITORY / ".venvs/uv/bin/uv", folder / "venv/bin/python"
    subprocess.run([sys.executable, REPOSITORY / "scripts/wheel.py", "--out", folder], check=True, stdout=sys.stderr)
    subprocess.run([uv, "venv", "--quiet", "--python", "3.11", folder / "venv"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *folder.glob("forage_cli-*.whl")], check=True)
    os.environ["FORAGE_HOME"] = str(folder / "home")  # where the wheel unpacks its services
    return python.with_name("forage")


def check_yaml(block: Block) -> None:
    """Check that a block is YAML, and that it is settings unless it is of Kubernetes or Ray."""
    content = yaml.safe_load(block.text)
    if isinstance(content, dict) and "/operate/" not in str(block.page) and "applications" not in content:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(block.text)
            file.flush()
            load_settings(Path(file.name), environ={})


def check_python(block: Block) -> None:
    compile(block.text, str(block.page), "exec")


def check_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


CHECKS = {"yaml": check_yaml, "python": check_python, "json": check_json}


def is_shell(block: Block) -> bool:
    """Whether a block has command lines: its first word is a program's, not what a program prints."""
    if block.language:
        return False
    programs = (
        "forage|make|python3?|uv|curl|docker|kubectl|helm|amtool|redis-cli|npm|pipx|openssl|echo|for|ln|export|run"
    )
    return (
        re.match(rf"(?:[A-Z_0-9]+=\S+ |\()*(?:\S*/)?(?:{programs})\b|query: |cd |\w+=\S+$", block.text, re.M)
        is not None
    )


def is_listened_to(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(POLL_S)
        return one.connect_ex(("127.0.0.1", port)) == 0


def end(process: subprocess.Popen[bytes]) -> int:
    """End a program and what it started as Ctrl-C does, by force after `STOP_S`; returns its exit code."""
    for sign, limit_s in ((signal.SIGINT, STOP_S), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
            return process.wait(limit_s)
        except ProcessLookupError:
            return process.wait()
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"process {process.pid} cannot be ended")


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY) if page.is_relative_to(REPOSITORY) else page.name)


def read_last_line(log: Path) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", log.read_text(encoding="utf-8", errors="replace"))
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def find_place(page: Path) -> int:
    """Find when somebody reads a page: what is made on one is read on a later one."""
    return next((place for place, begin in enumerate(ORDER) if name(page).startswith(begin)), len(ORDER))


def print_summary(results: Sequence[Result]) -> None:
    """Print a row a page, the reasons of what was left out, and what failed once more."""
    pages = dict.fromkeys(result.page for result in results)
    sys.stdout.write(f"\n{'page':<48} passed  failed    left  seconds\n")
    for page in (*pages, "all"):
        own = [result for result in results if page in (result.page, "all")]
        counts = Counter(result.outcome for result in own)
        seconds = sum(result.seconds for result in own)
        sys.stdout.write(f"{page:<48} {counts['passed']:>6} {counts['failed']:>7} {counts['left']:>7} {seconds:8.1f}\n")
    left = (result.last for result in results if result.outcome == "left")
    reasons = Counter(reason for reason in left if not reason.startswith("as "))
    sys.stdout.writelines(f"left {count:>4}  {reason}\n" for reason, count in reasons.most_common())
    sys.stdout.writelines(f"{result}\n" for result in results if result.outcome == "failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages, instead of all")
    parser.add_argument("--wheel", action="store_true", help="use an installed wheel instead of this checkout")
    parser.add_argument("--light", action="store_true", help="leave out what starts or asks services")
    parser.add_argument("--list", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if not (arguments.light or arguments.list) and (taken := [port for port in PORTS if is_listened_to(port)]):
        parser.error(f"the documented ports are taken ({taken[0]}): stop what runs there, or give --light")
    pages = [page.resolve() for page in arguments.pages] or [*sorted(list_pages(), key=find_place), COMMANDS_PAGE]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        command = None
        if arguments.wheel:
            command = Path("forage") if arguments.list else install_wheel(Path(place))
        reader = Reader(Path(place) / "reader", command, arguments.light, arguments.list)
        try:
            for page in pages:
                for result in reader.read_page(page):
                    results.append(result)
                    sys.stdout.write(f"{result}\n")
                    sys.stdout.flush()
        finally:
            results += reader.stop()
    print_summary(results)
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
