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

# One test opens a page in a browser; without one it is skipped.
mmspectral_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if ! mmspectral_browser >/dev/null; then
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "Installing chromium for the test that opens a page in a browser." >&2
        { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || true
    fi
    mmspectral_browser >/dev/null || echo "The browser test will be skipped: there is no chromium or google-chrome" \
        "on PATH (Debian: apt-get install chromium)." >&2
fi

"$MMSPECTRAL_PYTHON" -m ruff check
"$MMSPECTRAL_PYTHON" -m ruff format --check
"$MMSPECTRAL_PYTHON" -m codespell_lib
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$MMSPECTRAL_PYTHON" -m pytest -c tests/pytest.ini tests -m "$markers" -n 2 --durations 15 "$@"
