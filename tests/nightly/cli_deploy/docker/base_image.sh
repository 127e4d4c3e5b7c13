#!/usr/bin/env bash
# Builds python:3.11-slim-bookworm without a registry: Debian by debootstrap, a CPython 3.11 of this machine, and its pip
# configuration and certificates. Needs root and Docker. Debian's own Python does not serve: its pip needs Debian's folders.
# usage: base_image.sh [image]
set -euo pipefail

image=${1:-python:3.11-slim-bookworm}
for tool in debootstrap docker; do
  command -v "$tool" >/dev/null || { echo "base_image: $tool is missing: apt-get install debootstrap docker.io" >&2; exit 2; }
done
python=''
while read -r candidate; do
  if "$candidate" -c 'import ensurepip, sys, sysconfig; sys.exit("deb_system" in sysconfig.get_scheme_names())' 2>/dev/null; then
    python=$candidate
    break
  fi
done < <(type -ap python3.11)
[ -n "$python" ] || { echo "base_image: no python3.11 of PATH is a CPython with ensurepip other than Debian's: install one" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "base_image: debootstrap needs root" >&2; exit 2; }

root=$(mktemp -d)
trap 'rm -rf "$root" "$root.log"' EXIT
run_logged() { "$@" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; echo "base_image: $1 failed (its output is above)" >&2; exit 1; }; }
# Packages of the official image, and libraries that CPython's modules are linked with.
run_logged debootstrap --variant=minbase \
  --include=ca-certificates,netbase,tzdata,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libnsl2,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g \
  bookworm "$root"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*

# As in the official image, apt keeps no cache in a layer.
echo 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' > "$root/etc/apt/apt.conf.d/docker-clean"

prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
mapfile -t libraries < <(cd "$prefix" && ls -d lib/libpython3* 2>/dev/null)
tar -C "$prefix" --exclude=__pycache__ --exclude='lib/python3.11/site-packages/*' --exclude=lib/python3.11/test \
  --exclude='lib/python3.11/config-*' --exclude='*.a' -cf - bin/python3.11 include/python3.11 lib/python3.11 \
  "${libraries[@]}" | tar -C "$root/usr/local" --no-same-owner -xf -
ln -sf python3.11 "$root/usr/local/bin/python3"
ln -sf python3.11 "$root/usr/local/bin/python"
chroot "$root" ldconfig
run_logged chroot "$root" python3.11 -m ensurepip
ln -sf pip3.11 "$root/usr/local/bin/pip"

setting() { "$python" -m pip config list | sed -nE "s/^(global|:env:)\\.$1='(.*)'$/\\2/p" | tail -n 1; }
cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
environment="PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8"
# pip and uv read these from the environment, as scripts/setup.sh does.
environment+=" PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
index=$(setting index-url)
[ -z "$index" ] || environment+=" PIP_INDEX_URL=$index UV_INDEX_URL=$index"
links=$(setting find-links)
if [ -d "$links" ]; then
  mkdir -p "$root/opt/wheels" && cp "$links"/*.whl "$root/opt/wheels/"
  environment+=" PIP_FIND_LINKS=/opt/wheels"
fi

tar -C "$root" --exclude='./proc/*' --exclude='./sys/*' -cf - . |
  docker import --change "ENV $environment" --change 'CMD ["python3"]' - "$image"
