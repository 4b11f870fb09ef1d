#!/usr/bin/env python3
"""Stubs of the profilers of ROCm 6.2, 6.3, 6.4, 7.0 and 10.0 and of NVIDIA's.

Each accepts exactly the options of the real program of its release (options.json), refuses what that one refuses with
its exit status, runs the application, and leaves files of the same names and layouts, filled from ../samples. The
folder it is called from tells the release, its name the program: put rocm-7.0/ on PATH to have ROCm 7.0.

Environment: STAND_IN_RECORD=FILE appends each command line to FILE; STAND_IN_PROCESSES=2 writes files as two processes
do; STAND_IN_FAULT plays a fault: no-kernels, no-report, unsupported, no-permission, no-packages, no-locale.
"""

import csv
import io
import json
import os
import pathlib
import re
import shutil
import sqlite3
import subprocess
import sys

CALLED = pathlib.Path(__file__).absolute()  # not resolved: the link's folder is the release
SAMPLES = CALLED.resolve().parent.parent / "samples"
OPTIONS = json.loads((CALLED.resolve().parent / "options.json").read_text())
PROGRAM = pathlib.Path(sys.argv[0]).name
RELEASE = CALLED.parent.name.removeprefix("rocm-")
FAULT = os.environ.get("STAND_IN_FAULT", "")

ONE_VALUE = set(
    "-i --input -o --output-file -d --output-directory --log-level -E --extra-counters --summary-output-file -u "
    "--summary-units --kernel-include-regex --kernel-exclude-regex --collection-period-unit --perfetto-backend "
    "--perfetto-buffer-size --perfetto-buffer-fill-policy --perfetto-shmem-size-hint -A --agent-index --rocm-root "
    "-n --name -p --path --subpath --output --export --import --metrics --set --page --clock-control --device "
    "--type --kernel-name-base --kernel-id --capture-range --capture-range-end --delay --pc-sampling-unit "
    "--pc-sampling-method --pc-sampling-interval".split()
)
SEVERAL_VALUES = set(
    "--output-format -f --pmc --preload --kernel-iteration-range --summary-groups --kernel-names --collection-period "
    "-k --kernel -d --dispatch -b --block --gpu-id".split()
)
TRACES = (
    "--kernel-trace",
    "--runtime-trace",
    "--sys-trace",
    "--hip-trace",
    "--hip-runtime-trace",
    "--memory-copy-trace",
)
TRUTH = {"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"}


