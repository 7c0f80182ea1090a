# Sourced by dist_*.sh and slurm_*.sh: how several processes are started.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
python="${MMSPECTRAL_PYTHON:-python}"
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"

# Print the comments at the top of the calling script.
usage() {
    sed -n 's/^# \{0,1\}//p' "$0" | tail -n +2 >&2
    exit 2
}

# GPUS TOOL ARGUMENTS...
launch_with_torchrun() {
    local nodes="${NNODES:-1}" rendezvous
    if [[ "$nodes" == 1 && -z "${PORT:-}" ]]; then
        rendezvous=(--standalone --local-addr 127.0.0.1)
    else
        rendezvous=(--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}")
        rendezvous+=(--master-port "${PORT:-29500}")
    fi
    exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$1" "${rendezvous[@]}" "$here/$2" "${@:3}"
}

# PARTITION JOB_NAME TOOL ARGUMENTS...
launch_with_slurm() {
    local gpus="${GPUS:-8}" extra
    local per_node="${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}"
    read -ra extra <<<"${SRUN_ARGS:-}"
    exec srun --partition "$1" --job-name "$2" \
        --ntasks "$gpus" --ntasks-per-node "$per_node" --gres "gpu:$per_node" --cpus-per-task "${CPUS_PER_TASK:-5}" \
        --kill-on-bad-exit=1 "${extra[@]}" "$python" -u "$here/$3" "${@:4}"
}
