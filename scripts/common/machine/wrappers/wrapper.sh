#!/usr/bin/env bash
# Run the body of a profiling wrapper: wrapper.sh WRAPPER OPTIONS...; get_trace.sh has trace.sh.
set -euo pipefail
WRAPPER=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=/dev/null
source "$SCRIPTS/common/machine/wrappers/${NAME#get_}"
conclude
