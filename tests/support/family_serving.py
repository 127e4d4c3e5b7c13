"""`python family_serving.py FOLDER`: whether vLLM serves a family's tiny model as transformers computes it.

FOLDER has the models `start` and `published`, and scores.json: {"rows": token ids, "start": log-probabilities of their
tokens but the first, "published": the same}. Printed is, in the last line, what `serve_family` returns, as JSON. By the
rollout's environment.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from forage_proto.v1.trajectory_pb2 import Canary
from forage_rollout.vllm_start.start_errors import describe_failure
from forage_rollout.vllm_start.vllm_args import build_arguments, build_environment
from forage_runtime.settings import EngineSettings, ModelSettings, RolloutSettings, Settings
from forage_weights.rollout.canary import CanaryBounds

ENGINE = EngineSettings(max_model_len=128, max_num_seqs=4)
_LIMIT_S = 600.0
_NO_STATES = "Chunked prefill is required for mamba cache mode"
"""Of vLLM's error about a model with states, whose prefixes it caches only where it may split a prompt."""


def serve_family(folder: Path) -> dict[str, Any]:
    """Start vLLM with a model, and put the published one in its place as replicas on a CPU do.

    vLLM runs in this process, which should end after it.

    Returns: `architecture`, vLLM's class; `prefix_cache`, if it cannot have one; `served` and `in_place`, as of
        `compare`; `error` in place of the first of them that failed.
    """
    scores, result = json.loads((folder / "scores.json").read_text(encoding="utf-8")), dict[str, Any]()
    bounds, wanted = CanaryBounds("float32"), Canary(dtype="float32")
    try:
        llm, args = start_engine(folder / "start")
        result |= {"prefix_cache": False} if args else {}  # as `start_with` does
        result["architecture"] = llm.llm_engine.vllm_config.model_config.architecture
        found = score(llm, scores["rows"])
        result["served"] = compare(found, scores["start"], bounds.find(wanted, is_fresh=True))
        bounds.fresh = result["served"]["mean"]
        load_in_place(llm, folder / "published", 1)
        found = score(llm, scores["rows"])
        result["in_place"] = compare(found, scores["published"], bounds.find(wanted, is_fresh=False))
    except Exception as error:  # noqa: BLE001 - any error of vLLM's is the result
        traceback.print_exc()
        result["error"] = describe_failure(error).reason
    return result


def compare(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], bound: float) -> dict[str, float]:
    """Compare log-probabilities: `mean` and `largest` difference, and the canary's `bound` of the mean."""
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return {"mean": mean(differences), "largest": max(differences), "bound": bound}


def start_engine(model: Path) -> tuple[Any, dict[str, Any]]:
    """Start vLLM in this process as a replica on a CPU does; returns it and what `rollout.engine.args` needs."""
    try:
        return _start(model, {}), {}
    except Exception as error:
        if _NO_STATES not in str(error):
            raise
    args = {"enable_prefix_caching": False}
    return _start(model, args), args


def _start(model: Path, args: dict[str, Any]) -> Any:
    from vllm import LLM

    engine = ENGINE.model_copy(update={"args": args})
    settings = Settings(model=ModelSettings(path=model), rollout=RolloutSettings(engine=engine))
    arguments = build_arguments(settings, cpu=True)
    del arguments["enable_log_requests"]  # of AsyncLLM
    return LLM(**arguments, skip_tokenizer_init=True)


def score(llm: Any, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probabilities of the rows' tokens but the first; some tokens are sampled behind them."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
    return [
        [places[token].logprob for token, places in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
        for row, output in zip(rows, outputs, strict=True)
    ]


def load_in_place(llm: Any, folder: Path, number: int) -> None:
    """Put a policy in the served one's place, as replicas do; a RuntimeError has the worker's words."""
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    llm.collective_rpc("begin_policy", args=(number, files, [], folder.name))
    poll_until_ready(llm, number)
    llm.collective_rpc("put_policy", args=(number,))
    llm.reset_prefix_cache()
    llm.collective_rpc("drop_policy", args=(number,))


def poll_until_ready(llm: Any, number: int) -> None:
    """Wait until a policy may be put in place; a RuntimeError has the worker's words."""
    until = time.monotonic() + _LIMIT_S
    while not (answer := llm.collective_rpc("poll_policy", args=(number,))[0])[0]:
        if answer[1] or time.monotonic() > until:
            raise RuntimeError(answer[1] or f"not ready after {_LIMIT_S:g} s")
        time.sleep(0.01)  # wait: for the thread that makes it ready


if __name__ == "__main__":
    os.environ.update(build_environment(ENGINE))
    sys.stdout.write("\n" + json.dumps(serve_family(Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads and destructors have nothing left to do
