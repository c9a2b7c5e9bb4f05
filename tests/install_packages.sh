#!/bin/sh
# Debian packages that tests use and `make test` does without: a browser that looks at the privacy card.
# Installs what is missing when it can; otherwise says so, and the tests that need it skip themselves.
set -eu

if command -v chromium >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "chromium is missing and can be installed by root with apt-get only: browser tests will be skipped" >&2
    exit 0
fi
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >&2; then
    echo "chromium could not be installed: browser tests will be skipped" >&2
fi
