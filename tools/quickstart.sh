#!/usr/bin/env bash
# Set up the environment, then train a small spectral XCiT Mask R-CNN on the embedded shapes and show what came out.
#
# usage: bash tools/quickstart.sh [--resume] [arguments of tools/train.py]
# Leaves in work_dirs/quickstart: summary.json, the log, checkpoints, predictions.png, conditioning.png.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
source "$root/tools/setup_env.sh"
cd "$root"

config=configs/quickstart/mask-rcnn_spectral-xcit-d128-p8_fpn_shapes.py
out=work_dirs/quickstart
"$MMSPECTRAL_PYTHON" tools/check_env.py
started=$SECONDS
"$MMSPECTRAL_PYTHON" tools/train.py "$config" --work-dir "$out" "$@"
"$MMSPECTRAL_PYTHON" tools/misc/summarize_run.py "$out" \
    --train-seconds "$((SECONDS - started))" --setup-seconds "$MMSPECTRAL_SETUP_SECONDS"
