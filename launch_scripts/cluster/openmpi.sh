#!/bin/bash
# Training on the hosts of a hostfile with Open MPI as the starter: `openmpi.sh HOSTFILE arguments
# of launch_scripts/train.py`.
#
# Open MPI starts one rank per slot and forwards what -x names; MASTER_ADDR, where the ranks meet,
# is the first host of the file. Variables for all ranks go to .deepspeed_env (docs/running.md).
# OPENMPI_ARGS holds further options of mpirun.
set -eu
if [ $# -lt 2 ] || [ ! -f "$1" ]; then
    echo "usage: openmpi.sh HOSTFILE --ds_config FILE ... (HOSTFILE: see launch_scripts/cluster/hostfile.example)" >&2
    exit 2
fi
hostfile="$1"
shift
if ! ompi="$(command -v ompi_info)"; then
    echo "openmpi.sh: Open MPI is not installed (no ompi_info in PATH)" >&2
    exit 2
fi
deepspeed="$(command -v deepspeed)"
# The mpich wheel puts an mpirun of its own into .venv/bin; the one next to ompi_info must be found
# first.
PATH="$(dirname "$ompi"):$PATH"
export PATH
head="$(awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$hostfile")"
exec "$deepspeed" --hostfile "$hostfile" --launcher openmpi \
    --launcher_args "-x MASTER_ADDR=$head -x MASTER_PORT=${MASTER_PORT:-29500} ${OPENMPI_ARGS:-}" \
    launch_scripts/train.py "$@"
