#!/usr/bin/env bash
# Set up the environment, then run the linters and the tests.
#
# usage: bash tools/run_tests.sh [--stack openmmlab|onedl] [--slow] [--gpu] [pytest arguments]
#   --stack  with the original OpenMMLab packages, or with the maintained forks
#   --slow   also the tests that take minutes or build environments
#   --gpu    also the tests that need a CUDA device
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
slow="not slow"
gpu="not gpu"
while [[ $# -gt 0 ]]; do
    case "$1" in
        --stack)
            MMSPECTRAL_STACK="${2:?--stack needs onedl or openmmlab}"
            shift
            ;;
        --slow) slow="" ;;
        --gpu) gpu="" ;;
        *) break ;;
    esac
    shift
done
markers="$slow${slow:+${gpu:+ and }}$gpu"

source "$root/tools/setup_env.sh"
cd "$root"
if ! "$MMSPECTRAL_PYTHON" tools/check_env.py --versions-only --tests; then
    echo "The active environment lacks what the tests need; run the commands above, then this script again." >&2
    exit 1
fi

"$MMSPECTRAL_PYTHON" -m ruff check
"$MMSPECTRAL_PYTHON" -m ruff format --check
"$MMSPECTRAL_PYTHON" -m codespell_lib
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$MMSPECTRAL_PYTHON" -m pytest -c tests/pytest.ini tests -m "$markers" -n 2 --durations 15 "$@"
