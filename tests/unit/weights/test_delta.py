"""Deltas: the identity to the bit, and nothing but an error from damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from policy_files import make_update, write_tensors

from forage_weights import delta as delta_module
from forage_weights.delta import DeltaError, apply_delta, encode_delta, patch_files, read_delta, read_positions
from forage_weights.tensors import open_tensors

Bits = np.ndarray[Any, Any]
LIMIT = 2**30


def make_tensors(seed: int = 0) -> dict[str, Bits]:
    random = np.random.default_rng(seed)
    return {
        "embedding": random.integers(0, 2**16, 5000, np.uint16),
        "scale": random.integers(0, 2**32, 300, np.uint32),
        "empty": np.zeros(0, np.uint16),
        "flags": random.integers(0, 2**8, 77, np.uint8),
    }


def write_delta(folder: Path, share: float = 0.05) -> tuple[dict[str, Bits], dict[str, Bits], Path]:
    old, out = make_tensors(), folder / "delta"
    new = {name: make_update(bits, share) for name, bits in old.items()}
    assert encode_delta(old, new, out, LIMIT, "the base", "the result") == out.stat().st_size
    return old, new, out


@st.composite
def versions(draw: st.DrawFn) -> tuple[dict[str, Bits], dict[str, Bits]]:
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
        size = draw(st.sampled_from([0, 1, 2, 40, 254, 255, 256, 600, 1100]))
        # Any bits: NaN payloads, infinities, minus zero and denormals of every float are among them.
        before = draw(arrays.arrays(dtype, size, elements=arrays.from_dtype(np.dtype(dtype)), fill=st.just(0)))
        after = draw(arrays.arrays(dtype, size, elements=arrays.from_dtype(np.dtype(dtype)), fill=st.just(0)))
        which = draw(st.sampled_from(["none", "some", "all"]))
        chosen = np.zeros(size, bool) if which == "none" else np.ones(size, bool)
        if which == "some":
            chosen = np.asarray(draw(arrays.arrays(bool, size, fill=st.just(False))))
        old[f"t{number}"], new[f"t{number}"] = before, np.where(chosen, after, before)
    return old, new


@settings(deadline=None, max_examples=60)
@given(versions(), st.sampled_from([64, 512, 2**20]))
def test_a_delta_applied_to_its_base_gives_the_new_version_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[dict[str, Bits], dict[str, Bits]], block: int
) -> None:
    old, new = pair
    out = tmp_path_factory.getbasetemp() / "delta"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_module, "_BLOCK", block)  # several blocks a tensor, and their borders
        assert encode_delta(old, new, out, LIMIT) == out.stat().st_size
        patched = {name: bits.copy() for name, bits in old.items()}
        apply_delta(out, patched)
        positions = read_positions(out)
    for name, bits in new.items():
        assert patched[name].tobytes() == bits.tobytes()
        assert positions.get(name, np.zeros(0)).tolist() == np.flatnonzero(old[name] != bits).tolist()


def test_a_gap_of_any_length_is_kept(tmp_path: Path) -> None:
    old = np.zeros(3_000_000, np.uint16)
    for first in (0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000, 2**20 - 1, 2**20, len(old) - 1):
        new = old.copy()
        new[first] = 1
        new[-1] = 7
        encode_delta({"t": old}, {"t": new}, tmp_path / "delta", LIMIT)
        patched = old.copy()
        apply_delta(tmp_path / "delta", {"t": patched})
        assert np.array_equal(patched, new)


def test_an_update_of_one_in_a_hundred_takes_less_than_a_hundredth(tmp_path: Path) -> None:
    old = np.random.default_rng(0).integers(0, 2**15, 2_000_000, np.uint16)
    size = encode_delta({"t": old}, {"t": make_update(old, 0.01)}, tmp_path / "delta", LIMIT)
    assert size is not None
    assert size < 0.007 * old.nbytes


def test_a_delta_over_the_limit_leaves_no_file(tmp_path: Path) -> None:
    old, new, out = write_delta(tmp_path)
    size = out.stat().st_size
    assert encode_delta(old, new, out, size, "the base", "the result") == size
    assert encode_delta(old, new, out, size - 1, "the base", "the result") is None
    assert not out.exists()
    assert encode_delta(old, new, out, 20) is None
    assert not out.exists()


def test_a_delta_names_its_base_and_its_result(tmp_path: Path) -> None:
    old, new, out = write_delta(tmp_path)
    read = read_delta(out)
    assert (read.base, read.content) == ("the base", "the result")
    assert read.changed == {name: count for name in sorted(old) if (count := int((old[name] != new[name]).sum()))}


@pytest.mark.parametrize("padding", [True, False])
def test_files_are_patched_in_place_over_several_shards(tmp_path: Path, padding: bool) -> None:
    old, new, out = write_delta(tmp_path)
    files = []
    for number, name in enumerate(old):
        # Without padding the tensors' bytes begin at any address.
        write_tensors(tmp_path / f"{number}.safetensors", {name: old[name], f"same{number}": old[name]}, padding)
        files.append(tmp_path / f"{number}.safetensors")
    patch_files(out, files)
    for number, name in enumerate(old):
        tensors = open_tensors(files[number])
        assert tensors[name].bits.tobytes() == new[name].tobytes()
        assert tensors[f"same{number}"].bits.tobytes() == old[name].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("embedding"), "no such tensor"),
        (lambda tensors: tensors.update(embedding=tensors["embedding"][:-1]), "5000 elements"),
        (lambda tensors: tensors.update(embedding=tensors["embedding"].view(np.uint8)), "5000 elements of 2 bytes"),
        (lambda tensors: tensors.update(scale=tensors["scale"].astype(np.uint16)), "300 elements of 4 bytes"),
    ],
)
def test_a_delta_of_other_tensors_is_refused_before_anything_is_written(
    tmp_path: Path, change: Any, message: str
) -> None:
    old, _, out = write_delta(tmp_path)
    tensors = {name: bits.copy() for name, bits in old.items()}
    change(tensors)
    before = {name: bits.tobytes() for name, bits in tensors.items()}
    with pytest.raises(DeltaError, match=message):
        apply_delta(out, tensors)
    assert {name: bits.tobytes() for name, bits in tensors.items()} == before


def test_different_tensors_have_no_delta(tmp_path: Path) -> None:
    old, new, _ = write_delta(tmp_path)
    del new["scale"]
    with pytest.raises(ValueError, match="scale and 0 more"):
        encode_delta(old, new, tmp_path / "delta", LIMIT)


def test_a_damaged_delta_is_an_error_or_harmless_but_never_writes_elsewhere(tmp_path: Path) -> None:
    old, _, out = write_delta(tmp_path)
    good = out.read_bytes()
    random = np.random.default_rng(1)
    refused = 0
    for attempt in range(300):
        data = bytearray(good)
        if attempt % 3 == 0:
            del data[int(random.integers(0, len(data))) :]
        elif attempt % 3 == 1:
            data[int(random.integers(0, len(data)))] ^= 1 << int(random.integers(0, 8))
        else:
            first = int(random.integers(0, len(data)))
            data[first : first + 8] = random.bytes(8)
        out.write_bytes(data)
        # Each tensor lies between two guards in one array: what is written elsewhere shows there.
        guarded = {name: np.pad(bits, 64) for name, bits in old.items()}
        try:
            apply_delta(out, {name: bits[64:-64] for name, bits in guarded.items()})
        except DeltaError:
            refused += 1
        assert not any(bits[:64].any() or bits[-64:].any() for bits in guarded.values())
    assert refused > 200  # what remains changed bits of values, which only the digest can tell


def _forge(out: Path, change: Any) -> None:
    """Change the footer of a delta, and make its length right."""
    data = out.read_bytes()
    length = int.from_bytes(data[-8:], "little")
    footer = json.loads(data[-8 - length : -8])
    blocks = data[: -8 - length]
    blocks = change(footer, blocks) or blocks  # the change returns None if it leaves the blocks
    text = json.dumps(footer).encode()
    out.write_bytes(blocks + text + len(text).to_bytes(8, "little"))


def _replace_gaps(gaps: bytes) -> Any:
    def change(footer: Any, blocks: bytes) -> bytes:
        block = footer["tensors"]["flags"][2][0]
        frame = zstandard.ZstdCompressor().compress(gaps)
        values = blocks[-block[4] :] if list(footer["tensors"])[-1] == "flags" else b""
        footer["tensors"] = {"flags": [77, 1, [[0, block[1], len(gaps), len(frame), len(values)]]]}
        return blocks[:8] + frame + values

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda footer, _: footer["tensors"].update(flags=[2**60, 1, footer["tensors"]["flags"][2]]),
        lambda footer, _: footer["tensors"].update(flags=[77, 3, footer["tensors"]["flags"][2]]),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(0, -(2**20)),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(0, 2**20),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(0, True),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(1, 10**12),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(2, 10**12),
        lambda footer, _: footer["tensors"]["flags"][2][0].__setitem__(3, 10**12),
        lambda footer, _: footer["tensors"]["flags"][2].append(footer["tensors"]["flags"][2][0]),
        lambda footer, _: footer.update(tensors=[]),
        lambda footer, _: footer["tensors"].update(flags=1),
        lambda footer, _: footer.__delitem__("base"),
    ],
)
def test_a_footer_with_impossible_numbers_is_refused(tmp_path: Path, change: Any) -> None:
    old, _, out = write_delta(tmp_path)
    _forge(out, change)
    with pytest.raises(DeltaError):
        apply_delta(out, {name: bits.copy() for name, bits in old.items()})


def test_positions_outside_a_tensor_are_refused(tmp_path: Path) -> None:
    old = {"flags": np.zeros(77, np.uint8)}
    new = {"flags": old["flags"].copy()}
    new["flags"][[3, 76]] = 1
    encode_delta(old, new, tmp_path / "delta", LIMIT)
    _forge(tmp_path / "delta", _replace_gaps(bytes([3, 73])))  # 3, then 77: one past the end
    with pytest.raises(DeltaError, match="other positions"):
        apply_delta(tmp_path / "delta", old)
    assert not old["flags"].any()


@pytest.mark.parametrize("declared", [1, 2**26])
def test_a_frame_that_asks_for_more_memory_than_its_tensor_is_refused(tmp_path: Path, declared: int) -> None:
    old, _, out = write_delta(tmp_path)
    bomb = bytes(2**26)

    def change(footer: Any, blocks: bytes) -> bytes:
        frame = zstandard.ZstdCompressor().compress(bomb)
        footer["tensors"] = {"flags": [77, 1, [[0, 1, declared, len(frame), len(frame)]]]}
        return blocks[:8] + frame + frame

    _forge(out, change)
    with pytest.raises(DeltaError, match=r"other sizes|which has 77 elements"):
        apply_delta(out, old)


@pytest.mark.parametrize("content", [b"", b"FORAGED1", b"not a delta at all, really", b"FORAGED1" + b"\xff" * 8])
def test_a_file_that_is_no_delta_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "delta").write_bytes(content)
    with pytest.raises(DeltaError, match="delta"):
        read_delta(tmp_path / "delta")


def test_a_missing_delta_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DeltaError, match="nowhere cannot be read"):
        read_delta(tmp_path / "nowhere")
