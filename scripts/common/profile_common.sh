# shellcheck shell=bash disable=SC2034 # the wrappers read what is set here
# Plumbing of the profiling wrappers get_*.sh: which profiler there is, what to train, where the result goes, and what
# to say when it went wrong. A wrapper sources this file, calls `setup`, and hands `profile` its profiler's command.
#
# setup leaves:  PROFILER  rocm, nsight or pytorch      TOOL  the profiler's command     VERSION  1 to 4
#                TRAIN     the training command         OUT   the folder of this result  DRY_RUN  empty or 1
#
# Settings, those of environment.sh: TINY_LLAMA_PYTHON, TINY_LLAMA_VENV and TINY_LLAMA_CPU=1; and ROCM_PATH.

SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
WRAPPER=${BASH_SOURCE[${#BASH_SOURCE[@]} - 1]}
HERE=$(cd "$(dirname "$WRAPPER")" && pwd)
NAME=$(basename "$WRAPPER")

fail() { # STATUS SENTENCE: end with that status
    echo "$NAME: $2" >&2
    exit "$1"
}

warn() { echo "$NAME: warning: $1" >&2; }

usage() { # the comment at the top of the wrapper is its help
    sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$WRAPPER"
}

# ---------------------------------------------------------------- what there is

find_tool() { # NAMES...: set TOOL to the first that is installed, and put its folder on PATH
    local name folder
    for name in "$@"; do
        for folder in "" "${ROCM_PATH:-/opt/rocm}/bin/" /opt/rocm/core*/bin/ /usr/local/cuda/bin/; do
            if command -v "$folder$name" >/dev/null 2>&1; then
                TOOL=$name
                [ -z "$folder" ] || PATH=$folder:$PATH
                return 0
            fi
        done
    done
    return 1
}

have_amd_gpu() { [ "${TINY_LLAMA_CPU:-0}" != 1 ] && { [ -e /dev/kfd ] || [ -e /dev/dxg ]; }; }

have_nvidia_gpu() { [ "${TINY_LLAMA_CPU:-0}" != 1 ] && { [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; }; }

choose_profiler() { # WANTED "ROCM TOOLS" NSIGHT_TOOL: set PROFILER, TOOL and WHY
    local rocm_tools reason
    read -r -a rocm_tools <<<"$2"
    reason="${rocm_tools[0]} is not installed"
    case $1 in
        rocm)
            find_tool "${rocm_tools[@]}" || fail 1 "$reason: it is not on PATH and not in ${ROCM_PATH:-/opt/rocm}/bin"
            PROFILER=rocm WHY="it was asked for"
            return
            ;;
        nsight)
            find_tool "$3" || fail 1 "$3 is not installed: it is not on PATH and not in /usr/local/cuda/bin"
            PROFILER=nsight WHY="it was asked for"
            return
            ;;
        pytorch) PROFILER=pytorch TOOL="PyTorch's profiler" WHY="it was asked for" && return ;;
        auto) ;;
        *) fail 2 "--profiler must be auto, rocm, nsight or pytorch, not $1" ;;
    esac
    if find_tool "${rocm_tools[@]}"; then
        have_amd_gpu && PROFILER=rocm WHY="there is an AMD GPU" && return
        reason="$TOOL is installed, but there is no AMD GPU here (no /dev/kfd)"
    fi
    if have_nvidia_gpu; then
        find_tool "$3" && PROFILER=nsight WHY="$reason" && return
        reason="$reason, nor is $3"
    fi
    PROFILER=pytorch TOOL="PyTorch's profiler" WHY=$reason
}

tool_has() { # OPTION [SUBCOMMAND]: whether the profiler's help names the option; no GPU is needed for that
    local help
    help=$("$TOOL" ${2:+"$2"} --help 2>&1) || fail 1 "$TOOL does not start: $(tail -n 1 <<<"$help")"
    grep -Eq -- "(^|[^[:alnum:]-])$1([^[:alnum:]-]|\$)" <<<"$help"
}

find_python() {
    local made=${TINY_LLAMA_VENV:-$(dirname "$SCRIPTS")/.venv}/bin/python
    PYTHON=${TINY_LLAMA_PYTHON:-python3}
    [ -n "${TINY_LLAMA_PYTHON:-}${VIRTUAL_ENV:-}" ] || [ ! -x "$made" ] || PYTHON=$made
    command -v "$PYTHON" >/dev/null 2>&1 || fail 1 "no $PYTHON here: run scripts/quickstart.sh or set TINY_LLAMA_PYTHON"
}

