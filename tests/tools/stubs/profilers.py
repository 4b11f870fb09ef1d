#!/usr/bin/env python3
"""Stubs of the profilers of ROCm 6.2, 6.3, 6.4, 7.0 and 7.1, whose front ends were run, and of NVIDIA's.

7.13, 7.14, 10.0, 10.1 and 10.2 were read, not run: options and files as their sources and changelogs state.

Each accepts exactly the options of the real program of its release (options.json), refuses what that one refuses with
its exit status, runs the application, and leaves files of the same names and layouts, filled from ../samples. The
folder it is called from tells the release, its name the program: put rocm-7.0/ on PATH to have ROCm 7.0.

Environment: STAND_IN_RECORD=FILE appends each command line to FILE; STAND_IN_FAULT plays a fault: no-kernels,
no-report, no-import, no-range, unsupported, no-permission, no-packages, other-packages (in versions that
rocprof-compute refuses), no-amdsmi (which it needs from ROCm 7.2 on), no-locale, no-peaks, no-counters (a GPU whose
counters the release does not know), no-decoder, no-library, no-interpreter, no-second-pass, no-sampling (a GPU
that does not), no-space (a full disk, which rocprofv3 does not notice), no-pmc (as in the sources of October 2024,
between ROCm 6.2 and 6.3), no-region (the application does not reach --selected-regions), whole-run (rocprofv3 ignores
that option), pandas-3 (with which rocprof-compute of ROCm 7.0 to 7.2 fails).
"""

import csv
import gzip
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import sqlite3
import subprocess
import sys

CALLED = pathlib.Path(__file__).absolute()  # not resolved: the link's folder is the release
SAMPLES = CALLED.resolve().parent.parent / "samples"
OPTIONS = json.loads((CALLED.resolve().parent / "options.json").read_text())
PROGRAM = pathlib.Path(sys.argv[0]).name
RELEASE = CALLED.parent.name.removeprefix("rocm-")
FAULT = os.environ.get("STAND_IN_FAULT", "")


class Refused(Exception):
    """End the program with this status and this text."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def newer_than(release):
    return tuple(map(int, RELEASE.split("."))) > tuple(map(int, release.split(".")))


def options_of(program, release):
    """Return the options of a release that was run, or those of one that was read: "BASE + new ones - those gone"."""
    if release in OPTIONS[program]:
        return OPTIONS[program][release]
    base, _, changes = OPTIONS["read, not run"][program][release].partition(" +")
    new, _, gone = changes.partition(" - ")
    kept = [word for word in options_of(program, base).split() if word not in gone.split()]
    return " ".join([*kept, *new.split()])


def parse(arguments, accepted, status=2):
    """Return {option: values} and the application; refuse what the real parser does not take with this status."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given, rest = {}, arguments[:at]
    while rest:
        option, _, value = rest.pop(0).partition("=")
        if option not in accepted.split():
            raise Refused(status, f"{PROGRAM}: error: unrecognized arguments: {option}")
        values = [value] if value else []
        if option in OPTIONS["one value"].split() and not value:
            if not rest:
                raise Refused(2, f"{PROGRAM}: error: argument {option}: expected one argument")
            values = [rest.pop(0)]
        elif option in OPTIONS["several values"].split():
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))
        given[option] = values
    return given, arguments[at + 1 :]


def first(given, *options):
    """Return the value of the first of these options that is given, or ""."""
    return next((given[option][0] for option in options if given.get(option)), "")


def variables_set():
    """Return some of the variables that the real program sets in the application, by which a script knows of it."""
    if PROGRAM == "rocprof-sys-run":
        return {"ROCPROFSYS_SCRIPT_PATH": "libexec"}
    if PROGRAM == "omnitrace-run":
        return {"OMNITRACE_TRACE": "true"}
    if PROGRAM == "rocprof-compute" and newer_than("7.11"):
        return {"ROCPROF_KERNEL_TRACE": "1", "ROCPROF_COUNTER_COLLECTION": "0"}
    if PROGRAM == "omniperf" or PROGRAM == "rocprof-compute" and not newer_than("6.4"):
        return {"HSA_TOOLS_LIB": "librocprofiler64.so.1"}
    if PROGRAM in ("rocprofv3", "rocprof-compute"):
        return {"ROCP_TOOL_LIBRARIES": "librocprofiler-sdk-tool.so"}
    return {}


