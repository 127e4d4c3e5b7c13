#!/usr/bin/env bash
# Writes docs/reference/templates.md from the chat templates in the source package of llama-cpp-python, which is
# downloaded into a temporary folder. usage: lab/templates.sh
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
  --dest "$folder" "llama-cpp-python==$version"
tar xzf "$folder"/*.tar.gz -C "$folder" --wildcards --strip-components=5 '*/models/templates/*.jinja'
HF_HUB_OFFLINE=1 .venvs/trainer/bin/python lab/templates.py "$folder" "$version"
