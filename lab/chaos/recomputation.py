"""Log-probabilities of a run's trajectories, recomputed under the published policies that their tokens name.

A part of it runs in the environment of the trainer: `python -m chaos.recomputation RUN KEPT`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAVED_EVERY = 5
"""Interval of steps whose trajectories are written."""
TOLERANCE = 1e-4
"""Largest difference between two kernels that compute the same, some ten times what is seen."""
_BEHIND = (1, 2)
"""Versions that a saved step was sampled under, counted back from it."""
_LOOK_S = 0.1
_TRAJECTORIES = 8
"""At most so many of a step: equal samples of one group say nothing new."""
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Recomputation:
    """What was found.

    Attributes:
        tokens: that were recomputed; `policies` of them: different policies.
        stale: whose log-probability is not that of the policy which they name.
        largest: difference of any other.
        told_apart: tokens that disagree with the version before or after theirs: only these could have been found.
    """

    tokens: int = 0
    policies: int = 0
    stale: int = 0
    largest: float = 0.0
    told_apart: int = 0


class Keeper:
    """Copies published policies of which a saved step has tokens, before the trainer deletes them."""

    def __init__(self, run: Path, kept: Path) -> None:
        self._policies, self.kept = run / "policies", kept
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        kept.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ending.wait(_LOOK_S):  # lint: short because it is the pause between two looks
            for folder in self._policies.glob("v*-e*"):
                version = int(folder.name[1:].partition("-")[0])
                if -version % SAVED_EVERY in _BEHIND and not (self.kept / folder.name).exists():
                    _copy_whole(folder, self.kept / folder.name)


def _copy_whole(folder: Path, target: Path) -> None:
    from forage_runtime.errors import ForageError
    from forage_weights.folders import describe_folder, make_whole

    try:
        if describe_folder(folder) is None:
            shutil.copytree(folder, partial := target.with_name(f".{target.name}"))
            partial.rename(target)
        else:
            make_whole(folder, target)
    except (ForageError, OSError):  # deleted or damaged meanwhile
        shutil.rmtree(target.with_name(f".{target.name}"), ignore_errors=True)


def recompute(repository: Path, run: Path, kept: Path) -> Recomputation:
    """Recompute a sample of the trajectories of a run.

    Raises:
        RuntimeError: it could not be done.
    """
    command = [str(repository / ".venvs/trainer/bin/python"), "-m", "chaos.recomputation", str(run), str(kept)]
    modules = f"{repository / 'lab'}:{repository / 'tests/support'}"
    environment = os.environ | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    if ended.returncode:
        raise RuntimeError(f"recomputation: {' '.join(ended.stderr.split())[-500:]}")
    return Recomputation(**json.loads(ended.stdout.splitlines()[-1]))


class _Policies:
    """The kept policies of a run that are what was announced."""

    def __init__(self, run: Path, kept: Path) -> None:
        from forage_weights.digests import verify_digest

        announced: dict[str, list[str]] = {}
        for file in (run / "history").glob("trainer-*.jsonl"):
            for row in read_lines(file):
                if row.get("op") == "publish":
                    announced[f"v{row['version']}-e{row['epoch']}"] = row["digests"]
        self._folders = {
            folder.name: folder
            for folder in kept.glob("v*-e*")
            if folder.name in announced and verify_digest(folder / "model.safetensors", announced[folder.name][0])
        }
        self._models: dict[str, Any] = {}

    def find(self, version: int, epoch: int) -> str:
        """The name of a policy; empty without it."""
        name = f"v{version}-e{epoch}"
        return name if name in self._folders else ""

    def score(self, name: str, tokens: list[int], count: int) -> list[float]:
        """The log-probabilities of the last `count` tokens."""
        import torch
        from transformers import AutoModelForCausalLM

        if name not in self._models:
            # As the engine computes.
            self._models[name] = AutoModelForCausalLM.from_pretrained(self._folders[name], dtype=torch.float32).eval()
        with torch.no_grad():
            logits = self._models[name](torch.tensor([tokens])).logits[0, -count - 1 : -1]
        rows = torch.log_softmax(logits, -1)
        return [float(value) for value in rows.gather(1, torch.tensor(tokens[-count:])[:, None])[:, 0]]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a history or a log, which may end in the middle of one."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:  # the process died in the middle of it
                continue


def main(run: Path, kept: Path) -> None:
    """Print the result as JSON."""
    import yaml

    from forage_records.step_file import list_saved_steps, read_step, step_file_path

    context = yaml.safe_load((run / "settings.yaml").read_text())["rollout"]["max_prompt_length"]
    policies, generator = _Policies(run, kept), random.Random(0)
    tokens = stale = told_apart = 0
    largest, used = 0.0, set[str]()
    for step in list_saved_steps(run):
        rows = list(read_step(step_file_path(run, step)))
        for row in generator.sample(rows, min(_TRAJECTORIES, len(rows))):
            for name, others, differences in _compare(row.trajectory, policies, context):
                used.add(name)
                tokens += len(differences)
                wrong = [one for one in differences if one > TOLERANCE]
                stale += len(wrong)
                largest = max([largest, *(one for one in differences if one <= TOLERANCE)])
                told_apart += sum(one > TOLERANCE for one in others)
    found = Recomputation(tokens, len(used), stale, largest, told_apart)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


def _compare(trajectory: Any, policies: _Policies, most_context: int) -> list[tuple[str, list[float], list[float]]]:
    """(policy, differences under a neighbour of it, differences under itself) of parts that one policy sampled."""
    found = []
    ids, start = list(trajectory.token_ids), trajectory.prompt_length
    turns: dict[int, list[int]] = defaultdict(list)
    for position, turn in enumerate(trajectory.turn_ids):
        if trajectory.loss_mask[position]:
            turns[turn].append(position)
    for segment in trajectory.segments:
        name = policies.find(segment.version, segment.epoch)
        neighbours = [policies.find(segment.version + step, segment.epoch) for step in (-1, 1)]
        for positions in turns.values():
            own = [position for position in positions if segment.begin <= position < segment.end]
            if not own or not name:
                continue
            begin, end = start + positions[0], start + own[-1] + 1
            known = ids[:begin][-most_context:] + ids[begin:end]
            sampled = [trajectory.logprobs[position] for position in own]

            def differ(policy: str, known: list[int] = known, sampled: list[float] = sampled) -> list[float]:
                scores = policies.score(policy, known, len(sampled))
                return [abs(one - other) for one, other in zip(scores, sampled, strict=True)]

            other = next(filter(None, neighbours), "")
            found.append((name, differ(other) if other else [], differ(name)))
    return found


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(Path(sys.argv[1]), Path(sys.argv[2]))
