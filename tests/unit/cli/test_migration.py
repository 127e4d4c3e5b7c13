"""`forage config from-verl`: what scripts and YAML files of verl and Search-R1 become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forage_command import RunForage, run_forage
from pages import read_blocks

from forage_cli.migration.translate import translate
from forage_cli.migration.verl_file import read_verl_file
from forage_records.questions import read_questions
from forage_runtime.errors import DataError, SettingsError
from forage_runtime.settings import Settings, load_settings

SEARCH_R1 = """\
export DATA_DIR='data/nq'
export EXPERIMENT_NAME=nq-grpo.v1
# it's a comment with a quotation mark
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=$DATA_DIR/train.parquet \\
    data.val_files=${DATA_DIR}/test.parquet \\
    data.train_batch_size=512 data.max_prompt_length=4096 data.max_response_length=500 \\
    # data.max_start_length=7 \\
    data.max_start_length=2048 data.max_obs_length=500 \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=models/Qwen2.5-3B \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \\
    actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=64 actor_rollout_ref.actor.state_masking=true \\
    actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.n_agent=5 \\
    trainer.logger=['wandb'] trainer.n_gpus_per_node=8 trainer.total_training_steps=1005 \\
    trainer.experiment_name=$EXPERIMENT_NAME trainer.default_hdfs_dir=null \\
    max_turns=2 retriever.url="http://127.0.0.1:8000/retrieve" retriever.topk=3 \\
    2>&1 | tee $EXPERIMENT_NAME.log
"""
VERL = """\
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=(
    data.train_files="['a.parquet','b.parquet']"
    data.max_prompt_length=1024
)
python -m verl.trainer.main_ppo data.train_batch_size=4
python3 -m verl.trainer.main_ppo "${DATA[@]}" actor_rollout_ref.model.path=$MODEL \\
    algorithm.adv_estimator=grpo data.train_batch_size=96 +actor_rollout_ref.rollout.n=8 \\
    data.return_raw_chat=True data.max_response_length="4096" actor_rollout_ref.actor.policy_loss.loss_mode=geo-mean \\
    actor_rollout_ref.actor.policy_loss.dro_beta=0.1 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    trainer.project_name="$PROJECT" trainer.logger='["console","swanlab","clearml"]' my.own=1
"""
YAML = """\
defaults: [_self_]
data: {max_prompt_length: 512, train_batch_size: 64}
actor_rollout_ref:
  actor: {optim: {lr: 2e-6}, ppo_mini_batch_size: "${data.train_batch_size}", grad_clip: "${nowhere.said}"}
critic: {optim: {lr: "${oc.select:critic.lr,3e-5}"}, ppo_mini_batch_size: 32}
"""
GUIDE = Path(__file__).parents[3] / "docs/guide"
__all__ = ["run_forage"]
Translate = Callable[[str, str], tuple[Settings, str]]


@pytest.fixture
def translated(tmp_path: Path) -> Translate:
    def run(name: str, content: str) -> tuple[Settings, str]:
        (tmp_path / name).write_text(content)
        text = translate(read_verl_file(tmp_path / name), name)
        (tmp_path / "ours.yaml").write_text(text)
        return load_settings(tmp_path / "ours.yaml", environ={}), text

    return run


def test_a_script_of_search_r1_keeps_its_meaning(translated: Translate) -> None:
    ours, text = translated("train_grpo.sh", SEARCH_R1)
    published = load_settings(Path(__file__).parents[3] / "configs/search_r1_nq_hotpotqa_grpo_3b.yaml", environ={})
    assert ours.trainer.algorithm == published.trainer.algorithm
    assert ours.trainer.actor == published.trainer.actor
    for name in ("n", "max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"):
        assert getattr(ours.rollout, name) == getattr(published.rollout, name), name
    assert ours.rollout.engine.max_model_len == published.rollout.engine.max_model_len
    assert [str(file) for file in ours.data.train_paths] == ["data/nq/train.parquet"]
    assert (ours.run.id, ours.rollout.max_turns, ours.retriever.http_address) == ("nq-grpo-v1", 2, "127.0.0.1:8000")
    assert "# - actor_rollout_ref.actor.ppo_mini_batch_size=256: 64 prompts here" in text
    assert "# - actor_rollout_ref.actor.ppo_micro_batch_size=64: micro-batches are cut by tokens" in text
    assert "default_hdfs_dir" not in text


def test_the_last_command_of_a_script_of_verl_is_taken_with_its_arrays_and_variables(translated: Translate) -> None:
    ours, text = translated("run.sh", VERL)
    assert str(ours.model.path) == "Qwen/Qwen3-8B"
    assert [str(file) for file in ours.data.train_paths] == ["a.parquet", "b.parquet"]
    assert (ours.data.train_batch_size, ours.rollout.n, ours.rollout.max_turns) == (96, 8, 0)
    assert (ours.rollout.max_start_length, ours.rollout.max_prompt_length) == (1024, 1024)
    assert ours.rollout.engine.max_model_len == 1024 + 4096
    assert ours.trainer.actor.policy_loss.loss_mode == "geo_mean"
    assert ours.trainer.actor.clip_ratio_high == ours.trainer.actor.clip_ratio == 0.2
    assert ours.trainer.actor.ppo_mini_batch_size == 96
    assert ours.trainer.logger == ("swanlab",)
    for left_out in (
        "trainer.project_name: it refers to $PROJECT",
        "clearml is no tracker here",
        "my.own: Forage has",
        "dro_beta=0.1: loss_mode geo_mean does not take it",
    ):
        assert left_out in text


def test_a_here_document_is_read_if_it_trains_and_named_if_not(translated: Translate) -> None:
    ours, text = translated(
        "submit.sh",
        """\
