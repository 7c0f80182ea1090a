#!/usr/bin/env bash
# Train under Slurm.
#
# usage: bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]
#   GPUS (8) is the number of processes, GPUS_PER_NODE (8, or GPUS where that is less) and CPUS_PER_TASK (5) are given
#   to srun, with the words of SRUN_ARGS.
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

[[ $# -ge 4 ]] || usage
launch_with_slurm "$1" "$2" train.py "$3" --work-dir "$4" --launcher slurm "${@:5}"
