"""Twenty steps of SmolLM2-135M or of --model: how a step's time splits, and what overlap (staleness 1) gains."""

from __future__ import annotations

from findings import Findings
from whole_runs import check_groups, find_model, run_training

from forage_cli.local.home import find_home

STEPS = {True: 20, False: 5}
"""With a GPU and without."""


def run(findings: Findings) -> None:
    """Train the same model with staleness 0 and 1."""
    model, name = find_model(findings)
    findings.measure(model=name)
    recipe, options = None, ["trainer.val_before_train=false", "trainer.test_freq=-1", f"model.path={model}"]
    if findings.has_gpu:
        recipe = find_home() / "configs/smollm2.yaml"
        options += ["data.train_batch_size=16", "rollout.n=8", "trainer.actor.ppo_mini_batch_size=16",
                    "rollout.max_groups_in_flight=32", "rollout.engine.max_num_seqs=128",
                    "trainer.actor.ppo_max_token_len_per_gpu=16384"]  # fmt: skip
    else:
        findings.leave_out("the tiny policy was trained on the CPU, for fewer steps")
    speeds = {}
    for staleness in (0, 1):
        label, steps = f"staleness_{staleness}", STEPS[findings.has_gpu]
        result = run_training(label, steps, f"trainer.max_staleness={staleness}", *options, recipe=recipe)
        check_groups(findings, label, result, steps)
        findings.measure(**{f"{label}_seconds": result.parts})
        speeds[staleness] = result.samples_per_s
    findings.measure(overlap_gain=speeds[1] / speeds[0])
