#!/usr/bin/env bash
# Install (once), serve, replay an agent trace three times: new, after a flush, after a restart.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
usage: scripts/quickstart.sh [--venv DIR] [OPTIONS] [-- SGLANG FLAGS...]

Installs everything into .venv (or DIR) on the first run, starts SGLang with the
cacheflow storage backend, and replays an agent trace three times: as new, after
/flush_cache, and after a restart of the server. Then it shows where the prompt
tokens came from each time, as a table and as a plot.

  --venv DIR           use an environment in DIR instead of .venv
  --model MODEL        a model of yours, for example Qwen/Qwen3-8B on a GPU;
                       without it a tiny one with random weights is made
  --trace TRACE        a trace file or folder instead of the bundled agent trace
  --out DIR            where the results go (runs/quickstart)
  --start-timeout SEC  seconds until the server must be ready, the download of
                       a model included (1800)
  -h, --help           this text

examples:
  scripts/quickstart.sh
  scripts/quickstart.sh --model Qwen/Qwen3-8B -- --tp-size 2
TEXT
}

arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --) arguments+=("$@") && break ;;
    --venv) venv=$(absolute "${2:?--venv needs a directory}") && shift ;;
    -h | --help) usage && exit 0 ;;
    *) arguments+=("$1") ;;
    esac
    shift
done

trap print_stages EXIT
stage "install" install_environment
stage "check (cacheflow doctor)" "$venv/bin/cacheflow" doctor
stage "serve, replay, flush, restart" \
    "$venv/bin/python" "$root/scripts/quickstart.py" ${arguments[@]+"${arguments[@]}"}
