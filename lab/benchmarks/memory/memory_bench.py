"""`make bench-memory`: the peak memory of an actor's update on a GPU, without a GPU.

An update of one micro-batch of 16,384 tokens: weights, gradients and AdamW's moments in fp32 and sharded, passes in
bf16 with gradient checkpointing. "logits kept" is verl's computation without flash_attn and compilation, with
entropy gradients; "fused" is the trainer's.

Measured by PyTorch's memory tracker over fake tensors: `backward` as a whole, `activations`, `logits` and `step` each
alone. Computed: AdamW's moments. Not in it: CUDA's context, NCCL's buffers, fragmentation, and what kernels use
inside. Peaks of parts need not happen together, so their sum may exceed the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from itertools import product

from models import MODELS
from peak import FUSED, LOGITS_KEPT, Memory, measure_update
from rich.console import Console
from rich.table import Table

GIB = 2**30
HEADS = (LOGITS_KEPT, FUSED)
COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "unsharded": "unsharded",
    "unsharded_gradients": "their gradients",
    "activations": "activations",
    "logits": "logits",
    "backward": "backward",
    "step": "step",
    "peak": "peak",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--micro-batches", type=int, choices=(1, 2), default=1, help="of an update")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title=f"GiB of a process, micro-batch of {arguments.tokens} tokens")
    for column in ("model", "GPUs", "head", *COLUMNS.values()):
        table.add_column(column, justify="left" if column in ("model", "head") else "right", no_wrap=True)
    results = []
    console = Console(stderr=True)
    with console.status("starting") as spinner:
        for name, processes, head in product(arguments.models, arguments.processes, HEADS):
            spinner.update(f"{name}, {processes} processes, {head}")
            memory = measure_update(MODELS[name], arguments.tokens, processes, head, arguments.micro_batches)
            table.add_row(name, str(processes), head, *cells(memory))
            place = {"model": name, "processes": processes, "head": head, "tokens": arguments.tokens}
            results.append(place | asdict(memory) | {"peak": memory.peak})
    output = Console(file=sys.stdout)
    output.width = max(output.width, 160)
    output.print(table)
    print(json.dumps({"micro_batches": arguments.micro_batches, "bytes": results}))


def cells(memory: Memory) -> list[str]:
    return [f"{getattr(memory, column) / GIB:.1f}" for column in COLUMNS]


if __name__ == "__main__":
    main()
