# shellcheck shell=bash disable=SC2034 # the bodies read what is set here
# First half of every profiling wrapper: find the profiler, split the command line, build the training command.
#
# setup leaves:  PROFILER  rocm, nsight or pytorch      TOOL    the profiler's command     RELEASE  of ROCm, if known
#                TRAIN     the training command         OUT     the folder of this result  DRY_RUN  empty or 1
#                EXTRA     options for the profiler     PLACE   OUT, or OUT/rank@RANK@ with several processes;
#                WORKLOAD  a short name of it           FIRST   that of rank 0
#
# Environment: TINY_LLAMA_PYTHON, TINY_LLAMA_VENV and TINY_LLAMA_CPU=1 as in environment.sh, and ROCM_PATH.

[ "${TINY_LLAMA_CPU:-0}" != 1 ] || export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1
# With a CDPATH cd may print the folder too.
SCRIPTS=$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
WRAPPER=${WRAPPER:-${BASH_SOURCE[${#BASH_SOURCE[@]} - 1]}}
HERE=$(CDPATH="" cd "$(dirname "$WRAPPER")" && pwd)
NAME=$(basename "$WRAPPER")
# shellcheck source=SCRIPTDIR/run.sh
source "$SCRIPTS/common/machine/wrappers/run.sh"

MADE="" # the folder that name_result made

fail() { # STATUS SENTENCE: exit with that status; a result that was not begun leaves no folder
    [ -z "$MADE" ] || rmdir "$MADE" "$(dirname "$MADE")" 2>/dev/null || true
    printable "$NAME: $2" >&2
    exit "$1"
}

say() { printable "$NAME: $1"; }

warn() { say "warning: $1" >&2; }

usage() { sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$WRAPPER"; } # the wrapper's first comment

value_of() { # OPTION VALUE...: set VALUE and TAKEN, or refuse an option without a value, before another option too
    [[ $# -gt 1 && $2 != -[!0-9]* ]] || fail 2 "$1 needs a value"
    VALUE=$2 TAKEN=2
}

# ---------------------------------------------------------------- the profiler

for folder in "${ROCM_PATH:-/opt/rocm}/bin" /opt/rocm/core*/bin /usr/local/cuda/bin; do PATH+=:$folder; done

find_tool() { # NAMES...: set TOOL to the first that is installed
    for TOOL in "$@"; do
        ! command -v "$TOOL" >/dev/null || return 0
    done
    return 1
}

have_amd_gpu() { [ "${TINY_LLAMA_CPU:-0}" != 1 ] && { [ -e /dev/kfd ] || [ -e /dev/dxg ]; }; }

have_nvidia_gpu() { [ "${TINY_LLAMA_CPU:-0}" != 1 ] && { [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; }; }

pytorch_has_gpu() { # not where WSL has a device for any GPU, nor where the driver is too old
    { have_amd_gpu || have_nvidia_gpu; } &&
        "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

choose_profiler() { # WANTED "ROCM TOOLS" NSIGHT_TOOL: set PROFILER, TOOL and WHY
    local rocm_tools missing="is not installed: it is not on PATH and not in"
    read -r -a rocm_tools <<<"$2"
    PROFILER=$1 WHY="it was asked for"
    case $1 in
        rocm) find_tool "${rocm_tools[@]}" || fail 1 "${rocm_tools[0]} $missing ${ROCM_PATH:-/opt/rocm}/bin" ;;
        nsight) find_tool "$3" || fail 1 "$3 $missing /usr/local/cuda/bin" ;;
        pytorch) TOOL="PyTorch's profiler" ;;
        auto)
            PROFILER=pytorch WHY="${rocm_tools[0]} is not installed"
            have_amd_gpu || have_nvidia_gpu || WHY="there is no GPU here"
            if find_tool "${rocm_tools[@]}"; then
                WHY="$TOOL is installed, but there is no AMD GPU here (no /dev/kfd)"
                ! have_amd_gpu || { PROFILER=rocm WHY="there is an AMD GPU" && return; }
            fi
            ! have_nvidia_gpu || if find_tool "$3"; then PROFILER=nsight && return; else WHY+=", and $3 is not installed"; fi
            TOOL="PyTorch's profiler"
            ;;
        *) fail 2 "--profiler must be auto, rocm, nsight or pytorch, got $1" ;;
    esac
}

tool_has() { # OPTION [WORDS...]: whether the profiler's help, or that of these words, names the option; needs no GPU
    local help
    help=$("$TOOL" "${@:2}" --help 2>&1) || fail 1 "$(reason 1 "$(plain <<<"$help")")"
    grep -Eq -- "(^|[^[:alnum:]-])$1([^[:alnum:]-]|\$)" <<<"$help"
}

find_release() { # set RELEASE to ROCm's, such as 6.4.1, or to nothing
    local tool file
    tool=$(command -v "$TOOL")
    for file in {"${tool%/*}/..","$(dirname "$(realpath "$tool")")/..","${ROCM_PATH:-/opt/rocm}"}/.info/version; do
        [ ! -r "$file" ] || { RELEASE=$(sed 's/-.*//;q' "$file") && return; }
    done
    RELEASE=$(rocprofv3 --version 2>/dev/null | sed -n 's/.*rocm_version: *\([0-9.]*\).*/\1/p') || RELEASE=""
}

prepare_rocm() { # check permissions, and clear what would change the profiler's behaviour
    local name
    if [ -e /dev/kfd ] && ! { [ -r /dev/kfd ] && [ -w /dev/kfd ]; } && [ -z "$DRY_RUN" ]; then
        fail 1 "$NO_KFD"
    fi
    for name in $(compgen -v ROCPROF_); do # rocprofv3 takes these as defaults, and adds to the requested formats
        case $name in ROCPROF_LOG_LEVEL | ROCPROF_TMPDIR | ROCPROF_COMPUTE_*) ;; *) unset "$name" ;; esac
    done
    # Otherwise every helper process of torch.compile is profiled and writes files of its own.
    export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
    find_release
}

# ---------------------------------------------------------------- the training command

find_python() { # an absolute path: rocprof-compute up to ROCm 6.3 tests whether the command is a file
    local made=${TINY_LLAMA_VENV:-$(dirname "$SCRIPTS")/.venv}/bin/python
    PYTHON=${TINY_LLAMA_PYTHON:-python3}
    [ -n "${TINY_LLAMA_PYTHON:-}${VIRTUAL_ENV:-}" ] || [ ! -x "$made" ] || PYTHON=$made
    PYTHON=$(command -v "$PYTHON") || fail 1 "there's no ${TINY_LLAMA_PYTHON:-python3} here: run scripts/quickstart.sh or set TINY_LLAMA_PYTHON"
    [[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
}

choose_graph() { # SCRIPT OPTIONS: set GRAPH to --no-graph where a replayed graph would hide its kernels
    # Under the profilers of ROCm and of PyTorch the script runs eagerly by itself, and says why.
    local why=""
    GRAPH=()
    [ -z "${COUNTERS_WANTED:-}" ] || [ "$PROFILER" = pytorch ] || why="counters are read kernel by kernel"
    [ "$PROFILER" != rocm ] || why="a replayed graph may hide kernels from ROCm's profilers"
    [ -n "$why" ] || return 0
    case " $* " in
        *" --no-graph "*) ;;
        *" --graph "*) warn "$why: compare the number of launches with that of --no-graph" ;;
        *)
            [ "$PROFILER" = nsight ] && grep -q '^GRAPH_BY_DEFAULT = True' "$1" || return 0
            GRAPH=(--no-graph)
            say "training with --no-graph, because $why"
            ;;
    esac
}

training_command() { # OPTIONS...: set TRAIN
    local script sizes=(--batch-size 8 --seq-len 128)
    script=$(echo "$HERE"/tiny_llama_v[1-4].py)
    [ -f "$script" ] || fail 1 "there is no tiny_llama_v*.py in $HERE: call it by its link in a version's folder"
    WORKLOAD=$(basename "$script" .py)
    choose_graph "$script" "$@"
    [ "$HERE" != "$PWD" ] || script=${script##*/}
    if [[ " $* " = *" --preset"* ]]; then
        sizes=() # single sizes would overrule the preset
    elif [ "$PROFILER" = pytorch ] && ! pytorch_has_gpu; then
        sizes=(--hidden-dim 64 --num-layers 2 --num-heads 4 --batch-size 2 --seq-len 32)
        say "PyTorch sees no GPU here: profiling a very small model"
    fi
    TRAIN=("$PYTHON" "$script" ${sizes[@]+"${sizes[@]}"} ${GRAPH[@]+"${GRAPH[@]}"} "$@")
}

name_result() { # PREFIX such as traces/trace: make OUT, a folder of this call alone; set PLACE and FIRST
    local root=$HERE place="choose a writable folder with --output-dir"
    [ "$HERE" != "$PWD" ] || root=.
    root=${OUTPUT_DIR:-$root}
    OUT=${root%/}/$1_$(date +%Y%m%d_%H%M%S)
    OUT=${OUT#./}
    [[ $OUT != *..* ]] || OUT=$(realpath -m "$OUT") # rocprof-compute refuses a path with ..
    if [ -z "$DRY_RUN" ]; then # another wrapper may begin in the same second
        mkdir -p "$(dirname "$OUT")" 2>/dev/null || fail 1 "$(dirname "$OUT") cannot be made: $place"
        until mkdir "$OUT" 2>/dev/null; do
            [ -e "$OUT" ] || fail 1 "$OUT cannot be made: $place"
            OUT+=_2
        done
        MADE=$OUT
    fi
    PLACE=$OUT${PROCESSES:+/rank@RANK@} FIRST=$OUT${PROCESSES:+/rank0}
}

own_option() { return 1; } # a body replaces it: OPTION VALUE... -> set its variables, and TAKEN to the words used

setup() { # PREFIX "ROCM TOOLS" NSIGHT_TOOL "DEFAULTS" OPTIONS...: the user's options win by coming last
    local prefix=$1 rocm=$2 wanted=auto defaults=() TAKEN VALUE
    NSIGHT=$3 DRY_RUN="" OUTPUT_DIR="" PROCESSES="" RELEASE="" EXTRA=() KERNEL="" PYTORCH_OPTIONS=()
    PASSED=() # the user's options for the training script
    read -r -a defaults <<<"$4" || true
    shift 4
    while [ $# -gt 0 ]; do
        TAKEN=1
        case $1 in
            --profiler=* | --output-dir=* | --nproc-per-node=* | --pmc=* | --set=* | --kernel=*)
                set -- "${1%%=*}" "${1#*=}" "${@:2}"
                ;;
        esac
        case $1 in
            -h | --help) usage && exit 0 ;;
            --dry-run) DRY_RUN=1 ;;
            --profiler) value_of "$@" && wanted=$VALUE ;;
            --output-dir) value_of "$@" && OUTPUT_DIR=$VALUE ;;
            --nproc-per-node)
                value_of "$@" && PROCESSES=$VALUE
                [[ $VALUE =~ ^[1-9][0-9]*$ ]] || fail 2 "--nproc-per-node must be 1 or more, got $VALUE"
                ;;
            --) EXTRA=("${@:2}") && TAKEN=$# ;;
            *) own_option "$@" || PASSED+=("$1") ;;
        esac
        shift "$TAKEN"
    done
    [ "$PROCESSES" != 1 ] || PROCESSES=""
    [ -z "$(compgen -v TINYTRANSFORMER_)" ] ||
        warn "$(compgen -v TINYTRANSFORMER_ | paste -sd ' ') has no effect: give options, such as --batch-size 8"
    find_python
    choose_profiler "$wanted" "$rocm" "$NSIGHT"
    if [ "$PROFILER" = rocm ]; then
        prepare_rocm
        choose_formats
        choose_regions
    fi
    say "uses $TOOL${RELEASE:+ of ROCm $RELEASE}, because $WHY"
    case $PROFILER in
        rocm)
            if [ ${#REGIONS[@]} -gt 0 ]; then
                say "asking for the measured steps alone (--selected-regions)$(
                    [ -z "${COUNTERS_WANTED:-}" ] || echo "; counters are those of the whole run"
                )"
            elif selects_part; then
                say "the profile holds the part of the run that your options select"
            else
                say "the profile holds start-up and warm-up too$(
                    [[ $("$TOOL" --help 2>&1) != *--collection-period* ]] || # rocprofv3 of ROCm 6.4 and later
                        echo "; --collection-period START:LENGTH:1 selects a part of the run, in seconds"
                )"
            fi
            ;;
        nsight) say "the profile holds $([ -n "$STEPS" ] && echo "the measured steps alone" || echo "the whole run")" ;;
    esac
    [ "$PROFILER" != pytorch ] || [ ${#EXTRA[@]} = 0 ] || fail 2 "PyTorch's profiler takes no options after --"
    training_command ${defaults[@]+"${defaults[@]}"} ${PASSED[@]+"${PASSED[@]}"}
    name_result "$prefix"
    export PYTHONUNBUFFERED=1 # the log is a pipe: show progress as it happens
    # Without these PyTorch's profiler prints lines of its own between those of the script.
    export KINETO_LOG_LEVEL=${KINETO_LOG_LEVEL:-6} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
}
