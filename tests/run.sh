#!/usr/bin/env bash
# README's test command: everything but what needs a GPU, and the long soak tests (-m soak runs those).
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python -m pytest -q -m "not gpu and not soak" "$@"
