#!/usr/bin/env bash
# Train on several GPUs of one or more machines.
#
# usage: bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
#   GPUS is the number per machine. On several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT on each of them.
#   On one machine a free port is chosen unless PORT is set, so that two jobs can run side by side.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

[[ $# -ge 2 ]] || usage
launch_with_torchrun "$2" train.py "$1" --launcher pytorch "${@:3}"
