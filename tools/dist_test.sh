#!/usr/bin/env bash
# Test on several GPUs of one or more machines.
#
# usage: bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
#   GPUS is the number per machine. On several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT on each of them.
#   On one machine a free port is chosen unless PORT is set, so that two jobs can run side by side.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

[[ $# -ge 3 ]] || usage
launch_with_torchrun "$3" test.py "$1" "$2" --launcher pytorch "${@:4}"
