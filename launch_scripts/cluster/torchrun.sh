#!/bin/bash
# Training with torchrun, started on every host alike: `HEAD=node1 NNODES=4 GPUS=8 torchrun.sh
# arguments of launch_scripts/train.py`.
#
# HEAD is any of the hosts; its agent keeps the rendezvous at port PORT (29400). On a machine
# without GPUs, GPUS is the number of ranks.
set -eu
if [ $# -lt 1 ] || [ -z "${HEAD:-}" ] || [ -z "${NNODES:-}" ]; then
    echo "usage: HEAD=HOST NNODES=N [GPUS=N] [PORT=29400] torchrun.sh --ds_config FILE ..." >&2
    exit 2
fi
exec python launch_scripts/cluster/torchrun.py --nnodes "$NNODES" --nproc_per_node "${GPUS:-auto}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD:${PORT:-29400}" --rdzv_id "${RDZV_ID:-train}" launch_scripts/train.py "$@"
