# Shared by the scripts beside it; sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
stage_names=()
stage_seconds=()

complain() {
    echo "$(basename "$0"): $*" >&2
}

die() {
    complain "$@"
    exit 2
}

absolute() {
    case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
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
# Every step has its own `|| return`: `set -e` is off in what `stage` calls.
install_environment() {
    local python wanted stamp="$venv/.cacheflow-installed"
    wanted=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum) || return 2
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted $root" ]; then
        echo "environment $venv is up to date"
        return
    fi
    python=$(find_python) || return 2
    echo "installing into $venv: about 11 GB, some minutes"
    rm -f "$stamp" || return 2
    # An interrupted run may have left an environment without pip: making it again completes it.
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        if ! "$python" -m venv "$venv" || ! "$venv/bin/python" -m pip --version >/dev/null; then
            complain "cannot make an environment in $venv; remove it, or give another with --venv"
            return 2
        fi
    fi
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/scripts/constraints.txt" --editable "$root[dev]"; then
        complain "pip could not install into $venv: see its lines above, then run this again"
        return 2
    fi
    echo "$wanted $root" >"$stamp"
}
