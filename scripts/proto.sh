#!/usr/bin/env bash
# Generates libs/proto/forage_proto/v1 from proto/. `--check` writes nothing and fails if the committed code is out of date.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venvs/cli/bin
out=libs/proto/forage_proto/v1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/forage_proto"
cp -r proto/forage/v1 "$tmp/forage_proto/v1"
sed -i 's#import "forage/v1/#import "forage_proto/v1/#' "$tmp"/forage_proto/v1/*.proto
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -I "$tmp" --python_out="$tmp" --grpc_python_out="$tmp" \
  --mypy_out=quiet:"$tmp" --mypy_grpc_out=quiet:"$tmp" "$tmp"/forage_proto/v1/*.proto
rm "$tmp"/forage_proto/v1/*.proto
echo '"""Generated from proto/forage/v1 by `make proto`; do not edit."""' > "$tmp/forage_proto/v1/__init__.py"
if [ "${1:-}" = --check ]; then
  diff -r -x __pycache__ "$tmp/forage_proto/v1" "$out" >/dev/null || { echo "proto: forage_proto/v1 is out of date: run 'make proto' and commit the result" >&2; exit 1; }
else
  rm -rf "$out" && cp -r "$tmp/forage_proto/v1" "$out"
fi