def run_application(command):
    """Run it and return its status, minus a signal's number if that ended it. Ctrl-C does not end this program."""
    if not command:
        raise Refused(1, "Fatal error: No application provided")
    signal.signal(signal.SIGINT, lambda *_: None)
    regions = {"STAND_IN_REGIONS": "1"} if "--selected-regions" in sys.argv else {}
    return subprocess.run(command, env=os.environ | variables_set() | regions).returncode


def opened(path):
    """Say, as the library does on stderr, that it writes this file."""
    print(f"E20250808 10:00:00.1 4711 output_stream.cpp:111] Opened result file: {path}", file=sys.stderr)
    return path


def database(sql, path, more=""):
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript((SAMPLES / sql).read_text() + more)
    connection.close()


# ---------------------------------------------------------------- rocprofv3


def output_formats(given):
    """Return the formats asked for; one in the environment is added to those of the command line."""
    known = ["csv", "json", "pftrace", *["otf2"] * newer_than("6.2"), *["rocpd"] * newer_than("6.4")]
    formats = given.get("--output-format", []) + given.get("-f", [])
    for name in formats:
        if name not in known:
            raise Refused(2, f"rocprofv3: error: argument --output-format: invalid choice: '{name}'")
    formats += os.environ.get("ROCPROF_OUTPUT_FORMAT", "").split()
    return formats or ["rocpd" if newer_than("6.4") else "csv"]


def aborted(text):
    """Return the end of a run that the tool's library aborts. ROCm 6.2 runs an input file's passes from Python."""
    frames = [f"    @     0x7f3ea3e{frame:05x}  google::LogMessage::Fail()" for frame in range(12)]
    text = "\n".join([text, "*** Check failure stack trace: ***", *frames])
    if RELEASE == "6.2":
        return Refused(1, f"{text}\nFatal error: Command '[...]' died with <Signals.SIGABRT: 6>.\n")
    return Refused(134, text)


FIRST_KERNEL = 1550151853000000  # its start in the samples of ROCm 7.0
KNOWN_COUNTERS = re.compile(r"(SQ|GRBM|TCC|TCP|FETCH|WRITE)_[A-Za-z_]+$")
SLOTS = {"SQ": 8, "GRBM": 2, "TCC": 4}  # counters of one hardware block that fit in one run
DERIVED = {"FETCH_SIZE": ["TCC"] * 3, "WRITE_SIZE": ["TCC"] * 2}


def wanted_counters(given):
    """Return the counters of the command line or of the input file that this GPU knows.

    Up to ROCm 6.3 an unknown one aborts the run. Later releases warn and read the others.
    """
    names = given.get("--pmc", [])
    if "-i" in given:
        text = pathlib.Path(given["-i"][0]).read_text()
        if not text.startswith("pmc: "):
            raise Refused(1, "the input file has no line that begins with pmc:")
        names = text.removeprefix("pmc: ").split()
    if names and FAULT == "no-counters":
        raise aborted("F tool.cpp] Agent HW architecture is not supported, no counter metrics found.")
    found = [name for name in names if KNOWN_COUNTERS.match(name)]
    if found != names:
        text = f"Unable to find all counters for agent 4 (gpu-0, gfx942) in {names}. Found: {found}"
        if not newer_than("6.3"):
            raise aborted(f"F tool.cpp] {text}")
        print(f"W tool.cpp] {text}", file=sys.stderr)
    blocks = [block for name in found for block in DERIVED.get(name, [name.split("_")[0]])]
    if any(blocks.count(block) > slots for block, slots in SLOTS.items()):
        text = "error code 38: Request exceeds the capabilities of the hardware to collect"
        raise aborted(f"F tool.cpp] Could not construct profile cfg failed with {text}")
    return found


