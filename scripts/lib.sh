# Shared by the scripts beside it; sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stage_names=()
stage_seconds=()

die() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# stage NAME COMMAND...: run a command under a heading and remember how long it took.
stage() {
    local name=$1 began=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    "$@" || status=$?
    stage_names+=("$name")
    stage_seconds+=($((SECONDS - began)))
    return "$status"
}

print_stages() {
    printf '\n%-34s %8s\n' stage seconds
    local i
    for i in "${!stage_names[@]}"; do
        printf '%-34s %8d\n' "${stage_names[$i]}" "${stage_seconds[$i]}"
    done
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.13 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer with the venv module was found; install one, or set PYTHON=/path/to/python"
}

# Install this package and everything it needs into $venv; quick when nothing has changed.
install_environment() {
    local python wanted stamp="$venv/.cacheflow-installed"
    wanted=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted $root" ]; then
        echo "environment $venv is up to date"
        return
    fi
    python=$(find_python) || exit 2
    echo "installing into $venv: about 11 GB, some minutes"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/scripts/constraints.txt" --editable "$root[dev]"
    echo "$wanted $root" >"$stamp"
}
