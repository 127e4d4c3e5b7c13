"""The NCCL transport: policies from the trainer's GPUs, through vLLM's own weight-transfer engine.

The trainer has no sender yet and refuses `rollout.weights.transport=nccl`; this is the receiving half, not yet run on
GPUs. The trainer is rank 0 and broadcasts packed tensors (vLLM's default on its side); the workers of replica i are the
ranks from 1 + i * tensor_parallel_size. All replicas must take part in every update, or the broadcast hangs.
"""

from __future__ import annotations

from forage_common.errors import SettingsError
from forage_common.v1.trajectory_pb2 import Policy
from forage_rollout.weights.policy import PolicyError, Shapes, TransferInfo, describe_policy, verify_shapes

_DTYPES = ("bfloat16", "float16", "float32")


class NcclTransport:
    """Whole policies by broadcast.

    Args:
        expected: `read_model_shapes` of the model that the engine was started with.
        replica: number of this engine among all, from 0.
        workers: GPUs of one engine.
        gpu: whether this engine runs on GPUs.

    Raises:
        SettingsError: the engine does not run on GPUs.
    """

    backend = "nccl"

    def __init__(self, expected: Shapes, replica: int, workers: int, gpu: bool) -> None:
        if not gpu:
            raise SettingsError(
                "rollout.weights.transport nccl sends weights between GPUs and this engine has none: "
                "set rollout.weights.transport to filesystem"
            )
        self._expected = expected
        self._first_rank = 1 + replica * workers
        self._workers = workers

    async def prepare(self, policy: Policy) -> TransferInfo:
        """See `FilesystemTransport.prepare`; the tensors are sent later, when all workers wait for them."""
        sender = policy.nccl
        if not policy.HasField("nccl"):
            raise PolicyError(f"{describe_policy(policy)} names no sender: rollout.weights.transport nccl needs one")
        last = self._first_rank + self._workers - 1
        if last >= sender.world_size:
            raise PolicyError(
                f"{describe_policy(policy)} announces a world of {sender.world_size} ranks: "
                f"this engine's go up to {last}"
            )
        if unknown := sorted({tensor.dtype for tensor in sender.tensors} - set(_DTYPES)):
            raise PolicyError(
                f"{describe_policy(policy)} sends dtype {unknown[0]!r}: expected one of {', '.join(_DTYPES)}"
            )
        verify_shapes(policy, {tensor.name: tuple(tensor.shape) for tensor in sender.tensors}, self._expected)
        return TransferInfo(
            init_info={
                "master_address": sender.master_address,
                "master_port": sender.master_port,
                "rank_offset": self._first_rank,
                "world_size": sender.world_size,
                "packed": True,
            },
            update_info={
                "names": [tensor.name for tensor in sender.tensors],
                "dtype_names": [tensor.dtype for tensor in sender.tensors],
                "shapes": [list(tensor.shape) for tensor in sender.tensors],
            },
        )
