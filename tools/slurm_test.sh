#!/usr/bin/env bash
# Test under Slurm.
#
# usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of tools/test.py]
#   GPUS (8) is the number of processes, GPUS_PER_NODE (8, or GPUS where that is less) and CPUS_PER_TASK (5) are given
#   to srun, with the words of SRUN_ARGS.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

[[ $# -ge 4 ]] || usage
launch_with_slurm "$1" "$2" test.py "$3" "$4" --launcher slurm "${@:5}"
