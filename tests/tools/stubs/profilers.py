#!/usr/bin/env python3
"""Stand-ins for the profilers of ROCm 6.2, 6.4, 7.0 and 10.0 and for those of NVIDIA.

Each accepts exactly the options of the real program of its release (options.json), refuses what that one refuses, with
its exit status, runs the application, and leaves files of the same names and layouts, filled from ../samples. The
folder it is called from tells the release, its name the program: put rocm-7.0/ on PATH to have ROCm 7.0.

Environment: STAND_IN_RECORD=FILE appends each command line to FILE; STAND_IN_PROCESSES=2 writes files as two processes
do; STAND_IN_FAULT=no-kernels, unsupported, no-permission or no-report plays that fault.
"""

import json
import os
import pathlib
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
    "--type --kernel-name-base --kernel-id".split()
)
SEVERAL_VALUES = set(
    "--output-format -f --pmc --preload --kernel-iteration-range --summary-groups --kernel-names".split()
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


def rocprofv3_files(given, formats, process):
    """Write what one profiled process leaves."""
    folder = pathlib.Path((given.get("-d") or given.get("--output-directory") or ["."])[0])
    name = (given.get("-o") or given.get("--output-file") or ["%hostname%/%pid%"])[0]
    base = folder / name.replace("%pid%", str(process)).replace("%hostname%", "host")
    if "-i" in given:
        base = base.parent / "pmc_1" / base.name
    base.parent.mkdir(parents=True, exist_ok=True)
    samples = SAMPLES / f"rocm-{'7.0' if newer_than('7.0') else RELEASE}"
    kinds = []
    if FAULT != "no-kernels":
        kinds += ["kernel_trace"] * any(f"{name}-trace" in given for name in ("--kernel", "--runtime", "--sys"))
        kinds += ["kernel_stats", "domain_stats"] * ("--stats" in given)
        kinds += ["counter_collection"] * ("--pmc" in given or "-i" in given)
    if "csv" in formats:
        base.with_name(f"{base.name}_agent_info.csv").write_text('"Node_Id","Agent_Type"\n4,"GPU"\n')
        for kind in kinds:
            base.with_name(f"{base.name}_{kind}.csv").write_bytes((samples / f"{kind}.csv").read_bytes())
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
    formats = output_formats(given)
    traced = any(option in given for option in TRACES) or ("--pmc" in given and newer_than("6.4"))
    if "--stats" in given and not traced:
        raise Refused(1, "No tracing options were enabled for --stats option")
    if "-i" in given:
        counters = pathlib.Path(given["-i"][0]).read_text()
        assert counters.startswith("pmc: "), counters
    status = run_application(command)
    for process in range(int(os.environ.get("STAND_IN_PROCESSES", "1"))):
        rocprofv3_files(given, formats, os.getpid() + process)
    return status


# ---------------------------------------------------------------- rocprof-compute and rocprof-sys


def rocprof_compute(arguments):
    if arguments[:1] != ["profile"]:
        raise Refused(2, f"{PROGRAM}: this stand-in profiles only")
    options, command = split_application(arguments[1:])
    accepted = OPTIONS["rocprof-compute"][RELEASE].split()
    if "--help" in options:
        print("usage: profile [options] -- <application>\n  " + "\n  ".join(accepted))
        return 0
    given = parse(options, accepted, optional_values=False)
    name = (given.get("-n") or given.get("--name") or [""])[0]
    target = (
        given.get("-p") or given.get("--path") or given.get("--output-directory") or [f"workloads/{name}/MI300X_A1"]
    )[0]
    if not name or "/" in name or ".." in target:
        raise Refused(1, "a name without / is needed, and a path without ..")
    if FAULT == "unsupported":
        raise Refused(1, "ERROR Cannot find a supported arch in rocminfo: gfx1100")
    target = pathlib.Path(target)
    if newer_than("7.13") and target.exists() and any(target.iterdir()):
        raise Refused(1, "the output directory is not empty: give --overwrite")
    for _ in range(2):  # the real program runs the application once for each pass over the counters
        status = run_application(command)
        if status:
            return status
    target.mkdir(parents=True, exist_ok=True)
    (target / "sysinfo.csv").write_text("workload_name,gpu_model\nx,MI300X_A1\n")
    (target / "pmc_perf.csv").write_text("Dispatch_ID,Kernel_Name,SQ_WAVES\n0,adamw_kernel,1024\n")
    return 0


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
        (folder / f"perfetto-trace-{os.getpid()}.proto").write_bytes(b"\x0a\x10 a trace")
    if "--profile" in given:
        (folder / f"wall_clock-{os.getpid()}.txt").write_text("| LABEL | COUNT | SUM |\n")
    return status


# ---------------------------------------------------------------- nsys and ncu

NSYS_PROFILE = "--trace --sample --cpuctxsw --cuda-graph-trace --output --force-overwrite".split()
NCU = "--metrics --set --clock-control --kernel-name-base --kernel-id --export --import --csv --page".split()


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
        print((SAMPLES / "ncu/raw.csv").read_text(), end="")
        return 0
    if FAULT == "no-permission":
        print(
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
        )
        return 1
    status = run_application(command)
    pathlib.Path(given["--export"] + ".ncu-rep").write_bytes(b"a report")
    return status


PROGRAMS = {
    "rocprofv3": rocprofv3,
    "rocprof-compute": rocprof_compute,
    "omniperf": rocprof_compute,
    "rocprof-sys-run": rocprof_sys,
    "omnitrace-run": rocprof_sys,
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
        print(error, file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
