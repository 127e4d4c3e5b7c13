#!/usr/bin/env bash
# Everything that is checked without running the product.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venvs/common/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" services/*/forage_*
(cd proto && "../$bin/buf" lint)
scripts/proto.sh --check
echo "lint: all clean"
