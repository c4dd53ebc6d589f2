#!/bin/sh
# Train on the hosts of a file, one a line, under Open MPI, MPICH or Intel MPI.
#
#     sh examples/mpi/train.sh HOSTFILE RANKS_PER_HOST config.json [--set run.steps=1000 ...]
#
# MPIEXEC names the launcher; the first mpiexec of PATH is used if it is not set. The same Python must be on all hosts.
set -eu
hosts=$1
each=$2
shift 2
mpiexec=${MPIEXEC:-mpiexec}
ranks=$(($(grep -c . "$hosts") * each))

# By this secret the ranks know each other.
ZEROMESH_SECRET=${ZEROMESH_SECRET:-$(python3 -c 'import secrets; print(secrets.token_hex())')}
export ZEROMESH_SECRET

if "$mpiexec" --version 2>&1 | grep -qE "Open MPI|OpenRTE|PRRTE"; then
    # A line of the file is one slot, unless it says slots=8.
    exec "$mpiexec" --hostfile "$hosts" -n "$ranks" -N "$each" --oversubscribe --bind-to none \
        -x PATH -x ZEROMESH_SECRET zeromesh train "$@" --auto-resume
fi
exec "$mpiexec" -f "$hosts" -n "$ranks" -ppn "$each" -genvlist PATH,ZEROMESH_SECRET zeromesh train "$@" --auto-resume
