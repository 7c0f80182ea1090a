#!/usr/bin/env bash
# Test under Slurm.
#
# usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of tools/test.py]
#   GPUS (8) is the number of processes, GPUS_PER_NODE (8, or GPUS where that is less) and CPUS_PER_TASK (5) are given
#   to srun, with the words of SRUN_ARGS.
set -euo pipefail

if [[ $# -lt 4 ]]; then
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | tail -n +2 >&2
    exit 2
fi
partition="$1"
job_name="$2"
config="$3"
checkpoint="$4"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
gpus="${GPUS:-8}"
per_node="${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}"
read -ra extra <<<"${SRUN_ARGS:-}"

PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec srun --partition "$partition" --job-name "$job_name" \
    --ntasks "$gpus" --ntasks-per-node "$per_node" --gres "gpu:$per_node" --cpus-per-task "${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 "${extra[@]}" \
    "${MMSPECTRAL_PYTHON:-python}" -u "$here/test.py" "$config" "$checkpoint" --launcher slurm "${@:5}"