# ---------------------------------------------------------------- what to run

training_command() { # DEFAULT OPTIONS -- OPTIONS OF THE USER, which win by coming last
    local script option sizes=(--batch-size 8 --seq-len 128)
    script=$(echo "$HERE"/tiny_llama_v[1-4].py)
    [ -f "$script" ] || fail 1 "there is no tiny_llama_v*.py beside it in $HERE"
    VERSION=${script%.py} && VERSION=${VERSION##*v}
    [ "$HERE" != "$PWD" ] || script=${script##*/}
    if [ "$PROFILER" = pytorch ] && ! have_amd_gpu && ! have_nvidia_gpu; then
        sizes=(--hidden-dim 64 --num-layers 2 --num-heads 4 --batch-size 2 --seq-len 32)
        [[ " $* " = *" --preset"* ]] || echo "$NAME: no GPU here: profiles a very small model"
    fi
    # Single sizes would overrule the preset that the user asks for.
    [[ " $* " != *" --preset"* ]] || sizes=()
    TRAIN=("$PYTHON" "$script" ${sizes[@]+"${sizes[@]}"})
    for option in "$@"; do
        [ "$option" = -- ] || TRAIN+=("$option")
    done
}

name_result() { # PREFIX such as traces/trace: set OUT, a folder that does not exist yet
    local root=$HERE
    [ "$HERE" != "$PWD" ] || root=.
    OUT=${OUTPUT_DIR:-$root}/$1_$(date +%Y%m%d_%H%M%S)
    OUT=${OUT#./}
    [[ $OUT != *..* ]] || OUT=$(realpath -m "$OUT") # rocprof-compute refuses a path with ..
    while [ -e "$OUT" ]; do OUT+=_2; done
}

make_result() {
    mkdir -p "$OUT" 2>/dev/null || fail 1 "$OUT cannot be made: choose a writable folder with --output-dir"
}

take_flag() { # FLAG OPTIONS...: set FLAG to 1 or nothing, and REST to the other options
    local wanted=$1 option
    shift
    FLAG="" REST=()
    for option in "$@"; do
        if [ "$option" = "$wanted" ]; then FLAG=1; else REST+=("$option"); fi
    done
}

take_counters() { # OPTIONS...: set FLAG to 1 where --pmc is one, COUNTERS to the names after it, REST to the others
    local names
    FLAG="" REST=() COUNTERS=()
    while [ $# -gt 0 ]; do
        if [ "$1" = --pmc ]; then
            FLAG=1
            while [ $# -gt 1 ] && [[ $2 != -* ]]; do
                read -r -a names <<<"${2//,/ }"
                COUNTERS+=("${names[@]}")
                shift
            done
        else
            REST+=("$1")
        fi
        shift
    done
}

setup() { # PREFIX "ROCM TOOLS" NSIGHT_TOOL DEFAULT_OPTIONS... -- OPTIONS OF THE USER
    local prefix=$1 rocm=$2 nsight=$3 wanted=auto defaults=() passed=()
    shift 3
    while [ "$1" != -- ]; do defaults+=("$1") && shift; done
    shift
    DRY_RUN="" OUTPUT_DIR=""
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) usage && exit 0 ;;
            --dry-run) DRY_RUN=1 ;;
            --profiler | --output-dir)
                [ $# -gt 1 ] || fail 2 "$1 needs a value"
                [ "$1" = --profiler ] && wanted=$2 || OUTPUT_DIR=${2%/}
                shift
                ;;
            *) passed+=("$1") ;;
        esac
        shift
    done
    find_python
    choose_profiler "$wanted" "$rocm" "$nsight"
    echo "$NAME: uses $TOOL, because $WHY"
    training_command ${defaults[@]+"${defaults[@]}"} -- ${passed[@]+"${passed[@]}"}
    [ "$PROFILER" != rocm ] || prepare_rocm
    name_result "$prefix"
    export PYTHONUNBUFFERED=1 # the log is a pipe, and progress should be seen when it happens
}

prepare_rocm() { # what a machine may hold against the ROCm profilers
    if [ -e /dev/kfd ] && ! { [ -r /dev/kfd ] && [ -w /dev/kfd ]; } && [ -z "$DRY_RUN" ]; then
        fail 1 "no permission for /dev/kfd: your user must be in the groups render and video"
    fi
    # rocprofv3 takes these as defaults and adds an inherited output format to the one that is asked for.
    local name
    for name in $(compgen -v ROCPROF_); do
        case $name in ROCPROF_LOG_LEVEL | ROCPROF_TMPDIR | ROCPROF_COMPUTE_*) ;; *) unset "$name" ;; esac
    done
    # torch.compile's helper processes would each be profiled and leave files of their own.
    export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
}

