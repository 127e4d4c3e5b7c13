#!/usr/bin/env bash
# Writes docs/reference/templates.md from the chat templates in the source package of llama-cpp-python, which is
# downloaded into a temporary folder. usage: lab/templates.sh
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Only the archive is read; nothing of it is built, so what it needs for that does not matter.
.venvs/trainer/bin/python - "$version" "$folder" <<'PYTHON'
import re, subprocess, sys, tarfile, urllib.parse, urllib.request
version, folder = sys.argv[1:]
asked = subprocess.run(["pip", "config", "get", "global.index-url"], capture_output=True, text=True)
index = asked.stdout.strip() or "https://pypi.org/simple"
page = f"{index.rstrip('/')}/llama-cpp-python/"
links = re.findall(r'href="([^"#]+)', urllib.request.urlopen(page).read().decode())
(link,) = {link for link in links if link.endswith(f"-{version}.tar.gz")}
archive, _ = urllib.request.urlretrieve(urllib.parse.urljoin(page, link), f"{folder}/package.tar.gz")
with tarfile.open(archive) as package:
    wanted = [one for one in package.getmembers() if "/models/templates/" in one.name and one.name.endswith(".jinja")]
    for one in wanted:
        one.name = one.name.rpartition("/")[2]
    package.extractall(folder, wanted, filter="data")
PYTHON
HF_HUB_OFFLINE=1 .venvs/trainer/bin/python lab/templates.py "$folder" "$version"
