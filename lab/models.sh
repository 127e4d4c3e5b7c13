#!/usr/bin/env bash
# Writes docs/reference/models.md: what training and serving do with a tiny random model of every family of causal
# language models that transformers knows. Families that are done are skipped; results are kept in .cache/models.
# usage: lab/models.sh [--stage trainer|engine|page] [--only a,b] [--again]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export PYTHONPATH=tests/support PYTHONDONTWRITEBYTECODE='' PYTHONPYCACHEPREFIX=$PWD/.cache/bytecode
# Nothing is compiled: it would take minutes a family, and computes the same.
export TORCHDYNAMO_DISABLE=1
folder=.cache/models stages="trainer engine page" options=()
while [ $# -gt 0 ]; do
  case $1 in
    --stage) stages=${2:?"--stage needs trainer, engine or page"}; shift 2 ;;
    --only) options+=(--only "${2:?"--only needs families"}"); shift 2 ;;
    --again) options+=(--again); shift ;;
    *) echo "models.sh: '$1' is no option, expected --stage, --only or --again" >&2; exit 2 ;;
  esac
done
for stage in $stages; do
  case $stage in
    trainer) .venvs/trainer/bin/python lab/models_trainer.py "$folder" "${options[@]}" ;;
    engine) .venvs/rollout/bin/python lab/models_engine.py "$folder" "${options[@]}" ;;
    page) .venvs/rollout/bin/python lab/models_page.py "$folder" ;;
    *) echo "models.sh: '$stage' is no stage, expected trainer, engine or page" >&2; exit 2 ;;
  esac
done
