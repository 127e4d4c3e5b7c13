#!/usr/bin/env bash
# torch 2.13.0 (CPU build), torch.compile on Linux x86-64 with g++: the cache of compiled graphs (TORCHINDUCTOR_CACHE_DIR)
# does not tell kinds of processors apart. A graph that was compiled with vector instructions is taken from the cache
# where ATen has none (ATEN_CPU_CAPABILITY=default): its C++ names at::vec without the header, and does not compile. An
# empty cache works. Expected: the kind of the processor is part of the cache's key, or the entry is compiled anew.
# Seen besides, by hand on 2026-11-28 and not run here: a cache of an AVX-512 run read by an AVX2 run raises nothing and
# gives wrong numbers (a row's sum of exponentials off by 380, NaN), and the other way round the process aborted. Caches
# on a shared home, or baked into an image, therefore need a folder for each kind of processor.
# Exit code: 0 as described, 1 changed, 2 not to be had here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
[ "$(uname -sm)" = "Linux x86_64" ] && command -v g++ >/dev/null || { echo "needs Linux on x86-64 and g++"; exit 2; }
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cat > "$folder/rank.py" <<'P'
import torch

@torch.compile
def count(values, least):
    return (values >= least).sum(-1)

values, least = torch.randn(7, 304), torch.randn(7, 1)
same = torch.equal(count(values, least), (values >= least).sum(-1))
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), "equal" if same else "different")
P
# usage: try CACHE CAPABILITY      an empty capability is that of the machine
try() { TORCHINDUCTOR_CACHE_DIR="$folder/$1" ATEN_CPU_CAPABILITY="$2" "$folder/venv/bin/python" "$folder/rank.py" 2>&1; }
native=$(env -u ATEN_CPU_CAPABILITY TORCHINDUCTOR_CACHE_DIR="$folder/native" "$folder/venv/bin/python" "$folder/rank.py" 2>&1 | tail -1)
alone=$(try empty default | tail -1)
shared=$(try native default || true)
error=$(grep -m1 -oE "error: .*at::vec.* has not been declared" <<< "$shared" || true)
printf 'the machine:            %s\ndefault, empty cache:   %s\ndefault, its cache:     %s\n' "$native" "$alone" "${error:-$(tail -1 <<< "$shared")}"
[[ $native = *DEFAULT* ]] && { echo "this machine has no vector instructions: nothing to see"; exit 2; }
[[ $native = *equal && $alone = *"DEFAULT equal" && -n $error ]] || { echo "changed"; exit 1; }
