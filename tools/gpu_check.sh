#!/usr/bin/env bash
# Set up the environment, then measure and test what needs a GPU; results are written after every section.
#
# usage: bash tools/gpu_check.sh --out DIR [--only SECTION ...] [--device cuda|cpu]
#   Leaves in DIR: results.json, results.md, and the output of each command. Without a GPU it takes a reduced form.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
out=("$@")
source "$root/tools/setup_env.sh"
exec "$MMSPECTRAL_PYTHON" "$root/tools/experiments/gpu_check.py" "${out[@]}"
