#!/usr/bin/env bash
# faiss-cpu 1.15.1: index_factory(d, "HNSW16_PQ16x4np", METRIC_INNER_PRODUCT) gives, without an error, an index that ranks by
# L2: the metric that was asked for does not reach its codes. A trained one says so itself (metric_type 1). Searches return
# squared distances, rising, where those of other indexes of this metric fall, and other neighbours unless all vectors
# have length 1: of the ten greatest inner products none is in the first ten. HNSW16, HNSW16_SQ8 and PQ16x4np of the same
# call are right. Expected: the metric that was asked for, or an error, as for other pairs that do not exist.
# Exit code: 0 as described, 1 changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check faiss-cpu==1.15.1 numpy==2.3.5
cat > "$folder/search.py" <<'P'
import faiss
import numpy as np

draw = np.random.default_rng(0)
vectors = draw.standard_normal((4000, 32)).astype("f4") * draw.uniform(0.5, 3, (4000, 1)).astype("f4")
queries = draw.standard_normal((40, 32)).astype("f4")
best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
for factory in ("HNSW16", "HNSW16_SQ8", "PQ16x4np", "HNSW16_PQ16x4np"):
    whole = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
    whole.train(vectors)
    whole.add(vectors)
    index = faiss.downcast_index(whole)
    storage = faiss.downcast_index(index.storage) if hasattr(index, "storage") else index
    wide = faiss.SearchParametersHNSW(efSearch=200) if hasattr(index, "hnsw") else None
    scores, rows = whole.search(queries, 10, params=wide)
    share = np.mean([len(set(own) & set(of)) / 10 for own, of in zip(rows, best)])
    order = "rising" if (np.diff(scores[0]) >= 0).all() else "falling"
    print(f"{factory}: metric {index.metric_type}, of its storage {storage.metric_type}, scores {order}, found {share:.2f}")
P
seen=$("$folder/venv/bin/python" "$folder/search.py" 2>/dev/null)
echo "$seen"
grep -qx "HNSW16: metric 0, of its storage 0, scores falling, found [01].[0-9]*" <<< "$seen" &&
    grep -qx "HNSW16_PQ16x4np: metric 1, of its storage 1, scores rising, found 0.0[0-9]*" <<< "$seen" ||
    { echo "changed"; exit 1; }
