"""Policies made ready beside a model of vLLM, and loaded into one that stands still, as on GPUs.

There is no GPU here: what runs on one is run on models of vLLM whose weights are not packed for a CPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import wait_until

from forage_weights.delta import encode_delta
from forage_weights.rollout import staging
from forage_weights.rollout.shadow import Shadow
from forage_weights.rollout.staging import Stage, build_patches, is_patchable, load_patches, load_whole
from forage_weights.tensors import open_tensors

WEIGHTS = "model.safetensors"


class Models:
    """Models of vLLM in this process, of folders of one architecture."""

    def __init__(self, folder: Path, work: Path) -> None:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs

        self._states = parallel_state
        arguments = EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256)
        self.config = arguments.create_engine_config()
        with set_current_vllm_config(self.config):
            parallel_state.init_distributed_environment(1, 0, f"file://{work / 'rendezvous'}", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)

    def build(self, folder: Path, rank: int = 0, ranks: int = 1) -> torch.nn.Module:
        """The model of a folder, as the worker of a rank has it; `ranks` share it by tensor parallelism."""
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

        self.config.compilation_config.static_forward_context.clear()
        group, self._states._TP = self._states._TP, SimpleNamespace(world_size=ranks, rank_in_group=rank)
        try:
            model = initialize_model(self.config)
        finally:
            self._states._TP = group
        with torch.no_grad():
            model.load_weights(load_file(folder / WEIGHTS).items())
            process_weights_after_loading(model, self.config.model_config, torch.device("cpu"))
        return model

    def close(self) -> None:
        self._states.destroy_model_parallel()
        self._states.destroy_distributed_environment()


@pytest.fixture(scope="module")
def folders(make_model: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model a, another one b, and c: a with about one element in a hundred of the next representable value."""
    folders = {"a": make_model(0), "b": make_model(1), "c": tmp_path_factory.mktemp("c") / "model"}
    shutil.copytree(folders["a"], folders["c"])
    torch.manual_seed(0)
    weights = load_file(folders["a"] / WEIGHTS)
    changed = {
        name: torch.where(torch.rand_like(weight) < 0.01, torch.nextafter(weight, torch.ones(())), weight)
        for name, weight in weights.items()
    }
    save_file(changed, folders["c"] / WEIGHTS)
    return folders


