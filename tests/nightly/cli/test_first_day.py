"""The first day of three users who have a wheel and an empty folder: each command does what its page says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from demo import REPOSITORY
from waiting import WAIT_S

RUN_S = 1500.0
POLL_S = 0.5
MY_REWARD = """\
from forage_reward.parsing.answers import extract_solution
from forage_runtime.text.answers import em_check


def score(view, truth, params):
    answer = extract_solution(view)
    return {"right": float(answer is not None and em_check(answer, truth.targets)), "searches": 0.1 * len(view.turns)}
"""
MY_QUESTIONS = """\
import json

import pyarrow as pa
import pyarrow.parquet as pq

from forage_runtime.text.search_prompt import format_search_prompt

places = [("Mongolia", "Ulaanbaatar"), ("Norway", "Oslo"), ("Peru", "Lima"), ("Chad", "N'Djamena")]
rows = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": format_search_prompt(f"What is the capital of {country}?")}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [capital]}},
        "extra_info": {"split": "train", "index": index, "question": f"What is the capital of {country}?"},
    }
    for index, (country, capital) in enumerate(places)
]
pq.write_table(pa.Table.from_pylist(rows), "mine.parquet")
with open("corpus.jsonl", "w", encoding="utf-8") as file:
    for country, capital in places:
        passage = f'"{country}"\\nThe capital of {country} is {capital}.'
        file.write(json.dumps({"id": country, "contents": passage}) + "\\n")
"""
MY_SETTINGS = """\
data:
  train_files: [mine.parquet]
  val_files: [mine.parquet]
  corpus: corpus.jsonl
  train_batch_size: 4
retriever: {mode: bm25, topk: 2, threads: 1}
reward:
  routes: {mine: {name: mine}}
  user: {mine: {function: "reward.py:score"}}
rollout:
  n: 4
  max_start_length: 256
  max_response_length: 48
  max_obs_length: 128
  max_prompt_length: 448
  engine: {max_num_seqs: 32, max_model_len: 512}
trainer:
  total_training_steps: 2
  actor: {ppo_mini_batch_size: 4, optim: {lr: 1.5e-4}}
"""


class Day:
    """An empty folder with the command of a wheel, whose environments are shared by all users."""

    def __init__(self, folder: Path, command: Path, environment: dict[str, str], base_port: int) -> None:
        self.folder, self.command, self.environment = folder, command, environment
        self.port = ["--base-port", str(base_port)]
        folder.mkdir()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.command, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            stdin=subprocess.DEVNULL,
        )

    def forage(self, *arguments: str, code: int = 0) -> str:
        done = self.run(*arguments)
        assert done.returncode == code, f"forage {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The command of a wheel in an environment of its own."""
    folder = tmp_path_factory.mktemp("installed")
    uv = REPOSITORY / ".venvs/uv/bin/uv"
    built = subprocess.run(
        [sys.executable, REPOSITORY / "scripts/wheel.py", "--out", folder], check=True, capture_output=True, text=True
    )
    subprocess.run([uv, "venv", "--quiet", "--python", "3.11", folder / "venv"], check=True)
    wheel = built.stdout.strip().splitlines()[-1]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", folder / "venv/bin/python", wheel], check=True)
    environment = {**os.environ, "FORAGE_HOME": str(folder / "home"), "COLUMNS": "200"}
    return folder / "venv/bin/forage", environment


@pytest.fixture
def day(installed: tuple[Path, dict[str, str]], tmp_path: Path, free_base_port: Callable[[], int]) -> Day:
    return Day(tmp_path / "empty", *installed, free_base_port())


@pytest.mark.timeout(4000)
def test_a_researcher_trains_with_her_own_questions_corpus_and_reward(day: Day) -> None:
    python = day.command.parent / "python"
    (day.folder / "make_questions.py").write_text(MY_QUESTIONS, encoding="utf-8")
    subprocess.run([python, "make_questions.py"], cwd=day.folder, check=True)
    (day.folder / "reward.py").write_text(MY_REWARD, encoding="utf-8")
    (day.folder / "my.yaml").write_text(MY_SETTINGS.replace("mine.parquet]", "mine.parquot]", 1), encoding="utf-8")
    refused = day.forage("config", "check", "-c", "my.yaml", code=2)
    assert "mine.parquot" in refused
    (day.folder / "my.yaml").write_text(MY_SETTINGS, encoding="utf-8")
    day.forage("config", "check", "-c", "my.yaml")
    assert "4 (100.0%)" in day.forage("data", "coverage", "-c", "my.yaml")
    trained = day.forage("train", "-c", "my.yaml", "run.id=first", "--no-console", *day.port)
    assert "lost 0, twice 0" in trained
    assert "first" in day.forage("runs", "list")
    day.forage("runs", "show", "first")
    day.forage("trajectories")
    shown = day.forage("eval", "mine.parquet", "--policy", "mine=runs/first@latest", "--card", "card.json", *day.port)
    assert "card.json" in shown
    assert "the same answers" in day.forage("eval", "--verify", "card.json", *day.port)
    day.forage("trainer", "export", "runs/latest", "my-model")
    assert "every tensor of the model is there" in day.forage("model", "check", "my-model")
    again = day.forage("train", "-c", "my.yaml", "run.id=first", "--no-console", *day.port, code=2)
    assert "--resume" in again


@pytest.mark.timeout(4000)
def test_an_operator_looks_starts_asks_and_stops(day: Day) -> None:
    assert "redis server" in day.forage("doctor", *day.port)
    day.forage("status", *day.port, code=1)
    command = [day.command, "up", "--no-console", *day.port]
    log = day.folder / "up.log"
    with log.open("wb") as output:
        services = subprocess.Popen(command, cwd=day.folder, env=day.environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + RUN_S
        while day.run("status", *day.port).returncode:
            assert services.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        answered = day.forage("ask", "What is the capital of Mongolia?", *day.port)
        assert "<think>" in answered
        assert "ray_started" in day.forage("logs", "rollout")
    finally:
        services.send_signal(signal.SIGINT)
        code = services.wait(WAIT_S)
    assert code == 0
    day.forage("status", *day.port, code=1)


@pytest.mark.timeout(4000)
def test_a_visitor_trains_the_tiny_policy_and_reads_what_it_learned(day: Day) -> None:
    day.forage("demo", "--no-console", "trainer.total_training_steps=4", "data.val_max_samples=32", *day.port)
    run = (day.folder / "runs/latest").resolve()
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["groups_lost"], summary["groups_duplicated"]) == (0, 0)
    assert (run / "report.html").stat().st_size > 0
    assert (day.folder / "data/world/train.parquet").is_file(), "it is made where the command is run"
    assert "accepted:" in day.forage("trajectories")
    assert run.name in day.forage("runs", "list")
    day.forage("runs", "rm", run.name, "--yes")
    assert not run.exists()
