"""Configurations that others have published, in Forage's settings, and what was published about them.

Nothing here was measured by us. "runs" means: published as settings for this hardware; "out of memory": reported so by
its user. Rows of a published micro-batch are counted at their longest where nothing else is said, so "fits" is for
the worst case. Older versions of verl kept all logits, for which `use_fused_kernels=false` stands. Engines and trainer
share GPUs, and the trainer's state is in the host's memory while engines sample, that of the reference always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One configuration.

    Attributes:
        source: where it was published.
        settings: by dotted names.
        runs: whether it was published as one that runs; else it ran out of memory.
        step_s: shortest and longest time of a step that its users have told; None: nobody has.
    """

    name: str
    source: str
    model: str
    gpu: str
    gpus: int
    settings: dict[str, Any]
    runs: bool
    step_s: tuple[float, float] | None = None


_VERL = "github.com/volcengine/verl"


def _share(gpus: int, tensor_parallel: int, utilization: float) -> dict[str, Any]:
    """Engines and trainer on the same GPUs, with what is offloaded while engines sample."""
    engines = gpus // tensor_parallel
    return {
        "trainer.placement": "colocated",
        "trainer.max_staleness": 0,
        "trainer.n_gpus_per_node": gpus,
        "trainer.ref.param_offload": True,
        "rollout.engine_replicas.min": engines,
        "rollout.engine_replicas.max": engines,
        "rollout.engine.tensor_parallel_size": tensor_parallel,
        "rollout.engine.gpu_memory_utilization": utilization,
        "rollout.n": 5,
    }


def _gsm8k(prompt: int, response: int, batch: int, mini: int) -> dict[str, Any]:
    """Single-turn questions."""
    return {
        "data.train_batch_size": batch,
        "trainer.actor.ppo_mini_batch_size": mini,
        "rollout.max_turns": 0,
        "rollout.max_start_length": prompt,
        "rollout.max_prompt_length": prompt,
        "rollout.max_response_length": response,
        "rollout.engine.max_model_len": prompt + response,
    }


def _search(batch: int = 512, mini: int = 64) -> dict[str, Any]:
    return {
        "data.train_batch_size": batch,
        "trainer.actor.ppo_mini_batch_size": mini,
        "rollout.max_turns": 2,
        "rollout.max_start_length": 2048,
        "rollout.max_prompt_length": 4096,
        "rollout.max_response_length": 500,
        "rollout.max_obs_length": 500,
        "rollout.engine.max_model_len": 4608,
        "rollout.engine.max_num_seqs": 256,
    }


def _limit(tokens: int) -> dict[str, Any]:
    """Rows of a micro-batch, all of them as long as they may be, as tokens."""
    return {"trainer.actor.ppo_max_token_len_per_gpu": tokens}


_LORA = {"trainer.lora.lora_rank": 32, "rollout.engine.max_num_seqs": 512}
_WHOLE_LOGITS = {"trainer.engine.use_fused_kernels": False}

PUBLISHED = (
    Published(
        "Search-R1, Qwen2.5-3B, GRPO",
        "github.com/PeterGriffinJin/Search-R1, train_grpo.sh (2698d69): micro-batch 64, gpu_memory_utilization 0.6. "
        "200 steps take 2 to 3 hours by its author and 6 to 7 by another user (issue 1)",
        "Qwen2.5-3B",
        "H100",
        8,
        _share(8, 1, 0.6) | _search() | _WHOLE_LOGITS | _limit(64 // 8 * (4096 + 500)),
        runs=True,
        step_s=(2 * 3600 / 200, 7 * 3600 / 200),
    ),
    Published(
        "Search-R1, Qwen2.5-7B, GRPO",
        "the same script with the model that its comments name",
        "Qwen2.5-7B",
        "H100",
        8,
        _share(8, 1, 0.6) | _search() | _WHOLE_LOGITS | _limit(64 // 8 * (4096 + 500)),
        runs=True,
    ),
    Published(
        "Search-R1, 14B, GRPO, 4 GPUs",
        "github.com/PeterGriffinJin/Search-R1/issues/80: out of memory on four A800 of 80 GB",
        "Qwen2.5-14B",
        "A100-80GB",
        4,
        _share(4, 1, 0.6) | _search() | _WHOLE_LOGITS | _limit(64 // 4 * (4096 + 500)),
        runs=False,
    ),
    Published(
        "verl, Qwen2.5-3B, GRPO",
        f"{_VERL}, examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh (0061a22): micro-batch 40 a GPU, TP 2",
        "Qwen2.5-3B",
        "H100",
        8,
        _share(8, 2, 0.6) | _gsm8k(512, 1024, 1024, 256) | _WHOLE_LOGITS | _limit(40 * (512 + 1024)),
        runs=True,
    ),
    Published(
        "verl, Qwen2-7B, GRPO",
        f"{_VERL}, examples/grpo_trainer/run_qwen2-7b.sh (03aefba): micro-batch 128, TP 2",
        "Qwen2.5-7B",
        "H100",
        8,
        _share(8, 2, 0.6) | _gsm8k(512, 512, 1024, 256) | _WHOLE_LOGITS | _limit(128 // 8 * (512 + 512)),
        runs=True,
    ),
    Published(
        "verl, Qwen2.5-3B, LoRA",
        f"{_VERL}, docs/perf/device_tuning.rst (904e7bf): micro-batch 62. gpu_memory_utilization 0.1 with vLLM 0.8.3, "
        "whose sampler took less; 0.15 here",
        "Qwen2.5-3B",
        "H100",
        1,
        _share(1, 1, 0.15) | _gsm8k(512, 1024, 62, 62) | _LORA | _limit(62 * (512 + 1024)),
        runs=True,
    ),
    Published(
        "verl, Qwen2.5-7B, LoRA",
        f"{_VERL}, docs/perf/device_tuning.rst (904e7bf): micro-batch 16. gpu_memory_utilization 0.2 with vLLM 0.8.3, "
        "0.25 here",
        "Qwen2.5-7B",
        "H100",
        1,
        _share(1, 1, 0.25) | _gsm8k(512, 1024, 16, 16) | _LORA | _limit(16 * (512 + 1024)),
        runs=True,
    ),
    Published(
        "verl, Qwen2-14B, GRPO, 4 GPUs",
        f"{_VERL}, examples/tuning/14b/qwen2_14b_grpo_4_h800_fsdp_vllm.sh (7dbeb10): TP 4, H800 (as H100: the same "
        "memory). 16 rows a GPU, counted at a quarter of their limit of 2048 tokens; at their longest they do not fit",
        "Qwen2.5-14B",
        "H100",
        4,
        _share(4, 4, 0.5) | _gsm8k(1024, 1024, 1024, 256) | _limit(16 * 512),
        runs=True,
    ),
)