def matches(kernel, given):
    """Return whether the filter takes the kernel: up to ROCm 6.2 by its exact short name, later by an expression."""
    if "--kernel-names" in given:
        short = re.sub(r"[<(].*", "", kernel).split(" ")[-1].split("::")[-1]
        return short in given["--kernel-names"]
    return re.search(first(given, "--kernel-include-regex"), kernel)


def write_counters(sample, names, given, path):
    """Write counter_collection.csv of these counters; those that the sample lacks get the values of SQ_WAVES."""
    header, *rows = csv.reader(sample.read_text().splitlines())
    at = header.index("Counter_Name")
    rows = [row for row in rows if matches(row[header.index("Kernel_Name")], given)]
    if not rows:
        return
    sampled = {row[at] for row in rows}
    with open(opened(path), "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(header)
        for name in names:
            source = name if name in sampled else "SQ_WAVES"
            writer.writerows([*row[:at], name, *row[at + 1 :]] for row in rows if row[at] == source)


def write_thread_traces(given, folder):
    """Write what --att leaves of each kernel that the filter takes."""
    with open(SAMPLES / "rocm-7.0" / "kernel_trace.csv", newline="") as file:
        kernels = [row["Kernel_Name"] for row in csv.DictReader(file)]
    for number, kernel in enumerate(kernels, 1):
        if matches(kernel, given):
            opened(folder / f"{os.getpid()}_shader_engine_0_{number}.att").write_bytes(b"waves")
            decoded = folder / f"ui_output_agent_4_dispatch_{number}"
            decoded.mkdir()
            (decoded / "code.json").write_text("{}")


def rocprofv3_files(given, formats, counters):
    """Write what one profiled process leaves."""
    name = first(given, "-o") or f"{platform.node()}/%pid%"
    base = pathlib.Path(first(given, "-d"), name.replace("%pid%", str(os.getpid())))
    if "-i" in given:
        base = base.parent / "pmc_1" / base.name
    base.parent.mkdir(parents=True, exist_ok=True)
    samples = SAMPLES / f"rocm-{'7.0' if newer_than('6.4') else {'6.3': '6.4'}.get(RELEASE, RELEASE)}"
    kinds = ["kernel_trace"] * bool({"--kernel-trace", "--runtime-trace"} & given.keys())
    kinds += ["kernel_stats", "domain_stats"] * ("--stats" in given)
    others = ["hip_api", "memory_copy", "marker_api", "scratch_memory", *["memory_allocation"] * newer_than("6.3")]

    def new(suffix):
        return opened(base.with_name(f"{base.name}_{suffix}"))

    # Up to 7.2 the script's roctxProfilerResume is heard only with marker tracing.
    heard = {"--marker-trace", "--runtime-trace"} & given.keys() or newer_than("7.2")
    nothing = FAULT == "no-kernels" or ("--selected-regions" in given and (FAULT == "no-region" or not heard))
    started = FIRST_KERNEL + 1 if FAULT == "whole-run" else FIRST_KERNEL - 1
    if "csv" in formats:
        new("agent_info.csv").write_text('"Node_Id","Agent_Type"\n4,"GPU"\n')
        for kind in kinds if not nothing else ():
            shutil.copy(samples / f"{kind}.csv", new(f"{kind}.csv"))
        for kind in others if {"--runtime-trace", "--hip-runtime-trace"} & given.keys() else ():
            new(f"{kind}_trace.csv").write_text('"Start_Timestamp","End_Timestamp"\n100,200\n')
            if kind == "memory_copy":
                agents = '"Agent 0","Agent 4"' if newer_than("6.4") else "0,4"
                columns = (
                    '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Start_Timestamp","End_Timestamp"'
                )
                row = f'"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE",{agents},1550151852997000,1550151852999000'
                base.with_name(f"{base.name}_{kind}_trace.csv").write_text(f"{columns}\n{row}\n")
        if heard and not nothing:
            new("marker_api_trace.csv").write_text(f'"Function","Start_Timestamp"\n"measured steps",{started}\n')
        if counters and FAULT != "no-kernels":
            target = base.with_name(f"{base.name}_counter_collection.csv")
            write_counters(samples / "counter_collection.csv", counters, given, target)
        if "--pc-sampling-beta-enabled" in given and FAULT != "no-kernels":
            new("pc_sampling_host_trap.csv").write_text('"Instruction"\n"v_add_f32"\n')
    if "--att" in given and FAULT != "no-kernels":
        write_thread_traces(given, base.parent)
    if "pftrace" in formats and FAULT != "no-report":
        new("results.pftrace").write_bytes(b"\x0a\x07 a trace")
    if "rocpd" in formats:
        message = '{"message": "measured steps"}'
        region = f"('roctxRangePushA', 4321, 4321, {started}, {started}, 0, '{message}')"
        more = f"INSERT INTO regions VALUES {region};" * bool(heard)
        more += "DELETE FROM kernels;" * nothing
        for name in {*counters} - {"SQ_WAVES", "GRBM_GUI_ACTIVE"}:
            values = f"id, dispatch_id, kernel_name, '{name}', value, duration FROM counters_collection"
            more += f"INSERT INTO counters_collection SELECT {values} WHERE counter_name = 'SQ_WAVES';"
        database("rocm-7.0/results.sql", new("results.db"), more)
    if FAULT == "no-space":
        for file in base.parent.glob(f"{base.name}_*"):
            file.write_bytes(b"")


def profile_application(command, given, formats, counters):
    """Run it and write the files. Up to ROCm 6.4 they do not come if a signal ends Python: buffers are left then."""
    buffers = pathlib.Path(os.environ.get("ROCPROF_TMPDIR", first(given, "-d")), ".rocprofv3")
    buffers.mkdir(parents=True, exist_ok=True)
    buffer = buffers / f"{os.getpid()}-kernel_dispatch.dat"
    if {"--kernel-trace", "--runtime-trace"} & given.keys():
        buffer.write_bytes(bytes(65536))
    status = run_application(command)
    if status >= 0 or newer_than("6.4"):
        buffer.unlink(missing_ok=True)
        rocprofv3_files(given, formats, counters)
    return status


def rocprofv3(arguments):
    accepted = options_of("rocprofv3", RELEASE)
    if FAULT == "no-pmc" and RELEASE == "6.3":
        accepted = " ".join(word for word in accepted.split() if word not in ("--pmc", "-E", "--extra-counters"))
    if FAULT == "no-decoder" and RELEASE == "6.4":  # which offers --att only where it finds its decoder
        accepted = " ".join(word for word in accepted.split() if not word.startswith(("--att", "--advanced")))
    given, command = parse(arguments, accepted)
    if "--version" in given:
        print(f"             version: 1.0.0\n        rocm_version: {RELEASE}.0")
        return 0
    formats = output_formats(given)
    if "--help" in given:
        print(f"usage: rocprofv3 [options] -- <application>\n{accepted}" + "\n formats: rocpd" * newer_than("6.4"))
        print("Direct csv, pftrace, and otf2 output is deprecated; use rocpd and rocpd convert" * newer_than("10.1"))
        return 0
    if newer_than("10.1") and {"csv", "pftrace"} & set(formats):
        print("[rocprofv3] Warning: The following direct rocprofv3 output format(s) are deprecated", file=sys.stderr)
    kinds = "kernel runtime sys hip hip-runtime memory-copy".split()
    traced = any(f"--{kind}-trace" in given for kind in kinds) or ("--pmc" in given and newer_than("6.4"))
    if "--stats" in given and not traced:
        raise Refused(1, "Fatal error: No tracing options were enabled for --stats option")
    if newer_than("6.4") and {"-p", "--pid"} & given.keys():
        raise Refused(1, "Fatal error: The -p shorthand option for --collection-period is now an upper-case -P")
    if "--att" in given and FAULT == "no-decoder":
        text = "rocprof-trace-decoder library path not found in ['', '/opt/rocm/lib']"
        raise Refused(1, f"Fatal error: {text}")
    counters = wanted_counters(given)
    if FAULT == "no-library":  # up to ROCm 6.4 the loader alone says so
        library = "/opt/rocm/lib/rocprofiler-sdk/librocprofiler-sdk-tool.so"
        if newer_than("6.4"):
            raise Refused(1, f"Fatal error: Failed to resolve path. '{library}.1' does not exist")
        print(f"ERROR: ld.so: object '{library}' from LD_PRELOAD cannot be preloaded (cannot open shared object file)")
        sys.stdout.flush()
        return run_application(command)
    if FAULT == "no-sampling":
        text = "tool.cpp] Given PC sampling configuration is not supported on any of the agents"
        raise Refused(1, f"E {text}") if newer_than("6.4") else aborted(f"F {text}")
    if FAULT == "no-second-pass" and "pass_1" in first(given, "-d"):
        raise aborted("F tool.cpp] HSA_STATUS_ERROR_OUT_OF_RESOURCES")
    status = profile_application(command, given, formats, counters)
    if status and "-i" in given and RELEASE == "6.2":
        raise Refused(1, f"Fatal error: Command '[...]' returned non-zero exit status {status}.")
    return status


def rocpd(arguments):
    """Convert databases: rocpd convert -i FILE... -f pftrace -d FOLDER -o NAME."""
    if FAULT == "no-interpreter":
        raise Refused(1, "ImportError: this version of Python is not supported by rocpd")
    given = {}
    for word in arguments[1:]:
        if word in ("-i", "-f", "-d", "-o"):
            values = given[word] = []
        else:
            values.append(word)
    if arguments[:1] != ["convert"] or not all(pathlib.Path(file).is_file() for file in given["-i"]):
        raise Refused(1, f"rocpd: error: no command convert, or not a file: {arguments}")
    pathlib.Path(given["-d"][0], f"{given['-o'][0]}_results.{given['-f'][0]}").write_bytes(b"\x0a\x02 a")
    return 0


# ---------------------------------------------------------------- rocprof-compute and rocprof-sys


EXPERIMENTAL = {"--torch-trace", "--triton-trace", "--membw-analysis"}  # in rocprof-compute's profile


def check_experimental(given, options):
    """Refuse what rocprof-compute offers with --experimental only."""
    if options & given.keys() and "--experimental" not in given:
        name = min(options & given.keys())
        raise Refused(2, f"tool: error: {name} is an experimental feature. Use --experimental to enable it.")


def list_operators(folder):
    """Print the operators of a profile that has their markers, and write the table of their counters."""
    name = "ml_api_trace" if newer_than("7.14") else "torch_trace"
    if not list(folder.glob(f"{name}_*marker_api_trace.csv")):
        raise Refused(1, 'ERROR Workload was not profiled with "--torch-trace".')
    (folder / name).mkdir(exist_ok=True)
    row = "torch.nn.functional.linear,1@module.py:7,Cijk,SQ_WAVES,1024\n"
    header = "Operator_Name,Context_Id,Kernel_Name,Counter_Name,Counter_Value\n"
    (folder / name / "consolidated.csv").write_text(header + row)
    print("PyTorch Operator Call Tree:\nmodule.py:7 (dispatches: 1, total: 2.0 us)\n  torch.nn.functional.linear")
    return 0


def analyze(arguments):
    accepted = OPTIONS["rocprof-compute analyze"]
    if newer_than("7.11"):
        accepted += " --experimental --list-torch-operators --torch-operator"
    given, _ = parse(arguments, accepted)
    check_experimental(given, {"--list-torch-operators", "--torch-operator"})
    if "--list-torch-operators" in given:
        return list_operators(pathlib.Path(given["-p"][0]))
    folder = pathlib.Path(given["-p"][0])
    packed = ".gz" * newer_than("10.1")
    if not list(folder.glob(f"results_*.csv{packed}" if newer_than("7.2") else "pmc_perf.csv")):
        raise Refused(1, f"ERROR no profiling data in {folder}")
    table = SAMPLES / "rocprof-compute-3" / f"analysis_{given['-k'][0]}.txt"
    if not table.is_file():
        raise Refused(1, f"ERROR {given['-k'][0]} is an invalid kernel id")
    text = table.read_text()
    if FAULT == "no-peaks":  # of a GPU whose peak bandwidth the release does not know
        text = re.sub(r"(BW +│[^│]*│[^│]*│)[^│]*│[^│]*│", r"\1       │             │", text)
    if newer_than("7.2"):
        text = text.replace(" Pct  │", " Percent │")
    if newer_than("7.14"):
        text = text.replace("Pct of Peak", "Percent of Peak")
    print(text)
    return 0


def rocprof_compute(arguments):
    if FAULT.endswith("-packages"):
        text = "[ERROR] The '{}' package was not found in the current execution environment.\n"
        if FAULT == "other-packages":
            text = "[ERROR] the '{}' distribution does not meet version requirements to use rocprofiler-compute.\n"
            text += "  --> version installed : 1.6.3\n"
        text = text.format("astunparse==1.6.2") + text.format("dash>=3.0.0")
        raise Refused(1, f"{text}\nPlease verify all of the python dependencies\n\nSee: /opt/my rocm/requirements.txt")
    if arguments[:1] == ["analyze"]:
        return analyze(arguments[1:])
    if arguments[:1] != ["profile"]:
        raise Refused(2, f"{PROGRAM}: a mode is required")
    accepted = options_of("rocprof-compute", RELEASE)
    if "--help" in arguments:  # it comes before the error of an unknown option, and hides what is experimental
        hidden = set() if "--experimental" in arguments else EXPERIMENTAL
        shown = [word for word in accepted.split() if word not in hidden]
        print(f"usage: profile [options] -- <application>\n{' '.join(shown)}")
        return 0
    given, command = parse(arguments[1:], accepted)
    check_experimental(given, EXPERIMENTAL)
    if not newer_than("6.4") and FAULT == "no-locale":  # what locale.setlocale says of a machine without it
        text = "   ERROR Please ensure that the 'en_US.UTF-8' locale is available on your system."
        raise Refused(1, f"{text}\n   ERROR unsupported locale setting")
    return compute_profile(given, command)


def check_profile(name, target, command):
    """Refuse what rocprof-compute refuses before it runs the application."""
    if not name or "/" in name or ".." in str(target):
        raise Refused(1, "a name without / is needed, and a path without ..")
    if not newer_than("6.2") and ("-" in name or "." in name or len(name) > 35):
        raise Refused(1, "-n/--name exceeds 35 characters, or has - or . in it")
    if FAULT == "no-amdsmi":
        text = " WARNING Unhandled import error: No module named 'amdsmi'\n"
        raise Refused(1, f"{text}   ERROR Failed to import the amdsmi Python library.")
    if FAULT == "unsupported":
        raise Refused(1, "ERROR Cannot find a supported arch in rocminfo: gfx1100")
    if not command:
        raise Refused(1, "Profiling command required. Pass application executable after -- at the end of options.")
    if not (shutil.which(command[0]) if newer_than("6.3") else os.path.isfile(command[0])):
        raise Refused(1, f"Your command {command[0]} doesn't point to a executable. Please verify.")


def compute_profile(given, command):
    explicit = first(given, "-p", "--output-directory")
    target = pathlib.Path(explicit or f"workloads/{first(given, '-n')}/MI300X_A1")
    if newer_than("7.2") and "SLURM_PROCID" in os.environ:  # and other launchers' variables, of one process too
        target /= os.environ["SLURM_PROCID"]
    check_profile(first(given, "-n"), target, command)
    if newer_than("7.14") and "--overwrite" not in given and target.is_dir() and any(target.iterdir()):
        raise Refused(1, f"ERROR Workload directory {target} is not empty: pass --overwrite")
    command = " ".join(command).split()  # what was joined with spaces is split at spaces
    target.mkdir(parents=True, exist_ok=True)
    (target / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X_A1\n")
    measured = FAULT not in ("no-kernels", "pandas-3") and first(given, "-k", "--kernel") in "adamw_kernel"
    for name in ("SQ_IFETCH_LEVEL.csv", "pmc_perf_0.csv"):  # it runs the application once for each
        if run_logged(command):
            raise Refused(1, "   ERROR Profiling execution failed.")
        if not measured and newer_than("7.2"):
            print(" WARNING No GPU kernel data collected. The workload may not have dispatched any GPU kernels.")
        elif not measured and newer_than("6.4"):
            if FAULT == "pandas-3":
                text = "You are trying to merge on str and int64 columns for key 'Agent_Id'."
                print(f" WARNING Error converting 4711_counter_collection.csv from v3 to v2 csv: {text}")
            print(f" WARNING Cannot write results for {name} due to no counter csv files generated.", file=sys.stderr)
        elif not measured:
            missing = f"[Errno 2] No such file or directory: '{target.absolute()}/{name}'"
            raise Refused(1, f"Traceback (most recent call last):\nFileNotFoundError: {missing}")
        elif newer_than("7.2"):
            packed = newer_than("10.1")
            with (gzip.open if packed else open)(target / f"results_{name}{'.gz' * packed}", "wt") as file:
                file.write("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,adamw_kernel,1024\n")
    # It puts a script of its own, which marks the operators, after a first word that begins with python.
    if "--torch-trace" in given and measured and command[0].startswith("python"):
        prefix = "ml_api_trace" if newer_than("7.14") else "torch_trace"
        (target / f"{prefix}_7_marker_api_trace.csv").write_text('"Function"\n"torch.nn.functional.linear"\n')
    if measured and not newer_than("7.2"):
        (target / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,adamw_kernel,1024\n")
    return 0


def run_logged(command):
    """Run the application below rocprof and print its lines as rocprof-compute does, with empty ones after them."""
    signal.signal(signal.SIGINT, lambda *_: None)
    environment = os.environ | variables_set()
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    profiler = "rocprofv3" if newer_than("6.4") else "rocprof"
    for line in [*run.stdout.splitlines(), *[""] * 9]:
        print(f"   \x1b[32mINFO\x1b[0m    |-> [{profiler}] {line.strip()}")
    sys.stdout.flush()
    return run.returncode


def rocprof_sys(arguments):
    given, command = parse(arguments, options_of("rocprof-sys-run", RELEASE), status=1)
    if "--output-format" in given and ("--trace" in given or "--profile" in given):
        raise Refused(1, "--output-format conflicts with --trace and --profile")
    prefix = "OMNITRACE" if PROGRAM.startswith("omnitrace") else "ROCPROFSYS"
    status = run_application(command)
    name = "omnitrace" if prefix == "OMNITRACE" else "rocprof-sys"
    for line in ("finalizing...", "", *(f"process/7/thread/{n} : 0.2 sec" for n in range(8)), "Finalizing perfetto..."):
        print(f"[{name}][7][0][{prefix.lower()}_finalize] {line}", file=sys.stderr)
    print(f"[{name}][7][perfetto]> Outputting 'perfetto-trace-7.proto' (1 KB)... Done", file=sys.stderr)
    folder = pathlib.Path(os.environ.get(f"{prefix}_OUTPUT_PATH", "rocprofsys-python3-output"))
    if os.environ.get(f"{prefix}_TIME_OUTPUT", "ON").upper() != "OFF":
        folder /= "2025-01-15_17.57"
    folder.mkdir(parents=True, exist_ok=True)
    if "--trace" in given and FAULT != "no-report":
        sample = "rocprof-sys/no_kernels" if FAULT == "no-kernels" else "rocprof-sys/kernels"
        if newer_than("7.0") and FAULT != "no-kernels":
            sample = "rocprof-sys-7.1/kernels"
        suffix = "pftrace" if newer_than("10.1") else "proto"  # pull requests of August and September 2026
        shutil.copy(SAMPLES / f"{sample}.proto", folder / f"perfetto-trace-{os.getpid()}.{suffix}")
        if newer_than("10.1"):
            database("rocm-7.0/results.sql", folder / f"rocpd-{os.getpid()}.db")
    if "--profile" in given:
        (folder / f"wall_clock-{os.getpid()}.txt").write_text("| LABEL | COUNT | SUM |\n")
    return status


# ---------------------------------------------------------------- nsys and ncu


def until_program(arguments, accepted):
    """Return the options up to the program, which is the first word that is none and belongs to none, and it."""
    given, rest = {}, list(arguments)
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option not in accepted.split():
            raise Refused(1, f"unrecognised option '{option}'")
        given[option] = value or (rest.pop(0) if option in OPTIONS["one value"].split() else "")
    return given, rest


def nsys(arguments):
    """Profile or export; a range with an unregistered name, as PyTorch's are, starts a capture only if asked to."""
    given, command = until_program(arguments[1:], OPTIONS[f"nsys {arguments[0]}"])
    target = given["--output"]
    if arguments[0] == "export":
        if not pathlib.Path(command[-1]).is_file():
            raise Refused(1, f"File {command[-1]} doesn't exist")
        database("nsys/report.sql", pathlib.Path(target))
        return 0
    status = run_application(command)
    captured = given.get("--nvtx-capture") == "measured steps" and "REGISTER_ONLY=0" in given.get("--env-var", "")
    if given.get("--capture-range") != "nvtx" or captured:
        if FAULT == "no-import":
            print("Importer error status: The importer binary and its dependencies were not found.")
        pathlib.Path(target + (".qdstrm" if FAULT == "no-import" else ".nsys-rep")).write_bytes(b"a report")
    return status


def ncu(arguments):
    given, command = until_program(arguments, OPTIONS["ncu"])
    if "--help" in given:
        print(OPTIONS["ncu"])
        return 0
    if "--import" in given:
        report = pathlib.Path(given["--import"])
        header, units, *rows = csv.reader((SAMPLES / "ncu/raw.csv").read_text().splitlines())
        new = [name for name in report.read_text().split(",") if "__" in name and name not in header]
        writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([header + new, units + ["%"] * len(new), *(row + ["42"] * len(new) for row in rows)])
        return 0
    if FAULT == "no-permission":
        print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access GPU Performance Counters")
        return 1
    status = run_application(command)
    with open(SAMPLES / "ncu" / "raw.csv", newline="") as file:
        kernels = [row["Kernel Name"] for row in csv.DictReader(file)]
    wanted = re.sub("^::regex:|:1$", "", given.get("--kernel-id", ""))
    if not any(re.search(wanted, kernel) for kernel in kernels):
        print("==WARNING== No kernels were profiled.")
        return status
    matched = given.get("--nvtx-include") == "measured steps/" and "--nvtx" in given and FAULT != "no-range"
    if "--nvtx-include" in given and not matched:
        print("==WARNING== No kernels were profiled.")
        return status
    metrics = [name for name in given.get("--metrics", "").split(",") if not name.startswith("no_such")]
    pathlib.Path(given["--export"] + ".ncu-rep").write_text(",".join(["a report", *metrics]))
    return status


PROGRAMS = {
    "rocprofv3": rocprofv3,
    "rocprof-compute": rocprof_compute,
    "omniperf": rocprof_compute,
    "rocprof-sys-run": rocprof_sys,
    "omnitrace-run": rocprof_sys,
    "rocpd": rocpd,
    "nsys": nsys,
    "ncu": ncu,
    "nvidia-smi": lambda arguments: print("GPU 0: NVIDIA H200"),
}


def main():
    if os.environ.get("STAND_IN_RECORD"):
        with open(os.environ["STAND_IN_RECORD"], "a") as file:
            file.write(json.dumps([PROGRAM, *sys.argv[1:]]) + "\n")
    try:
        status = PROGRAMS[PROGRAM](sys.argv[1:])
        return 128 - status if (status or 0) < 0 else status
    except Refused as error:
        print(f"\x1b[31m{error}\x1b[0m", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
