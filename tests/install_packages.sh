#!/bin/sh
# Debian packages that tests use and `make test` does without: a browser that looks at the privacy card, Mesa's software
# renderer for synthetic pictures, and nginx to read shards from. Installs what is missing when it can; otherwise says so, and the tests that need it skip.
set -eu

missing=""
command -v chromium >/dev/null 2>&1 || missing="chromium"
.venv/bin/python -c 'import moderngl; moderngl.create_context(standalone=True, backend="egl", require=330)' >/dev/null 2>&1 ||
    missing="$missing libegl1 libgl1-mesa-dri"
command -v nginx >/dev/null 2>&1 || test -x /usr/sbin/nginx || missing="$missing nginx-light"
if [ -z "$missing" ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing and installable by root with apt-get only: $missing; the tests that need them will be skipped" >&2
    exit 0
fi
# shellcheck disable=SC2086
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >&2; then
    echo "could not be installed: $missing; the tests that need them will be skipped" >&2
fi
