#!/usr/bin/env bash
# Makes the Python environment, trains the four versions from the same weights on the same real text (the source of
# Python's standard library), checks that they compute the same losses and gradients, and compares them in a table.
# Options go to all four training scripts:
#   ./scripts/quickstart.sh                               the small preset on a GPU, a smaller model on a CPU
#   ./scripts/quickstart.sh --preset medium --use-amp
#   ./scripts/quickstart.sh --results runs/today          keeps the four metrics files
#   TINY_LLAMA_PYTHON=python3.12 ./scripts/quickstart.sh  from this Python; more settings: scripts/common/machine/environment.sh
# Exit status: 0; 1 if a version fails or disagrees with version 1; 2 for a bad option; 130 after Ctrl-C.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called as sh quickstart.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common/machine/environment.sh"
[[ " $* " != *" -h "* && " $* " != *" --help "* ]] || { usage && exit 0; }
# Without an environment the scripts cannot read their options yet, and to make one takes minutes.
[ -x "$PYTHON" ] || for word in "$@"; do
    name=${word%%=*}
    [[ $word != --?* ]] || grep -qF "\"${name/#--no-/--}\"" "$ROOT"/scripts/quickstart.py "$ROOT"/version1_*/tiny_llama_v1.py ||
        { say "quickstart: there is no option $name: see --help" && exit 2; }
done
use_environment run
exec "$PYTHON" "$ROOT/scripts/quickstart.py" "$@"
