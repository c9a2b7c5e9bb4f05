#!/bin/sh
# Debian packages that tests use and do without: what two hosts need (ssh, pdsh), what a cluster has (Open MPI, Slurm), a browser that
# looks at the privacy card, Java for the metrics of captions, a second tar, debootstrap for a bare system, Tux Paint's stamps, clip art and
# Fashion-MNIST for pictures. Installs what is missing when it can; otherwise says so, and the tests that need it skip.
# `install_packages.sh hosts` installs the first of these only, `install_packages.sh cluster` the first two. Exit code 1: apt-get failed,
# which another apt-get that runs at the same time, or a network that is gone, can mend.
set -eu

missing=""
want() { # program package ...
    command -v "$1" >/dev/null 2>&1 || test -x "/usr/sbin/$1" || missing="$missing $2"
}
want ip iproute2
want ssh openssh-client
want sshd openssh-server
want pdsh pdsh
if [ "${1:-}" != hosts ]; then
    want ompi_info openmpi-bin
    want munged munge
    want slurmctld slurmctld
    want slurmd slurmd
    want sbatch slurm-client
fi
if [ "${1:-}" = "" ]; then
    want chromium chromium
    want java default-jre-headless
    want bsdtar libarchive-tools
    want debootstrap debootstrap
    test -d /usr/share/tuxpaint/stamps || missing="$missing tuxpaint-stamps-default"
    test -d /usr/share/openclipart/png || missing="$missing openclipart-png"
    test -d /usr/share/datasets/fashion-mnist || missing="$missing dataset-fashion-mnist"
fi
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing and installable by root with apt-get only:$missing; the tests that need them will be skipped" >&2
    exit 0
fi
# Tests start daemons of their own; the machine's must not start because of them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -o DPkg::Lock::Timeout=60 -y -qq --no-install-recommends $missing; } >&2; then
    echo "could not be installed:$missing; the tests that need them would be skipped" >&2
    exit 1
fi
