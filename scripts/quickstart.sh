#!/usr/bin/env bash
# Makes the Python environment, trains the four versions from the same weights on the same real text (the source of
# Python's standard library), checks that they compute the same losses and gradients, and compares them in a table.
# Options go to all four training scripts:
#   ./scripts/quickstart.sh                               the small preset on a GPU, a smaller model on a CPU
#   ./scripts/quickstart.sh --preset medium --use-amp
#   ./scripts/quickstart.sh --results runs/today          keeps the four metrics files
# Exit status: 0; 1 where a version fails or disagrees with version 1; 2 for a bad option; 130 after Ctrl-C.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common/environment.sh"
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
use_environment run
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