class Refused(Exception):
    """The program ends with this status and this text."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def newer_than(release):
    return tuple(map(int, RELEASE.split("."))) > tuple(map(int, release.split(".")))


def split_application(arguments):
    """Options and the application behind the first lone --."""
    if "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    return arguments, []


def parse(arguments, accepted, optional_values):
    """{option: values} of a command line; Refused for what the real parser does not take."""
    given, rest = {}, list(arguments)
    while rest:
        option, _, value = rest.pop(0).partition("=")
        if option not in accepted:
            raise Refused(2, f"{PROGRAM}: error: unrecognized arguments: {option}")
        values = [value] if value else []
        if option in ONE_VALUE and not value:
            if not rest:
                raise Refused(2, f"{PROGRAM}: error: argument {option}: expected one argument")
            values = [rest.pop(0)]
        elif option in SEVERAL_VALUES:
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))
        elif optional_values and rest and not rest[0].startswith("-"):
            values = [rest.pop(0)]
            if values[0].lower() not in TRUTH:  # without the -- a flag takes the application's name for its value
                raise Refused(1, f"ValueError: invalid truth value {values[0]}")
        given[option] = values
    return given


def run_application(command):
    if not command:
        raise Refused(1, "No application provided")
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError as error:
        raise Refused(1, f"FileNotFoundError: {error}") from None


def database(sql, path):
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript((SAMPLES / sql).read_text())
    connection.close()


# ---------------------------------------------------------------- rocprofv3


def output_formats(given):
    """Formats asked for; one in the environment is added to those of the command line, as the real program does."""
    known = {"csv", "json", "pftrace"} | ({"otf2"} if newer_than("6.2") else set())
    known |= {"rocpd"} if newer_than("6.4") else set()
    formats = given.get("--output-format", []) + given.get("-f", [])
    for name in formats:
        if name not in known:
            raise Refused(2, f"rocprofv3: error: argument --output-format: invalid choice: '{name}'")
    formats += os.environ.get("ROCPROF_OUTPUT_FORMAT", "").split()
    return formats or ["rocpd" if newer_than("6.4") else "csv"]


KNOWN_COUNTERS = re.compile(r"(SQ|GRBM|TCC|TCP|FETCH|WRITE)_[A-Za-z_]+$")
SLOTS = {"SQ": 8, "GRBM": 2, "TCC": 4}  # counters of one hardware block that fit in one run
DERIVED = {"FETCH_SIZE": ["TCC"] * 3, "WRITE_SIZE": ["TCC"] * 2}


def wanted_counters(given):
    """Return the counters of the command line or of the input file that this GPU knows; warn about the others."""
    names = given.get("--pmc", [])
    if "-i" in given:
        text = pathlib.Path(given["-i"][0]).read_text()
        if not text.startswith("pmc: "):
            raise Refused(1, "the input file has no line that begins with pmc:")
        names = text.removeprefix("pmc: ").split()
    blocks = [block for name in names for block in DERIVED.get(name, [name.split("_")[0]])]
    for block, slots in SLOTS.items():
        if blocks.count(block) > slots:
            raise Refused(134, f"Request exceeds the capabilities of the hardware to collect: {names}")
    for name in names:
        if not KNOWN_COUNTERS.match(name):
            print(f"W rocprofv3: unable to find counter {name} for agent gfx942", file=sys.stderr)
    return [name for name in names if KNOWN_COUNTERS.match(name)]


def counter_rows(sample, names):
    """Return counter_collection.csv for these counters; those that the sample lacks get the values of SQ_WAVES."""
    header, *rows = csv.reader(io.StringIO(sample.read_text()))
    at = header.index("Counter_Name")
    sampled = {row[at] for row in rows}
    chosen = []
    for name in names:
        source = name if name in sampled else "SQ_WAVES"
        chosen += [[*row[:at], name, *row[at + 1 :]] for row in rows if row[at] == source]
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([header, *chosen])
    return file.getvalue()


def rocprofv3_files(given, formats, counters, process):
    """Write what one profiled process leaves."""
    folder = pathlib.Path((given.get("-d") or given.get("--output-directory") or ["."])[0])
    name = (given.get("-o") or given.get("--output-file") or ["%hostname%/%pid%"])[0]
    base = folder / name.replace("%pid%", str(process)).replace("%hostname%", "host")
    if "-i" in given:
        base = base.parent / "pmc_1" / base.name
    base.parent.mkdir(parents=True, exist_ok=True)
    samples = SAMPLES / f"rocm-{ {'10.0': '7.0', '6.3': '6.4'}.get(RELEASE, RELEASE) }"
    kinds = []
    if FAULT != "no-kernels":
        kinds += ["kernel_trace"] * any(f"{name}-trace" in given for name in ("--kernel", "--runtime", "--sys"))
        kinds += ["kernel_stats", "domain_stats"] * ("--stats" in given)

    def write(kind, text):
        base.with_name(f"{base.name}_{kind}").write_text(text)

    if "csv" in formats:
        write("agent_info.csv", '"Node_Id","Agent_Type"\n4,"GPU"\n')
        for kind in kinds:
            write(f"{kind}.csv", (samples / f"{kind}.csv").read_text())
        if counters and FAULT != "no-kernels":
            write("counter_collection.csv", counter_rows(samples / "counter_collection.csv", counters))
        if "--pc-sampling-beta-enabled" in given:
            write("pc_sampling_host_trap.csv", '"Sample_Timestamp","Instruction"\n1,"v_add_f32"\n')
    if "pftrace" in formats and FAULT != "no-report":
        base.with_name(f"{base.name}_results.pftrace").write_bytes(b"\x0a\x10 a trace of process %d" % process)
    if "rocpd" in formats:
        database("rocm-7.0/results.sql", base.with_name(f"{base.name}_results.db"))


def rocprofv3(arguments):
    options, command = split_application(arguments)
    accepted = OPTIONS["rocprofv3"][RELEASE].split()
    if "--help" in options:
        formats = "csv json pftrace" + " otf2" * newer_than("6.2") + " rocpd" * newer_than("6.4")
        print("usage: rocprofv3 [options] -- <application>\n  " + "\n  ".join(accepted) + f"\n  formats: {formats}")
        return 0
    given = parse(options, accepted, newer_than("6.2"))
    if "--version" in given:
        print(f"             version: 1.0.0\n        rocm_version: {RELEASE}.0")
        return 0
    formats = output_formats(given)
    traced = any(option in given for option in TRACES) or ("--pmc" in given and newer_than("6.4"))
    if "--stats" in given and not traced:
        raise Refused(1, "No tracing options were enabled for --stats option")
    counters = wanted_counters(given)
    status = run_application(command)
    for process in range(int(os.environ.get("STAND_IN_PROCESSES", "1"))):
        rocprofv3_files(given, formats, counters, os.getpid() + process)
    return status


def rocpd(arguments):
    if arguments[:1] != ["convert"]:
        raise Refused(2, "rocpd: error: this stub converts only")
    given = {}
    for word in arguments[1:]:
        if word in ("-i", "-f", "-d", "-o"):
            values = given.setdefault(word, [])
        else:
            values.append(word)
    if not all(pathlib.Path(file).is_file() for file in given["-i"]):
        raise Refused(1, f"{given['-i']} does not exist")
    (pathlib.Path(given["-d"][0]) / f"{given['-o'][0]}_results.pftrace").write_bytes(b"\x0a\x02 a")
    return 0


# ---------------------------------------------------------------- rocprof-compute and rocprof-sys

# kernel, share of the time, mean ns, and percentages: waves, read and write bandwidth, hits in L2 and L1, MFMA, VALU
ANALYSED = [
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1", 55.2, 752600.4, 24.5, 20.1, 5.2)
    + (71.3, 12.4, 81.7, 10.9),
    ("adamw_kernel", 20.4, 61440.0, 74.8, 45.4, 37.8, 35.7, 50.0, 0.0, 5.4),
]


def boxed(header, rows):
    """Return a table as `tabulate` draws it with fancy_grid, whose cells may have several lines."""
    cells = [[str(cell).split("\n") for cell in row] for row in [header, *rows]]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(header))]

    def rule(left, fill, middle, right):
        return left + middle.join(fill * (width + 2) for width in widths) + right

    def lines(row):
        for i in range(max(map(len, row))):
            texts = [cell[i] if i < len(cell) else "" for cell in row]
            yield "│" + "│".join(f" {text:<{width}} " for text, width in zip(texts, widths, strict=True)) + "│"

    body = [rule("╒", "═", "╤", "╕"), *lines(cells[0]), rule("╞", "═", "╪", "╡")]
    for number, row in enumerate(cells[1:]):
        body += [rule("├", "─", "┼", "┤")] * (number > 0) + list(lines(row))
    return "\n".join([*body, rule("╘", "═", "╧", "╛")])


def analyze(arguments):
    given = parse(arguments, OPTIONS["rocprof-compute analyze"][RELEASE].split(), optional_values=False)
    folder = pathlib.Path(given["-p"][0])
    if not list(folder.glob("results_*.csv" if newer_than("7.12") else "pmc_perf.csv")):
        raise Refused(1, f"ERROR no profiling data in {folder}")
    index = int(given["-k"][0])
    top = [(i, "\n".join(re.findall(".{1,40}", row[0])), 1, f"{row[2]:.2f}", row[1]) for i, row in enumerate(ANALYSED)]
    print("\n0. Top Stats\n0.1 Top Kernels\n" + boxed(["", "Kernel_Name", "Count", "Mean(ns)", "Pct"], top))
    if index >= len(ANALYSED):
        raise Refused(1, f"ERROR {index} is an invalid kernel id")
    waves, read, write, l2, l1, matrix, vector = ANALYSED[index][3:]
    metrics = {"VALU Utilization": vector, "MFMA Utilization": matrix, "Wavefront Occupancy": waves}
    metrics |= {"LDS Bank Conflicts/Access": "", "vL1D Cache Hit Rate": l1, "L2 Cache Hit Rate": l2}
    metrics |= {"L2-Fabric Read BW": read, "L2-Fabric Write BW": write, "L2-Fabric Read Latency": ""}
    percent = "Percent of Peak" if newer_than("7.12") else "Pct of Peak"
    rows = [(f"2.1.{i}", name, value, "Pct", 100.0, value) for i, (name, value) in enumerate(metrics.items())]
    print("\n2. System Speed-of-Light\n2.1 Speed-of-Light")
    print(boxed(["Metric_ID", "Metric", "Avg", "Unit", "Peak", percent], rows))
    return 0


def rocprof_compute(arguments):
    if FAULT == "no-packages":
        text = "[ERROR] The '{}' package was not found in the current execution environment."
        lines = [text.format("astunparse==1.6.2"), text.format("dash>=3.0.0"), "", "See: /opt/rocm/requirements.txt"]
        raise Refused(1, "\n".join(lines))
    if arguments[:1] == ["analyze"]:
        return analyze(arguments[1:])
    if arguments[:1] != ["profile"]:
        raise Refused(2, f"{PROGRAM}: a mode is required")
    options, command = split_application(arguments[1:])
    accepted = OPTIONS["rocprof-compute"][RELEASE].split()
    if "--help" in options:
        print("usage: profile [options] -- <application>\n  " + "\n  ".join(accepted))
        return 0
    given = parse(options, accepted, optional_values=False)
    locales = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout.splitlines()
    if not newer_than("6.3") and "en_US.utf8" not in locales:
        raise Refused(1, "ERROR Please ensure that the 'en_US.UTF-8' locale is available on your system.")
    return compute_profile(given, command)


def compute_profile(given, command):
    name = (given.get("-n") or given.get("--name") or [""])[0]
    target = pathlib.Path(
        (given.get("-p") or given.get("--path") or given.get("--output-directory") or [f"workloads/{name}/MI300X_A1"])[
            0
        ]
    )
    if not name or "/" in name or ".." in str(target):
        raise Refused(1, "a name without / is needed, and a path without ..")
    if not newer_than("6.2") and ("-" in name or "." in name or len(name) > 35):
        raise Refused(1, "-n/--name exceeds 35 characters, or has - or . in it")
    if FAULT == "unsupported":
        raise Refused(1, "ERROR Cannot find a supported arch in rocminfo: gfx1100")
    if newer_than("7.13") and target.exists() and any(target.iterdir()):
        raise Refused(1, "the output directory is not empty: give --overwrite")
    if not command:
        raise Refused(1, "Profiling command required. Pass application executable after -- at the end of options.")
    found = shutil.which(command[0]) if newer_than("6.3") else os.path.isfile(command[0])
    if not found:
        raise Refused(1, f"Your command {command[0]} doesn't point to a executable. Please verify.")
    if not newer_than("7.13"):
        command = " ".join(command).split()  # what was joined with spaces is split at spaces
    target.mkdir(parents=True, exist_ok=True)
    (target / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X_A1\n")
    for _ in range(2):  # the real program runs the application once for each pass over the counters
        status = run_application(command)
        if status:
            return status
    if FAULT != "no-kernels":
        data = "results_pmc_perf_0.csv" if newer_than("7.12") else "pmc_perf.csv"
        (target / data).write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,adamw_kernel,1024\n")
    return 0


def message(*pairs):
    """Encode a Protocol Buffers message of (number, int or bytes) pairs."""

    def varint(value):
        return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])

    return b"".join(
        varint(number << 3 | 2) + varint(len(value)) + value
        if isinstance(value, bytes)
        else varint(number << 3) + varint(value)
        for number, value in pairs
    )


def perfetto_trace(kernels):
    """Return a trace whose time stamps are differences, with a call of the host and these (name, ns) kernels."""
    names = ["hipLaunchKernel", *(name for name, _ in kernels)]
    interned = [(1, message((1, 1), (2, b"hip_api"))), (1, message((1, 2), (2, b"rocm_kernel_dispatch")))]
    interned = interned[: 2 if kernels else 1]
    interned += [(2, message((1, i), (2, name.encode()))) for i, name in enumerate(names, 1)]
    defaults = message((58, 64))
    packets = [message((10, 1), (6, message((1, message((1, 64), (2, 10**15), (3, 1))))), (59, defaults), (13, 1))]
    packets[0] += message((12, message(*interned)))
    for i, duration in enumerate([500, *(ns for _, ns in kernels)], 1):
        where = ((3, 1 if i == 1 else 2), (11, 7 if i == 1 else 8))
        packets.append(message((10, 1), (8, 100), (11, message((9, 1), (10, i), *where))))
        packets.append(message((10, 1), (8, duration), (11, message((9, 2), where[1]))))
    return message(*((1, packet) for packet in packets))


def rocprof_sys(arguments):
    options, command = split_application(arguments)
    accepted = OPTIONS["rocprof-sys-run"][RELEASE].split()
    if "--help" in options:
        print("usage: rocprof-sys-run [options] -- <CMD>\n  " + "\n  ".join(accepted))
        return 0
    given = parse(options, accepted, optional_values=False)
    if "--output-format" in given and ("--trace" in given or "--profile" in given):
        raise Refused(1, "--output-format conflicts with --trace and --profile")
    prefix = "OMNITRACE" if PROGRAM.startswith("omnitrace") else "ROCPROFSYS"
    status = run_application(command)
    folder = pathlib.Path(os.environ.get(f"{prefix}_OUTPUT_PATH", "rocprofsys-python3-output"))
    if os.environ.get(f"{prefix}_TIME_OUTPUT", "ON").upper() != "OFF":
        folder /= "2025-01-15_17.57"
    folder.mkdir(parents=True, exist_ok=True)
    if "--trace" in given and FAULT != "no-report":
        kernels = [] if FAULT == "no-kernels" else [("adamw_kernel", 4000), ("attention_forward_kernel", 9000)]
        (folder / f"perfetto-trace-{os.getpid()}.proto").write_bytes(perfetto_trace(kernels))
    if "--profile" in given:
        (folder / f"wall_clock-{os.getpid()}.txt").write_text("| LABEL | COUNT | SUM |\n")
    return status


# ---------------------------------------------------------------- nsys and ncu

NSYS_PROFILE = "--trace --sample --cpuctxsw --cuda-graph-trace --output --force-overwrite --capture-range".split()
NSYS_PROFILE += ["--capture-range-end", "--delay"]
NCU = "--metrics --set --clock-control --kernel-name-base --kernel-id --export --import --csv --page".split()
NCU += ["--profile-from-start", "--launch-skip"]


def until_program(arguments, accepted):
    """Options up to the program, which is the first word that is none and belongs to none."""
    given, rest = {}, list(arguments)
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option not in accepted:
            raise Refused(1, f"unrecognised option '{option}'")
        given[option] = value or (rest.pop(0) if option in ONE_VALUE else "")
    return given, rest


def nsys(arguments):
    if arguments[0] == "export":
        given, report = until_program(arguments[1:], ["--type", "--output"])
        return nsys_export(given, report)
    given, command = until_program(arguments[1:], NSYS_PROFILE)
    status = run_application(command)
    suffix = ".qdstrm" if FAULT == "no-report" else ".nsys-rep"
    pathlib.Path(given["--output"] + suffix).write_bytes(b"a report")
    return status


def nsys_export(given, report):
    if not pathlib.Path(report[-1]).is_file():
        raise Refused(1, f"File {report[-1]} doesn't exist")
    database("nsys/report.sql", pathlib.Path(given["--output"]))
    return 0


def ncu(arguments):
    given, command = until_program(arguments, NCU)
    if "--import" in given:
        report = pathlib.Path(given["--import"])
        header, units, *rows = csv.reader((SAMPLES / "ncu/raw.csv").read_text().splitlines())
        new = [name for name in report.read_text().split(",") if "__" in name and name not in header]
        writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([header + new, units + ["%"] * len(new), *(row + ["42"] * len(new) for row in rows)])
        return 0
    if FAULT == "no-permission":
        print(
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
        )
        return 1
    status = run_application(command)
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
    "locale": lambda arguments: print("C\nPOSIX" + "\nen_US.utf8" * (FAULT != "no-locale")),
    "nsys": nsys,
    "ncu": ncu,
    "nvidia-smi": lambda arguments: print("GPU 0: NVIDIA H200"),
}


def main():
    if os.environ.get("STAND_IN_RECORD"):
        with open(os.environ["STAND_IN_RECORD"], "a") as file:
            file.write(json.dumps([PROGRAM, *sys.argv[1:]]) + "\n")
    try:
        return PROGRAMS[PROGRAM](sys.argv[1:])
    except Refused as error:
        print(f"\x1b[31m{error}\x1b[0m", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
