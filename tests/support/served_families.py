"""A program: what vLLM gives for tiny random models after loads in place, and when it is started afresh.

`served_families.py FOLDER KIND …` builds two models a family in the folder and prints a JSON line for each: the largest
difference of a log-probability after a load in place from an engine that was started with the same policy (`there`),
the same after a second load, back to the first policy (`back`), and how far the two policies differ (`moved`).

A child a start: vLLM is imported once, and no engine follows another one in a process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # what tests send to the worker in their own process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from model_families import VOCABULARY, build_family
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

Rows = list[list[float]]
LENGTHS = (37, 22)
EXTENSION = "forage_rollout.engine.worker_extension.WorkerExtension"


def write_policies(kind: str, folder: Path) -> None:
    """Write two policies of a family, `a` and `b`, that differ in every weight."""
    model = build_family(kind)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for policy in "ab":
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
            model.save_pretrained(folder / policy)


def start_engine(folder: Path) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enforce_eager=True,
        worker_extension_cls=EXTENSION,
    )


def score(llm: LLM) -> Rows:
    """The log-probabilities of all tokens but the first of fixed rows; some tokens are sampled behind them."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]
    parameters = SamplingParams(max_tokens=4, prompt_logprobs=0, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=row) for row in rows], parameters, use_tqdm=False)
    found = []
    for row, output in zip(rows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        places = zip(row[1:], output.prompt_logprobs[1:], strict=True)
        found.append([place[token].logprob for token, place in places if place is not None])
    return found


def load_in_place(llm: LLM, folder: Path, number: int) -> None:
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    llm.collective_rpc("begin_policy", args=(number, files, [], folder.name))
    poll_until_ready(llm, number)
    llm.collective_rpc("put_policy", args=(number,))
    llm.reset_prefix_cache()
    llm.collective_rpc("drop_policy", args=(number,))


def poll_until_ready(llm: LLM, number: int) -> None:
    """Wait until a policy may be put in place; raises a RuntimeError with what the worker says."""
    while True:
        [(is_ready, error)] = llm.collective_rpc("poll_policy", args=(number,))
        if error:
            raise RuntimeError(error)
        if is_ready:
            return
        time.sleep(0.01)


def load_there_and_back(folder: Path) -> list[Rows]:
    """The scores of a, of b loaded in place, and of a loaded in place of b."""
    llm = start_engine(folder / "a")
    found = [score(llm)]
    for number, policy in enumerate("ba", 1):
        load_in_place(llm, folder / policy, number)
        found.append(score(llm))
    return found


def load_afresh(folder: Path) -> list[Rows]:
    return [score(start_engine(folder / "b"))]


def run_apart(work: Callable[[Path], list[Rows]], folder: Path) -> list[Rows]:
    """Run in a child of this process; raises a RuntimeError with its error."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(work, folder, there))
    child.start()
    there.close()
    try:
        answer: Any = here.recv()
    except EOFError:
        answer = "its process has died"
    child.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    found: list[Rows] = answer
    return found


def _answer(work: Callable[[Path], list[Rows]], folder: Path, pipe: Any) -> None:
    try:
        pipe.send(work(folder))
    except BaseException as error:  # noqa: BLE001 - told to the caller
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(0)  # vLLM's own end waits for processes that it has not started here


def compare(ones: Rows, others: Rows) -> float:
    return max(abs(a - b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True))


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """See the module."""
    try:
        write_policies(kind, folder)
        start, there, back = run_apart(load_there_and_back, folder)
        (fresh,) = run_apart(load_afresh, folder)
    except (RuntimeError, ValueError) as error:
        return {"kind": kind, "error": str(error)}
    return {"kind": kind, "there": compare(there, fresh), "back": compare(back, start), "moved": compare(start, fresh)}


if __name__ == "__main__":
    for family in sys.argv[2:]:
        sys.stdout.write(json.dumps(measure(family, Path(sys.argv[1]) / family)) + "\n")
        sys.stdout.flush()
