"""Break one rule of the delivery of groups at a time, and see whether the random walks notice.

usage: break_delivery.py [NAME …]      rules whose name begins so; all by default (ten minutes and more)

Each rule is broken in a copy of the packages; the script ends where a text is no longer there.
Prints a line a rule, and one JSON object last. Exit code 1: a broken rule was not noticed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TEST = "tests/contract/trainer/test_delivery_machine.py"
WALKS, TIMEOUT_S = 120, 600
ARRIVALS, BATCHER = "trainer/forage_trainer/data/arrivals.py", "trainer/forage_trainer/data/batcher.py"
CLIENT, SCRIPTS = "common/forage_common/streams/client.py", "common/forage_common/streams/scripts"
Edit = tuple[str, str, str]
NO_FENCE: Edit = (f"{SCRIPTS}/fence.lua", "if tonumber(epoch or '0') > tonumber(ARGV[1]) then", "if false then")
RULES: dict[str, list[Edit]] = {
    "an older trainer is refused": [NO_FENCE],
    "each trainer is a consumer of its own": [
        NO_FENCE,
        (CLIENT, 'return f"trainer-{self.epoch}"', 'return "trainer"'),
        (CLIENT, "        self.check_epoch()\n", ""),
    ],
    "epochs go on above those of checkpoints": [(f"{SCRIPTS}/acquire_epoch.lua", "tonumber(ARGV[1]))", "0)")],
    "groups are kept until their checkpoint is old": [
        (
            "trainer/forage_trainer/checkpoints/kept_groups.py",
            'if int(file.name.removeprefix("step_").partition(".")[0]) <= step:',
            "if True:",
        )
    ],
    "trained groups are ours until they are acknowledged": [
        (ARRIVALS, "self._known))", "()))"),
        (ARRIVALS, "if entry.id in self._known:", "if False:"),
    ],
    "only groups that were issued are accepted": [(ARRIVALS, "if self._is_issued(entry.message):", "if True:")],
    "lost groups are issued again": [
        (
            BATCHER,
            "self._feeder.issue_again(*place, attempt, refill_number(uid) if uid else 0)",
            "pass",
        )
    ],
    "two validations of one step have prompts of their own": [
        (CLIENT, "{stream.removeprefix(self._prefix)}:{batch}", "{stream.removeprefix(self._prefix)[:10]}:{batch}")
    ],
    "an acknowledgement is repeated": [
        ("trainer/forage_trainer/checkpoints/pending.py", "[*self._acknowledged, *durable]", "durable")
    ],
}


def copy_packages(folder: Path, edits: list[Edit]) -> str:
    """Copy the packages with the edits; returns the import path."""
    for part in ("common", "trainer"):
        shutil.copytree(REPOSITORY / f"services/{part}/forage_{part}", folder / part / f"forage_{part}")
    for name, old, new in edits:
        text = (folder / name).read_text()
        if old not in text:
            sys.exit(f"{name} has no '{old}' any more: change RULES in {Path(__file__).name}")
        (folder / name).write_text(text.replace(old, new))
    return os.pathsep.join(str(folder / part) for part in ("common", "trainer"))


def is_noticed(edits: list[Edit]) -> bool:
    """Whether the walks fail, or do not end, with the rule broken."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": copy_packages(Path(folder), edits), "FORAGE_WALKS": str(WALKS)}
        command = [".venvs/trainer/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
        try:
            run = subprocess.run(
                command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return True
    return run.returncode == 1


def main(prefixes: list[str]) -> int:
    """Break the rules one by one."""
    noticed = {}
    for name, edits in RULES.items():
        if not prefixes or name.startswith(tuple(prefixes)):
            noticed[name] = is_noticed(edits)
            print(f"{'noticed' if noticed[name] else 'NOT NOTICED':12} {name}", flush=True)
    print(json.dumps({"rules": len(noticed), "noticed": sum(noticed.values())}))
    return 0 if all(noticed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
