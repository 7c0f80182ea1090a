#!/usr/bin/env bash
# Train on several GPUs of one or more machines.
#
# usage: bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
#   GPUS is the number per machine. On several machines set NNODES, NODE_RANK, MASTER_ADDR and PORT on each of them.
#   On one machine a free port is chosen unless PORT is set, so that two jobs can run side by side.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | tail -n +2 >&2
    exit 2
fi
config="$1"
gpus="$2"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
nodes="${NNODES:-1}"
if [[ "$nodes" == 1 && -z "${PORT:-}" ]]; then
    rendezvous=(--standalone --local-addr 127.0.0.1)
else
    rendezvous=(--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${PORT:-29500}")
fi

PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "${MMSPECTRAL_PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$gpus" "${rendezvous[@]}" \
    "$here/train.py" "$config" --launcher pytorch "${@:3}"