@pytest.fixture(scope="module")
def models(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(folders["a"], tmp_path_factory.mktemp("models"))
    yield models
    models.close()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they are in the checkpoint, as on GPUs."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        monkeypatch.setattr(method, "process_weights_after_loading", lambda self, layer: None)


@pytest.fixture
def delta(folders: dict[str, Path], tmp_path: Path) -> Path:
    """The file that leads from a to c."""
    old, new = (
        {name: tensor.bits for name, tensor in open_tensors(folders[one] / WEIGHTS).items()} for one in ("a", "c")
    )
    assert encode_delta(old, new, tmp_path / "delta", 2**30, "content of a", "content of c")
    return tmp_path / "delta"


def compute_outputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a model; of a packed one, what they make of the same numbers."""
    outputs = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    outputs |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            size = getattr(module, "input_size", None) or module.embedding_dim
            inputs = torch.sin(torch.arange(3 * size).float()).view(3, size)
            outputs[f"{name}()"] = module.cpu_linear(inputs, module.weight, None)
    return outputs


def find_differences(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    mine, others = compute_outputs(one), compute_outputs(other)
    assert mine.keys() == others.keys()
    return [name for name in mine if not torch.equal(mine[name], others[name])]


def test_a_shadow_changes_nothing_until_it_is_swapped_in_and_then_everything(
    models: Models, folders: dict[str, Path]
) -> None:
    served, fresh = models.build(folders["a"]), {name: models.build(folders[name]) for name in ("a", "b")}
    assert len(find_differences(served, fresh["b"])) > 10
    assert any(name.endswith("qkv_proj()") for name in compute_outputs(served)), "else nothing is packed here"
    for name in ("b", "a", "b"):
        before = compute_outputs(served)
        shadow = Shadow(served, models.config)
        shadow.load(load_file(folders[name] / WEIGHTS).items())
        assert all(torch.equal(tensor, before[key]) for key, tensor in compute_outputs(served).items())
        shadow.swap()
        assert find_differences(served, fresh[name]) == []
        assert served.lm_head.weight is served.model.embed_tokens.weight


def test_a_shadow_without_a_weight_is_refused(models: Models, folders: dict[str, Path]) -> None:
    weights = load_file(folders["b"] / WEIGHTS)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"nothing was loaded into model\.norm\.weight"):
        Shadow(models.build(folders["a"]), models.config).load(weights.items())


def test_nothing_of_the_weights_before_stays_in_use(models: Models, folders: dict[str, Path]) -> None:
    served = models.build(folders["a"])
    old = [weakref.ref(parameter) for parameter in served.parameters()]
    for name in ("b", "a"):
        shadow = Shadow(served, models.config)
        shadow.load(load_file(folders[name] / WEIGHTS).items())
        shadow.swap()
        del shadow
        gc.collect()
        assert [parameter() for parameter in old if parameter() is not None] == []
        old = [weakref.ref(parameter) for parameter in served.parameters()]


def test_a_model_that_is_not_as_vllm_builds_it_is_refused(models: Models, folders: dict[str, Path]) -> None:
    served, weights = models.build(folders["a"]), load_file(folders["b"] / WEIGHTS)
    before, norm = compute_outputs(served), served.model.norm
    norm.cached = [torch.ones(3)]
    with pytest.raises(ValueError, match=r"the model\.model\.norm has a tensor cached that vLLM does not make"):
        Shadow(served, models.config).load(weights.items())
    del norm.cached
    served.model.norm = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"the model\.model\.norm is of the type Identity"):
        Shadow(served, models.config)
    served.model.norm = norm
    assert all(torch.equal(tensor, before[name]) for name, tensor in compute_outputs(served).items())


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_whole_policy_and_a_delta_reach_a_model_that_stands_still(
    models: Models, folders: dict[str, Path], delta: Path, rank: int, ranks: int
) -> None:
    served, expected = ({name: models.build(folders[name], rank, ranks) for name in names} for names in ("a", "abc"))
    assert is_patchable(served["a"])
    tensors = {name: parameter.data_ptr() for name, parameter in served["a"].named_parameters()}
    load_patches(served["a"], build_patches([folders["c"] / WEIGHTS], [delta], torch.device("cpu")))
    assert find_differences(served["a"], expected["c"]) == []
    for name in ("b", "a"):
        load_whole(served["a"], models.config.model_config, [folders[name] / WEIGHTS])
        assert find_differences(served["a"], expected[name]) == []
    # Graphs of a GPU hold the addresses.
    assert {name: parameter.data_ptr() for name, parameter in served["a"].named_parameters()} == tensors


class Bench:
    """A stage whose worker has a model; `device` decides how it loads."""

    def __init__(self, models: Models, model: torch.nn.Module, device: str) -> None:
        worker: Any = SimpleNamespace(
            model_runner=SimpleNamespace(model=model),
            model_config=models.config.model_config,
            vllm_config=models.config,
            device=torch.device(device),
        )
        self.stage = Stage(worker)
        self._numbers = itertools.count(1)

    def prepare(self, folder: Path, deltas: list[tuple[str, list[str]]] = [], content: str = "") -> int:  # noqa: B006
        number = next(self._numbers)
        self.stage.begin(number, [str(folder / WEIGHTS)], deltas, content)
        return number

    def wait(self, number: int) -> tuple[bool, str]:
        wait_until(lambda: self.stage.poll(number) != (False, ""))
        return self.stage.poll(number)

    def serve(self, folder: Path, deltas: list[tuple[str, list[str]]] = [], content: str = "") -> None:  # noqa: B006
        number = self.prepare(folder, deltas, content)
        assert self.wait(number) == (True, "")
        self.stage.put(number)
        self.stage.drop(number)


def test_a_stage_puts_in_place_what_is_ready_and_nothing_else(models: Models, folders: dict[str, Path]) -> None:
    served = models.build(folders["a"])
    bench = Bench(models, served, "cpu")
    first = bench.prepare(folders["b"])
    second = bench.prepare(folders["c"])  # a newer policy was announced
    assert bench.stage.poll(first) == (False, "another policy has taken its place")
    assert bench.wait(second) == (True, "")
    with pytest.raises(RuntimeError, match="is not ready"):
        bench.stage.put(first)
    bench.stage.drop(first)  # late
    assert bench.stage.poll(second) == (True, "")
    bench.stage.drop(second)
    with pytest.raises(RuntimeError, match="is not ready"):
        bench.stage.put(second)
    assert find_differences(served, models.build(folders["a"])) == []
    bench.serve(folders["b"])
    assert find_differences(served, models.build(folders["b"])) == []


def test_the_time_in_which_a_twin_is_built_counts_as_a_pause(
    models: Models, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=10.0)

    def build(model: Any, config: Any) -> Shadow:
        clock.now += 5.0
        return Shadow(model, config)

    monkeypatch.setattr(staging, "Shadow", build)
    monkeypatch.setattr(staging, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    bench = Bench(models, models.build(folders["a"]), "cpu")
    first, second, files = 1, 2, [str(folders["b"] / WEIGHTS)]
    assert bench.stage.begin(first, files, [], "b") == 5.0
    assert bench.wait(first) == (True, "")
    bench.stage.put(first)
    assert bench.stage.begin(second, files, [], "b") == 0.0, "nothing is built for the same weights"


def test_a_policy_waits_for_the_thread_of_every_one_before(
    models: Models, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forage_weights.rollout import staging

    go_on, reading, read = threading.Event(), threading.Event(), staging._Job._read_tensors

    def read_later(job: Any) -> Iterator[tuple[str, torch.Tensor]]:
        reading.set()
        assert go_on.wait(60)
        yield from read(job)

    served = models.build(folders["a"])
    bench = Bench(models, served, "cpu")
    monkeypatch.setattr(staging._Job, "_read_tensors", read_later)
    first = bench.prepare(folders["b"])
    assert reading.wait(60)
    second = bench.prepare(folders["c"])
    reading.clear()
    bench.stage.drop(first)
    bench.stage.drop(second)
    third = bench.prepare(folders["b"])
    assert bench.stage.poll(third) == (False, "")
    assert not reading.is_set(), "the thread of the first is alive"
    go_on.set()
    assert bench.wait(third) == (True, "")
    bench.stage.put(third)
    assert find_differences(served, models.build(folders["b"])) == []


def test_a_stage_says_why_a_policy_cannot_be_loaded(models: Models, folders: dict[str, Path], tmp_path: Path) -> None:
    served = models.build(folders["a"])
    bench = Bench(models, served, "cpu")
    shutil.copytree(folders["b"], tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / WEIGHTS, 100_000)
    is_ready, error = bench.wait(bench.prepare(tmp_path))
    assert (is_ready, "bytes, its header describes" in error) == (False, True)
    assert find_differences(served, models.build(folders["a"])) == []


@pytest.mark.usefixtures("unpacked")
def test_a_delta_is_patched_in_only_where_its_base_is_in_use(
    models: Models, folders: dict[str, Path], delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forage_weights.rollout import staging

    patched: list[int] = []
    monkeypatch.setattr(staging, "load_patches", lambda *args: (patched.append(1), load_patches(*args)))
    served, expected = models.build(folders["a"]), models.build(folders["c"])
    bench = Bench(models, served, "cpu")
    # Patched in on every device that does not compute with packed copies.
    bench.stage._worker.device = torch.device("meta")
    monkeypatch.setattr(torch.Tensor, "to", _ignore_meta(torch.Tensor.to))
    deltas = [("content of a", [str(delta)])]
    bench.serve(folders["c"], deltas, "content of c")
    assert not patched, "the weights that the engine was started with have no digest"
    assert find_differences(served, expected) == []
    bench.serve(folders["a"], [], "content of a")
    bench.serve(folders["c"], deltas, "content of c")
    assert patched == [1]
    assert find_differences(served, expected) == []
    bench.serve(folders["c"], deltas, "content of c")  # the same again, as at a learning rate of 0
    assert patched == [1]
    # What has changed in the middle of the pause is written over as a whole.
    bench.serve(folders["a"], [], "content of a")
    monkeypatch.setattr(staging, "load_patches", _fail_halfway)
    bench.serve(folders["c"], deltas, "content of c")
    assert find_differences(served, expected) == []


def _ignore_meta(to: Callable[..., Any]) -> Callable[..., Any]:
    def ignore(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if args and args[0] == torch.device("meta") else to(tensor, *args, **kwargs)

    return ignore


def _fail_halfway(model: torch.nn.Module, patches: Any) -> None:
    load_patches(model, patches[: len(patches) // 2])
    raise NotImplementedError("this model converts a weight while it loads it")


def test_positions_of_several_deltas_are_joined(folders: dict[str, Path], delta: Path, tmp_path: Path) -> None:
    c, b = ({k: t.bits for k, t in open_tensors(folders[one] / WEIGHTS).items()} for one in ("c", "b"))
    again = {name: np.where(np.arange(len(bits)) % 50, bits, b[name]) for name, bits in c.items()}
    assert encode_delta(c, again, tmp_path / "next", 2**30)
    for patch in build_patches([folders["c"] / WEIGHTS], [delta, tmp_path / "next"], torch.device("cpu")):
        assert torch.equal(patch.indices, patch.indices.unique())
        assert {*range(0, patch.indices[-1], 50)} - {*patch.indices.tolist()} <= {
            int(i) for i in np.flatnonzero(c[patch.name] == again[patch.name])
        }
