"""The plan's arithmetic: known models, memory that grows where it must, remedies that do fit, and a stable report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from forage_cli.main import app
from forage_cli.planning.assumptions import GIB, Assumptions
from forage_cli.planning.changes import apply_changes
from forage_cli.planning.gpus import KINDS, get_gpu, recognize_gpu
from forage_cli.planning.plan import Plan, PlanRequest, make_plan
from forage_cli.planning.remedies import find_remedies
from forage_cli.planning.report import describe_plan
from forage_cli.planning.shapes import KNOWN, Shape, read_shape
from forage_cli.planning.split import Split, apply_split, divide, find_faster_split
from forage_cli.planning.trainer_memory import (
    HEAD_PASS,
    LAYER_PASS,
    STEP,
    describe_training,
    list_moments,
    list_resident,
)
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings

REPOSITORY = Path(__file__).parents[3]
H100 = KINDS["H100"]


def plan(shape: str = "Qwen2.5-3B", gpu: str = "H100", **changes: object) -> Plan:
    return make_plan(build(**changes), PlanRequest(KNOWN[shape], get_gpu(gpu)))


def build(**changes: object) -> Settings:
    """Settings with changes by dotted names whose dots are two underscores."""
    return apply_changes(Settings(), {name.replace("__", "."): value for name, value in changes.items()})


def test_memory_of_a_full_update_is_sixteen_bytes_a_parameter_over_the_shards() -> None:
    memory = plan(trainer__n_gpus_per_node=4).trainer
    sizes = {part.name: part.size for part in memory.parts}
    state = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
    assert state == pytest.approx(16 * KNOWN["Qwen2.5-3B"].parameters / 4, rel=1e-6)
    assert memory.total == sum(sizes.values())


FAKE = json.loads((REPOSITORY / "tests" / "data" / "cli" / "update_memory.json").read_text())["bytes"]


@pytest.mark.parametrize("measured", FAKE, ids=lambda row: f"{row['model']}, {row['processes']} GPUs")
def test_memory_of_an_update_is_what_pytorch_tracks_over_fake_tensors(measured: dict[str, Any]) -> None:
    shape = KNOWN[measured["model"]]
    tokens = {"trainer__actor__ppo_max_token_len_per_gpu": measured["tokens"]}
    alone = {"trainer__n_gpus_per_node": measured["processes"], "trainer__actor__use_kl_loss": False}
    training = describe_training(build(**alone, **tokens), shape)
    resident = {part.name: part.size for part in list_resident(training, shape)}
    for name in ("weights", "gradients", "optimizer"):
        assert resident[name] == pytest.approx(measured[name], rel=1e-3), name
    held = sum(resident.values())
    totals = {name: held + sum(part.size for part in parts) for name, parts in list_moments(training, shape).items()}
    assert totals[STEP] == pytest.approx(measured["step"], rel=0.01)
    assert max(totals[HEAD_PASS], totals[LAYER_PASS]) == pytest.approx(measured["backward"], rel=0.05)


def test_the_kv_cache_is_what_the_budget_leaves() -> None:
    found = plan(rollout__engine__gpu_memory_utilization=0.6)
    memory = found.rollout.memory
    outside = next(part.size for part in memory.parts if part.name == "CUDA")
    assert memory.total - outside == pytest.approx(0.6 * KINDS["H100"].memory, rel=1e-6)
    # 36 layers, 2 heads of 128 numbers for keys and values, 2 bytes each.
    assert KNOWN["Qwen2.5-3B"].count_kv_bytes() == 36 * 2 * 2 * 128 * 2
    cache = next(part.size for part in memory.parts if part.name == "KV cache")
    assert found.rollout.kv_tokens == cache // KNOWN["Qwen2.5-3B"].count_kv_bytes()


def test_operations_of_a_token_are_those_of_its_matrices_and_of_attention() -> None:
    shape = KNOWN["Qwen2.5-7B"]
    matrices = shape.parameters - shape.head_parameters - shape.hidden  # an embedding is looked up
    assert shape.count_flops(0) == 2 * matrices
    assert shape.count_flops(4096) - shape.count_flops(0) == 2 * 28 * 3584 * 4096


FEW = hypothesis.settings(max_examples=40)
SHAPES = st.sampled_from(list(KNOWN.values()))
PARTS = st.fixed_dictionaries(
    {
        "trainer.n_gpus_per_node": st.integers(1, 16),
        "trainer.actor.ppo_max_token_len_per_gpu": st.integers(1024, 65536),
        "trainer.engine.enable_gradient_checkpointing": st.sampled_from([None, True, False]),
        "trainer.engine.args": st.sampled_from([{}, {"offload_policy": True}]),
        "trainer.lora.lora_rank": st.sampled_from([0, 8, 64]),
        "trainer.algorithm.adv_estimator": st.sampled_from(["grpo", "gae"]),
        "rollout.engine.tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "rollout.engine.max_num_seqs": st.integers(1, 1024),
        "rollout.engine.max_model_len": st.integers(512, 32768),
        "rollout.engine.gpu_memory_utilization": st.floats(0.1, 0.95),
        "trainer.max_staleness": st.integers(0, 2),
    }
)


@FEW
@given(SHAPES, PARTS, st.sampled_from(list(KINDS)))
def test_more_of_everything_never_needs_less(shape: Shape, values: dict[str, object], gpu: str) -> None:
    """More GPUs never raise the memory of one; longer, larger and more never lower it."""
    request = PlanRequest(shape, KINDS[gpu])
    settings = apply_changes(Settings(), values)
    before = make_plan(settings, request)

    def change(**more: object) -> Plan:
        return make_plan(apply_changes(settings, {name.replace("__", "."): v for name, v in more.items()}), request)

    trainer, rollout = settings.trainer, settings.rollout
    assert change(trainer__n_gpus_per_node=2 * trainer.n_gpus_per_node).trainer.total <= before.trainer.total
    longer = change(trainer__actor__ppo_max_token_len_per_gpu=2 * trainer.actor.ppo_max_token_len_per_gpu)
    assert longer.trainer.total >= before.trainer.total
    assert change(trainer__engine__enable_gradient_checkpointing=True).trainer.total <= before.trainer.total
    assert change(trainer__engine__args={"offload_policy": True}).trainer.total <= before.trainer.total
    doubled = change(rollout__engine__max_num_seqs=2 * rollout.engine.max_num_seqs)
    assert doubled.rollout.kv_tokens <= before.rollout.kv_tokens
    assert change(rollout__engine__tensor_parallel_size=8).rollout.kv_tokens >= before.rollout.kv_tokens
    assert change(rollout__max_response_length=2 * rollout.max_response_length).step.total >= before.step.total
    assert change(rollout__n=2 * rollout.n).step.total >= before.step.total
    assert change(trainer__n_gpus_per_node=2 * trainer.n_gpus_per_node).step.training <= before.step.training


@FEW
@given(SHAPES, PARTS, st.sampled_from(list(KINDS)))
def test_every_figure_has_its_unit(shape: Shape, values: dict[str, object], gpu: str) -> None:
    found = make_plan(apply_changes(Settings(), values), PlanRequest(shape, KINDS[gpu]))
    step = found.step
    assert 0 <= step.rollout_idle < 1
    assert 0 <= step.trainer_idle < 1
    parts = (*found.trainer.parts, *found.rollout.memory.parts, *found.hosts)
    assert all(isinstance(part.size, int) and part.size >= 0 for part in parts)
    assert found.rollout.concurrency <= found.rollout.max_num_seqs
    if step.is_overlapped:
        assert step.total == max(step.sampling, step.updating)
    else:
        assert step.total == pytest.approx(step.sampling + step.updating)
    faster = make_plan(
        apply_changes(Settings(), values),
        PlanRequest(shape, replace(KINDS[gpu], flops=2 * KINDS[gpu].flops, bandwidth=2 * KINDS[gpu].bandwidth)),
    )
    assert faster.step.total <= step.total


@FEW
@given(SHAPES, PARTS, st.sampled_from(["H100", "A100-40GB", "RTX-4090", "L4"]))
def test_what_is_said_to_fit_does(shape: Shape, values: dict[str, object], gpu: str) -> None:
    settings, request = apply_changes(Settings(), values), PlanRequest(shape, KINDS[gpu])
    for remedy in find_remedies(settings, request):
        assert make_plan(apply_changes(settings, remedy.changes), request).fits, str(remedy)


def test_a_full_update_of_7b_on_one_24_gb_card_does_not_fit_and_the_sentence_says_why() -> None:
    settings = build()
    request = PlanRequest(KNOWN["Qwen2.5-7B"], get_gpu("rtx-4090"))
    found = make_plan(settings, request)
    (problem,) = found.problems
    assert problem.startswith("a GPU of the trainer needs ")
    assert "RTX-4090 has 24.0 GiB" in problem
    remedies = [str(remedy) for remedy in find_remedies(settings, request)]
    assert "trainer.engine.args.offload_policy=true" in remedies
    assert any(remedy.startswith("trainer.n_gpus_per_node=") for remedy in remedies)


def test_an_engine_without_room_for_its_weights_is_sharded() -> None:
    settings = build(trainer__n_gpus_per_node=8, trainer__lora__lora_rank=16)
    request = PlanRequest(KNOWN["Qwen2.5-32B"], get_gpu("A100-40GB"))
    assert make_plan(settings, request).problems[-1].startswith("a GPU of the rollout needs ")
    assert any("rollout.engine.tensor_parallel_size=" in str(remedy) for remedy in find_remedies(settings, request))


def test_gpus_are_halved_and_a_faster_split_is_found() -> None:
    settings = build(trainer__max_staleness=1)
    split = divide(settings, 8)
    assert (split.rollout, split.trainer) == (4, 4)
    assert divide(build(rollout__engine__tensor_parallel_size=2), 7).rollout == 2
    with pytest.raises(UserError, match=r"1 GPU\(s\) are too few .*trainer.placement=colocated"):
        divide(settings, 1)
    request = PlanRequest(KNOWN["Qwen2.5-3B"], get_gpu("H100"))
    divided = apply_split(settings, split)
    now = make_plan(divided, request)
    faster = find_faster_split(divided, request, now)
    assert faster is not None
    assert faster[0].rollout + faster[0].trainer == 8
    assert faster[1].step.total < now.step.total
    assert find_faster_split(apply_split(settings, faster[0]), request, faster[1]) is None


def test_the_pool_that_is_waited_for_is_the_one_to_grow() -> None:
    """One slow engine against eight GPUs of the trainer, and the other way round."""
    settings = build(trainer__max_staleness=1, trainer__n_gpus_per_node=8, rollout__max_response_length=512)
    slow = PlanRequest(KNOWN["Qwen2.5-3B"], replace(get_gpu("H100"), bandwidth=1e11))
    starved = make_plan(settings, slow)
    assert starved.step.trainer_idle > starved.step.rollout_idle == 0
    assert "more GPUs help most in the rollout" in "\n".join(describe_plan(starved, [], None))
    fed = make_plan(apply_split(settings, Split(8, 1)), replace(slow, gpu=get_gpu("H100")))
    assert fed.step.rollout_idle > fed.step.trainer_idle == 0
    assert "more GPUs help most in the trainer" in "\n".join(describe_plan(fed, [], None))


@pytest.mark.parametrize(
    ("product", "mib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 40960, "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
        ("NVIDIA RTX A6000", 49140, "A6000"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("NVIDIA L4", 23034, "L4"),
        ("NVIDIA H200", 143771, "H200"),
        ("Tesla V100-SXM2-16GB", 16384, None),
    ],
)
def test_products_are_recognized_and_their_own_memory_counts(product: str, mib: int, kind: str | None) -> None:
    found = recognize_gpu(product, mib)
    assert (found and found.name) == kind
    if found is not None:
        assert found.memory == mib * 2**20


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match="--gpu TPU is not known: choose one of B200, H200, H100"):
        get_gpu("TPU")


RECIPE = str(REPOSITORY / "configs" / "search_r1_nq_hotpotqa_grpo_3b.yaml")


def test_the_command_prints_the_same_plan_as_text_and_as_json() -> None:
    options = ["plan", "-c", RECIPE, "--gpu", "H100", "--gpus", "8", "--mfu", "0.3", "--passages", "21015324"]
    text = CliRunner().invoke(app, options)
    assert text.exit_code == 0, text.output
    for words in ("on 8 × H100", "It fits.", "--mfu 0.3 of 989 TFLOP/s", "21015324 vectors as IVF16384,SQ8"):
        assert words in text.output
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert set(found) == {
        "format",
        "model",
        "gpu",
        "placement",
        "fits",
        "problems",
        "remedies",
        "trainer",
        "rollout",
        "hosts",
        "step_s",
        "retrieval",
        "rollout_idle",
        "trainer_idle",
        "faster_split",
        "assumptions",
    }
    assert found["format"] == 1
    assert found["fits"] is True
    assert set(found["trainer"]) == {"gpus", "moment", "total_gib", "limit_gib", "fits", "parts"}
    assert set(found["step_s"]) == {
        "prefill",
        "decode",
        "tail",
        "scoring",
        "training",
        "publishing",
        "moving",
        "total",
    }
    assert found["trainer"]["total_gib"] == pytest.approx(
        sum(part["gib"] for part in found["trainer"]["parts"]), abs=0.1
    )
    assert f"{found['step_s']['total']:.0f} s for 2560 trajectories" in text.output


@pytest.mark.parametrize(
    ("recipe", "gpu", "gpus"),
    [
        ("qwen2.5_3b_lora_24gb", "RTX-4090", 1),
        ("qwen2.5_3b_lora_24gb", "RTX-3090", 1),
        ("nq_hotpotqa_grpo_7b_8x80gb", "H100", 8),
        ("nq_hotpotqa_grpo_7b_8x80gb", "A100-80GB", 8),
        *((f"search_r1_nq_hotpotqa_{kind}", "H100", 8) for kind in ("grpo_3b", "grpo_7b", "ppo_3b", "ppo_7b")),
    ],
)
def test_recipes_for_gpus_fit_the_gpus_that_they_name(recipe: str, gpu: str, gpus: int) -> None:
    settings = load_settings(REPOSITORY / "configs" / f"{recipe}.yaml", environ={})
    split = apply_split(settings, divide(settings, gpus))
    made = make_plan(split, PlanRequest(read_shape(settings.model.path), get_gpu(gpu)))
    assert made.problems == ()
    assert made.gpus == gpus


def test_a_reference_is_on_the_gpus_or_read_from_the_host_and_lora_has_none() -> None:
    settings = {"trainer__n_gpus_per_node": 4, "trainer__actor__use_kl_loss": True}
    held, streamed = plan(**settings), plan(**settings, trainer__ref__param_offload=True)
    sizes = {part.name: part.size for part in held.trainer.parts}
    assert sizes["reference"] == 2 * KNOWN["Qwen2.5-3B"].parameters // 4
    assert "reference" not in {part.name for part in streamed.trainer.parts}
    assert streamed.step.scoring > held.step.scoring
    lora = plan(**settings, trainer__lora__lora_rank=8)
    assert "reference" not in {part.name for part in lora.trainer.parts}
    tight = replace(held.request, gpu=replace(H100, memory=int(1.01 * streamed.trainer.total)))
    remedies = find_remedies(build(**settings, rollout__engine__gpu_memory_utilization=0.5), tight)
    assert "trainer.ref.param_offload=true" in [str(remedy) for remedy in remedies]


def test_gradients_whose_reduction_is_deferred_are_whole_on_every_gpu() -> None:
    deferred = {"use_no_sync_for_gradient_accumulation": True}
    settings = build(trainer__n_gpus_per_node=4, trainer__engine__args=deferred)
    found = make_plan(settings, PlanRequest(KNOWN["Qwen2.5-7B"], replace(H100, memory=60 * GIB)))
    sizes = {part.name: part.size for part in found.trainer.parts}
    assert sizes["deferred gradients"] == 4 * KNOWN["Qwen2.5-7B"].parameters
    assert not found.fits
    first = find_remedies(settings, found.request)[0]
    assert "use_no_sync_for_gradient_accumulation=false" in str(first)


def test_the_recipe_without_a_reference_has_none_to_compute() -> None:
    names = ("nq_hotpotqa_grpo_7b_8x80gb", "search_r1_nq_hotpotqa_grpo_7b")
    plans = [
        make_plan(
            load_settings(REPOSITORY / "configs" / f"{name}.yaml", environ={}), PlanRequest(KNOWN["Qwen2.5-7B"], H100)
        )
        for name in names
    ]
    assert plans[0].step.scoring < plans[1].step.scoring


def test_shared_gpus_are_planned_whole_for_each_side_in_turns() -> None:
    shared = plan(trainer__placement="colocated", trainer__max_staleness=0)
    alone = plan(trainer__max_staleness=0)
    assert (shared.gpus, alone.gpus) == (1, 2)
    names = [part.name for part in shared.trainer.parts], [part.name for part in shared.rollout.memory.parts]
    assert "sleeping engine" in names[0]
    assert "idle trainer" in names[1]
    assert shared.step.moving > 0 == alone.step.moving
    assert {part.name for part in shared.hosts} >= {"offloaded", "sleeping engines"}


def test_the_host_holds_what_is_not_on_the_gpus() -> None:
    """12 bytes of a trained parameter, 16 where AdamW computes on the host, 4 of one that is not trained."""
    parameters = KNOWN["Qwen2.5-3B"].parameters
    adapter = KNOWN["Qwen2.5-3B"].count_adapter_parameters(16)
    value = parameters - 2 * 2048 + 3 * 2048  # the norm, a head of one output

    def held(**changes: object) -> dict[str, int]:
        settings = {"trainer__n_gpus_per_node": 4, "trainer__actor__use_kl_loss": False} | changes
        return {part.name: part.size for part in plan(**settings).hosts}  # type: ignore[arg-type]

    assert "offloaded" not in held()
    exact = pytest.approx
    shared = {"trainer__placement": "colocated", "trainer__max_staleness": 0}
    assert held(**shared)["offloaded"] == exact(12 * parameters, rel=1e-6)
    lora = held(**shared, trainer__lora__lora_rank=16)["offloaded"]
    assert lora == exact(4 * parameters + 12 * adapter, rel=1e-6)
    ppo = {"trainer__algorithm__adv_estimator": "gae"}
    assert held(**shared, **ppo)["offloaded"] == exact(12 * (parameters + value), rel=1e-5)
    both = held(**shared, **ppo, trainer__lora__lora_rank=16)["offloaded"]
    assert both == exact(4 * parameters + 12 * (adapter + value), rel=1e-5), "the critic has no adapter"
    assert held(trainer__engine__args={"offload_policy": True})["offloaded"] == exact(16 * parameters, rel=1e-6)
    twice = held(trainer__engine__args={"offload_policy": True, "fsdp_size": 2})
    assert twice["offloaded"] == exact(2 * 16 * parameters, rel=1e-6), "each pair of processes has a copy"
    reference = held(trainer__actor__use_kl_loss=True, trainer__ref__param_offload=True)
    assert reference["reference"] == exact(2 * parameters, rel=1e-6)


def test_a_plan_that_does_not_fit_has_exit_code_1_and_says_what_would(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "-c", RECIPE, "--gpu", "RTX-4090", "--gpus", "2"])
    assert done.exit_code == 1
    assert "Does not fit: a GPU of the trainer needs" in done.output
    assert "would fit with trainer." in done.output
    host = CliRunner().invoke(
        app, ["plan", "-c", RECIPE, "--gpu", "H100", "--passages", "21015324", "--host-gib", "24"]
    )
    assert "of the machine's memory, and it has 24.0 GiB" in host.output
    remote = CliRunner().invoke(app, ["plan", "-c", RECIPE, "rollout.engine.endpoint=http://127.0.0.1:1/v1"])
    assert isinstance(remote.exception, UserError)


@pytest.mark.parametrize(
    ("model", "size", "divides"),
    [
        ("Qwen2.5-3B", 4, True),
        ("Qwen2.5-7B", 4, True),
        ("Qwen2.5-7B", 7, False),
        ("Qwen2.5-7B", 8, False),
        ("Qwen2.5-0.5B", 4, False),
        ("Qwen2.5-14B", 5, False),
        ("Llama-3-8B", 16, True),
    ],
)
def test_engines_have_a_number_of_gpus_that_vllm_can_divide_the_model_over(
    model: str, size: int, divides: bool
) -> None:
    """vLLM divides heads and MLP, and divides or repeats heads of keys; nothing else."""
    settings, request = build(rollout__engine__tensor_parallel_size=size), PlanRequest(KNOWN[model], H100)
    problems = [one for one in make_plan(settings, request).problems if "vLLM ends" in one]
    assert bool(problems) == (not divides)
    if problems:
        assert f"tensor_parallel_size={size} does not divide" in problems[0]
        assert find_remedies(settings, request)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["local.gpus={rollout: [0], trainer: [1]}", "rollout.engine.tensor_parallel_size=4"],
            "1 GPU(s) for the rollout are no multiple of 4",
        ),
        (["rollout.engine.args={max_num_batched_tokens: 8k}"], "max_num_batched_tokens is '8k'"),
        (
            ["trainer.n_gpus_per_node=8", "trainer.engine.args.fsdp_size=3"],
            "fsdp_size=3 does not divide the 8 processes",
        ),
        (["retriever.index={folder}"], "manifest.json is not that of an index"),
        (["model.path={folder}"], "hidden is -1"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(overrides: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    shape = dict.fromkeys(("num_attention_heads", "intermediate_size", "num_hidden_layers", "vocab_size"), 1)
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(shape | llama))
    named = [one.replace("{folder}", str(tmp_path)) for one in overrides]
    ended = CliRunner().invoke(app, ["plan", "model.path=models/Qwen2.5-3B", *named])
    assert isinstance(ended.exception, UserError)
    assert words in str(ended.exception)


def test_groups_that_redis_cannot_hold_are_saved_more_often() -> None:
    settings = build(trainer__save_freq=64, rollout__n=64, data__train_batch_size=2048, trainer__n_gpus_per_node=4)
    request = PlanRequest(KNOWN["Qwen2.5-3B"], H100, host=60 * GIB)
    assert "of the machine's memory" in make_plan(settings, request).problems[-1]
    (remedy,) = find_remedies(settings, request)
    assert str(remedy).startswith("trainer.save_freq=")


def test_lists_of_local_gpus_are_what_is_planned() -> None:
    options = ["plan", "-c", RECIPE, "local.gpus.rollout=[0,1]", "local.gpus.trainer=[2,3,4,5,6,7]", "--json"]
    found = json.loads(CliRunner().invoke(app, options).output)
    assert (found["rollout"]["gpus"], found["trainer"]["gpus"]) == (2, 6)


def test_memory_of_the_machine_is_that_of_the_index_where_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        json.dumps({"passages": 7, "files": {"a": {"bytes": 5}, "b": {"bytes": 6}}})
    )
    settings = load_settings(None, [f"retriever.index={tmp_path}"], {})
    hosts = make_plan(settings, PlanRequest(KNOWN["Qwen2.5-0.5B"], KINDS["H100"])).hosts
    assert next((part.name, part.size) for part in hosts) == ("retriever", 11)


def test_assumptions_are_in_plain_units() -> None:
    assumed = Assumptions()
    assert assumed.context + assumed.workspaces == 1.5 * GIB
    assert 0 < assumed.mfu < assumed.prefill_mfu < assumed.bandwidth_use < 1
