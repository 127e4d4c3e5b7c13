"""The memory that a FAISS file takes which is cut and read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEASURED = """
import pathlib, re, sys
import faiss, numpy as np
from forage_retriever.index import agreement
from forage_retriever.search import faiss_build, faiss_cut, faiss_stream

def measure_peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

file, out, rows = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
with file.open("wb") as empty:
    faiss_stream.write_flat_header(faiss.IndexFlatIP(768), rows, empty)
    empty.truncate(empty.tell() + 4 * 768 * rows)
before = measure_peak()
faiss_cut.cut_rows(file, rows // 2, rows, out, lambda done: None)
vectors = faiss_cut.map_flat(file, faiss_build.read_index(file))
agreement.check_finite(file, vectors, lambda *seen: None)
print(out.stat().st_size, measure_peak() - before)
"""


def test_a_file_is_cut_and_read_in_less_memory_than_it_has(tmp_path: Path) -> None:
    rows = 250_000
    command = [sys.executable, "-c", MEASURED, tmp_path / "file", tmp_path / "out", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    size, grown = map(int, done.stdout.split())
    assert size > 4 * 768 * rows // 2
    assert grown < 4 * 768 * rows / 5, "768 MB were read"