# a comment
source common.sh
cat > tools.yaml <<'EOF'
it's no shell data.train_batch_size=1
EOF
BATCH=96
sbatch <<-END
    # don't read this
    python3 -m verl.trainer.main_ppo --config-name=search_multiturn_grpo \\
        data.train_batch_size=$BATCH algorithm.adv_estimator=grpo
    END
""",
    )
    assert (ours.data.train_batch_size, ours.trainer.algorithm.adv_estimator) == (96, "grpo")
    assert text.partition("# Not read:\n")[2].partition("\ndata:")[0].splitlines() == [
        "# - line 2: source common.sh may set variables",
        "# - line 3: the here-document of 'cat' is no command that trains",
        "# - line 9: --config-name=search_multiturn_grpo names a file of keys: translate that file, too",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "MOST=$((1 << 20 ))",
        "cat <<EOF>tools.yaml\ndata.train_batch_size=1\nEOF",
        "echo train  # as cat << EOF",
    ],
)
def test_here_documents_are_told_from_shifts_and_comments(translated: Translate, line: str) -> None:
    command = "python3 -m verl.trainer.main_ppo data.train_batch_size=96"
    assert translated("run.sh", f"{line}\n{command}\n")[0].data.train_batch_size == 96


def test_references_of_a_yaml_file_are_resolved_where_it_says_what_they_are(translated: Translate) -> None:
    ours, text = translated("ppo.yaml", YAML)
    assert (ours.trainer.algorithm.adv_estimator, ours.trainer.actor.ppo_mini_batch_size) == ("gae", 64)
    assert (ours.trainer.actor.optim.lr, ours.trainer.critic.optim.lr) == (2e-6, 3e-5)
    assert "critic.ppo_mini_batch_size=32: as trainer.actor.ppo_mini_batch_size says for both models" in text
    assert "grad_clip: it refers to ${nowhere.said}, which the file does not say: give trainer.actor.optim" in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.sh", "echo 'hello", "a quotation has no end"),
        ("a.sh", "cat <<EOF\nit's\n", "a here-document has no end: EOF"),
        ("a.sh", "echo hello\n", "names no setting"),
        ("a.yaml", "- a\n", "must hold a mapping of sections, not a list"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "data: {train_batch_size: many}", "data.train_batch_size' is 'many'"),
        ("a.yaml", "actor_rollout_ref: {actor: {ppo_mini_batch_size: many}}", "ppo_mini_batch_size is 'many'"),
        ("a.yaml", "data: {max_response_length: {a: 1}}", "data.max_response_length.a"),
    ],
)
def test_what_cannot_be_translated_is_named(translated: Translate, name: str, content: str, words: str) -> None:
    if words.endswith(".a"):
        assert f"# - {words}: Forage has nothing of the kind" in translated(name, content)[1]
        return
    with pytest.raises((DataError, SettingsError)) as error:
        translated(name, content)
    assert words in str(error.value)


@pytest.mark.parametrize("page", sorted(GUIDE.glob("migrate-from-*.md")), ids=lambda page: page.stem)
def test_the_examples_of_the_pages_are_settings_and_programs(
    page: Path, translated: Translate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in read_blocks(page):
        if block.language == "yaml":
            (tmp_path / "my.yaml").write_text(block.text)
            load_settings(tmp_path / "my.yaml", environ={})
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), {})
        elif "main_ppo" in block.text:
            translated("train.sh", block.text)
    if page.stem.endswith("trl"):
        assert list(read_questions([tmp_path / "train.parquet"]).rows[0].ground_truth.targets) == ["72"]


def test_a_file_that_is_there_is_not_written_over(run_forage: RunForage, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SEARCH_R1)
    arguments = ["config", "from-verl", str(tmp_path / "train.sh")]
    printed = run_forage(*arguments).stdout
    assert run_forage(*arguments, "-o", str(tmp_path / "my.yaml")).code == 0
    assert (tmp_path / "my.yaml").read_text() == printed
    again = run_forage(*arguments, "-o", str(tmp_path / "my.yaml"))
    assert (again.code, "is there already" in again.stderr) == (2, True)