# ---------------------------------------------------------------- running

counter_file() { # FILE: the counters in the form that rocprofv3 of ROCm 6.2 reads
    echo "echo 'pmc: ${COUNTERS[*]}' > $1"
    [ -n "$DRY_RUN" ] || { make_result && echo "pmc: ${COUNTERS[*]}" >"$1"; }
}

show() { # COMMAND...: print it as it could be typed
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[[:alnum:]_@%+=:,./-]+$ ]] || word=$(printf %q "$word")
        line+=" $word"
    done
    echo "${line# }"
}

profile() { # COMMAND...: show and run it, keep what it prints in log.txt, end with its status if it fails
    show "$@"
    [ -z "$DRY_RUN" ] || return 0
    make_result
    show "$@" >"$OUT/command.txt"
    export ROCPROF_TMPDIR=${ROCPROF_TMPDIR:-$OUT}
    local codes
    set +e
    "$@" 2>&1 | tee -i "$OUT/log.txt"
    codes=("${PIPESTATUS[@]}")
    set -e
    [ "${codes[0]}" = 0 ] || explain "${codes[0]}"
    [ "${codes[1]}" = 0 ] || fail 1 "$OUT/log.txt cannot be written: is the disk full?"
}

explain() { # STATUS: end with it and the reason that the log gives
    local log=$OUT/log.txt status=$1
    said() { grep -Eq -- "$1" "$log"; }
    [ "$status" != 130 ] || fail 130 "interrupted; $OUT is incomplete"
    if said "No space left on device"; then
        fail "$status" "the disk is full: free some space, or choose another place with --output-dir"
    elif said "ERR_NVGPUCTRPERM"; then
        fail "$status" "no permission for the GPU's counters: the administrator must allow them to users"
    elif said "perf_event_paranoid|CAP_PERFMON"; then
        fail "$status" "no permission for counters: kernel.perf_event_paranoid must be 2 or less, or CAP_PERFMON given"
    elif said "Unable to open /dev/kfd|/dev/kfd.*[Pp]ermission denied"; then
        fail "$status" "no permission for /dev/kfd: your user must be in the groups render and video"
    elif said "Cannot find a supported arch"; then
        fail "$status" "$TOOL does not support this GPU: get_counters.sh --pmc reads single counters on it"
    elif said "No module named 'torch'"; then
        fail "$status" "$PYTHON has no PyTorch: run scripts/quickstart.sh, or set TINY_LLAMA_PYTHON to one that has it"
    elif said "free\(\): invalid pointer|No HIP GPUs are available"; then
        fail "$status" "no GPU under the profiler: PyTorch and the profiler must come from the same ROCm release ($log)"
    fi
    local without=""
    [ "$PROFILER" != nsight ] || without="; --profiler pytorch does without $TOOL"
    fail "$status" "the training script or its profiler ended with exit status $status; what it said is in $log$without"
}

largest() { # PATTERN...: the largest file of the first name that the result holds; it ends the wrapper if there is none
    [ -z "$DRY_RUN" ] || return 0
    local pattern file best="" most=0 size
    for pattern in "$@"; do
        while IFS= read -r file; do
            size=$(wc -c <"$file")
            [ "$size" -le "$most" ] || { most=$size && best=$file; }
        done < <(find "$OUT" -name "$pattern" -type f)
        [ -z "$best" ] || break
    done
    [ -n "$best" ] || fail 1 "$TOOL left no $1 in $OUT: see $OUT/log.txt, and whether the disk is full"
    echo "$best"
}

report() { # TOOL.py OPTIONS...: read the result with a tool of scripts/; a result that it cannot read is a failure
    [ -z "$DRY_RUN" ] || return 0
    "$PYTHON" "$SCRIPTS/$1" "${@:2}" || fail 1 "$OUT holds no result: see $OUT/log.txt"
}

export_report() { # FILE COMMAND...: show and run what turns the report of nsys or ncu into a table; its output to FILE
    show "${@:2}"
    [ -z "$DRY_RUN" ] || return 0
    largest "report.*-rep" >/dev/null
    "${@:2}" >"$OUT/$1" || fail 1 "$TOOL could not export its report in $OUT: --profiler pytorch does without it"
}

finish() { # SENTENCES...: what the result is, once there is one
    [ -n "$DRY_RUN" ] || printf '%s\n' "$@"
}
