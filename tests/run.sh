#!/usr/bin/env bash
# README's test command: everything but what needs a GPU, and the long soak tests (-m soak runs those).
# Arguments go to pytest.  TEST_WORKERS processes (2 unless it is set; 0: this one) take a file each at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python -m pytest -q -m "not gpu and not soak" -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
