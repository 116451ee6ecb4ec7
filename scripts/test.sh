#!/usr/bin/env bash
# Install (once) and run the tests.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/test.sh [--full] [--venv DIR] [PYTEST ARGUMENTS...]

Installs everything into .venv (or DIR) on the first run, then runs the tests:
first the fast ones, then those against the real SGLang (marked `engine`).

  --full       also matrices, soaks and acceptance (marked `full`)
  --venv DIR   use an environment in DIR instead of .venv

examples:
  scripts/test.sh
  scripts/test.sh --full
  scripts/test.sh tests/tiers -k cap
TEXT
}

marks="not bench and not full"
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --full) marks="not bench" ;;
    --venv) venv=$(absolute "${2:?--venv needs a directory}") && shift ;;
    -h | --help) usage && exit 0 ;;
    *) arguments+=("$1") ;;
    esac
    shift
done

selected=no

run_pytest() {
    local status=0
    "$venv/bin/python" -m pytest -q -m "$1" --durations=8 ${arguments[@]+"${arguments[@]}"} || status=$?
    # 5: no test was selected; fine where arguments narrow one of the two runs.
    if [ "$status" -eq 5 ] && [ ${#arguments[@]} -gt 0 ]; then
        return 0
    fi
    selected=yes
    return "$status"
}

cd "$root"
trap print_stages EXIT
stage "install" install_environment
status=0
stage "fast tests" run_pytest "$marks and not engine" || status=$?
stage "tests with the real SGLang" run_pytest "$marks and engine" || status=$?
[ "$selected" = yes ] || die "no test matches: ${arguments[*]}"
exit "$status"
