#!/usr/bin/env bash
# Everything that is checked without running the product.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venvs/cli/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" services/*/forage_* models/forage_models
(cd proto && "../$bin/buf" lint)
scripts/proto.sh --check
echo "lint: all clean"
