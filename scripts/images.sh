#!/usr/bin/env bash
# Builds the images that the chart and docker-compose.yml use: forage/<service>:<version>, with the chart's appVersion.
# usage: [SERVICES="reward cli"] [GPU=1|base] [PYTHON_IMAGE=…] [NODE_IMAGE=…] [GPU_IMAGE=…] [REGISTRY=…] images.sh [option of docker build …]
#   GPU=1         builds retriever, rollout and trainer with their CUDA wheels, as forage/<service>:<version>-gpu
#   GPU=base      the same on images that bring torch and vLLM: pytorch/pytorch and vllm/vllm-openai, or GPU_IMAGE
#   PYTHON_IMAGE  base image of all others, instead of the one in services/Dockerfile
#   NODE_IMAGE    image that builds the console's pages, instead of the one in services/Dockerfile
#   REGISTRY      prefix of the names, for example registry.example/team
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -nE 's/^appVersion: "(.*)"$/\1/p' deploy/helm/forage/Chart.yaml)
known=() on_gpus=()
declare -A homes
while read -r service home; do
  known+=("$service"); homes[$service]=$home
  [ ! -f "$home/requirements.gpu.lock" ] || on_gpus+=("$service")
done < scripts/services.txt
device=cpu suffix='' options=() services=("${known[@]}")
case ${GPU:-} in
  '') ;;
  1) device=gpu ;;
  base) device=gpu-base ;;
  *) echo "images: GPU is '$GPU', expected 1 or base" >&2; exit 2 ;;
esac
[ "$device" = cpu ] || { suffix=-gpu; services=("${on_gpus[@]}"); }
[ -z "${SERVICES:-}" ] || read -ra services <<< "$SERVICES"
[ -z "${PYTHON_IMAGE:-}" ] || options+=(--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE")
[ -z "${NODE_IMAGE:-}" ] || options+=(--build-arg "NODE_IMAGE=$NODE_IMAGE")
[ -z "${GPU_IMAGE:-}" ] || [ "$device" = gpu-base ] || { echo "images: GPU_IMAGE is a base of GPU=base, and GPU is '${GPU:-}'" >&2; exit 2; }
[ -z "${GPU_IMAGE:-}" ] || options+=(--build-arg "TORCH_IMAGE=$GPU_IMAGE" --build-arg "VLLM_IMAGE=$GPU_IMAGE")

for service in "${services[@]}"; do
  [[ " ${known[*]} " == *" $service "* ]] || { echo "images: SERVICES contains $service, expected some of: ${known[*]}" >&2; exit 2; }
  [ -z "${GPU:-}" ] || [[ " ${on_gpus[*]} " == *" $service "* ]] ||
    { echo "images: $service has no GPU image, expected some of: ${on_gpus[*]}" >&2; exit 2; }
done
command -v docker >/dev/null || { echo "images: docker is missing: install Docker 20.10 or later" >&2; exit 2; }
docker info >/dev/null 2>&1 || { echo "images: no Docker engine answers ($(docker info 2>&1 | tail -n 1)): start it, or set DOCKER_HOST" >&2; exit 2; }

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
for service in "${services[@]}"; do
  base=$device; [ "$service" != rollout ] || [ "$device" = gpu ] || base+=-rollout
  DOCKER_BUILDKIT=1 docker build --file services/Dockerfile --target "$service" \
    --tag "${REGISTRY:+$REGISTRY/}forage/$service:$version$suffix" --build-arg "SERVICE=$service" --build-arg "HOME_OF_SERVICE=${homes[$service]}" --build-arg "BASE=$base" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "CREATED=$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
    "${options[@]}" "$@" .
done
