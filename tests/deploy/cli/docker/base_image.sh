#!/usr/bin/env bash
# Builds python:3.11-slim-bookworm without a registry: Debian by debootstrap, the CPython 3.11 of this machine, and its pip
# configuration and certificates. Needs root and Docker.
# usage: base_image.sh [image]
set -euo pipefail

image=${1:-python:3.11-slim-bookworm}
for tool in debootstrap docker python3.11; do
  command -v "$tool" >/dev/null || { echo "base_image: $tool is missing: apt-get install debootstrap docker.io, and Python 3.11" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "base_image: debootstrap needs root" >&2; exit 2; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# Packages of the official image, and libraries that CPython's modules are linked with.
debootstrap --variant=minbase \
  --include=ca-certificates,netbase,tzdata,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libnsl2,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g \
  bookworm "$root" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*

# As in the official image, apt keeps no cache in a layer.
echo 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' > "$root/etc/apt/apt.conf.d/docker-clean"

prefix=$(python3.11 -c 'import sys; print(sys.base_prefix)')
mapfile -t libraries < <(cd "$prefix" && ls -d lib/libpython3* 2>/dev/null)
tar -C "$prefix" --exclude=__pycache__ --exclude='lib/python3.11/site-packages/*' --exclude=lib/python3.11/test \
  --exclude='lib/python3.11/config-*' --exclude='*.a' -cf - bin/python3.11 include/python3.11 lib/python3.11 \
  "${libraries[@]}" | tar -C "$root/usr/local" --no-same-owner -xf -
ln -sf python3.11 "$root/usr/local/bin/python3"
ln -sf python3.11 "$root/usr/local/bin/python"
chroot "$root" ldconfig
chroot "$root" python3.11 -m ensurepip >/dev/null 2>&1
ln -sf pip3.11 "$root/usr/local/bin/pip"

setting() { python3.11 -m pip config list | sed -nE "s/^(global|:env:)\\.$1='(.*)'$/\\2/p" | tail -n 1; }
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
