#!/usr/bin/env python3
"""Run your own script or tests, and execute their Triton kernels as AMD's instructions, without a GPU.

    python scripts/execute_on_amd.py --target gfx942 -- my_script.py ITS OPTIONS
    python scripts/execute_on_amd.py --target gfx1100 --compare -- -m pytest tests/test_norm.py -k bfloat16

The script runs unchanged, and everything it puts on "cuda" stays on the CPU. Each Triton kernel is compiled for the
target, and our interpreter executes its machine code (amd/README.md says how, and what it can't see). At the end you
get a table of kernels:

launches        that were executed
configurations  that Triton compiled, for different shapes, constants or tiles
instructions    of all waves
matrix cycles   for which matrix instructions keep a matrix unit busy, of all units: amd/README.md
differs         with --compare: from what Triton's own interpreter computes, relative to a tensor's largest number
refused         instructions that our interpreter doesn't know, or what the kernel did wrong

Whether a result is right, only your script can tell: a kernel that passes your assertions is right, a kernel that
doesn't differ computes what Triton's language says.

Exit status: the script's own; 1 if it is 0 but a kernel was refused, did something wrong, or differs by more than
rounding explains; 2 for bad input; 130 after Ctrl-C, which prints the table of what was executed until then.
"""

import json
import os
import pathlib
import runpy
import sys
import traceback

from common.command_line import Failure, Parser, missing_package, positive, printable
from common.formulas.occupancy import TARGETS
from common.tables import write_whole

AMD_TARGETS = [name for name, target in TARGETS.items() if target.backend == "hip"]
OWN_PACKAGES = ("common", "amd")


def configurations(text):
    """Convert --configurations to a number, of which "first" is 1; "all" becomes None."""
    return None if text == "all" else positive("1" if text == "first" else text)


def new_parser():
    parser = Parser("execute_on_amd.py", __doc__)
    parser.add_argument("--target", choices=AMD_TARGETS, default="gfx942")
    parser.add_argument("--compare", action="store_true", help="run each launch in Triton's interpreter, too")
    parser.add_argument(
        "--configurations",
        type=configurations,
        default=1,
        metavar="N",
        help="of @triton.autotune: the N-th that fits the target, or the last (1); all: execute each, use the first",
    )
    parser.add_argument(
        "--kernel", metavar="NAME", default="", help="compare and list only kernels with this in their names"
    )
    parser.add_argument("--instructions", type=positive, metavar="N", help="stop a launch after N instructions")
    parser.add_argument("--order", type=int, choices=(1, -1), default=1, help="of the waves of a workgroup")
    parser.add_argument("command", nargs="+", metavar="-- SCRIPT", help="a script and its options, or -m and a module")
    return parser


def hide_own_modules():
    """Take our modules out of the way: a user's project may have a module that is called common or amd, too.

    Ours are imported by then, and hold each other.
    """
    scripts = pathlib.Path(__file__).resolve().parent
    for name in [name for name in sys.modules if name.split(".")[0] in OWN_PACKAGES]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != scripts]


def run_script(command):
    """Run a script, or a module after -m, as Python would; return its exit status."""
    is_module = command[0] == "-m"
    if is_module and len(command) < 2:
        raise Failure(2, "execute_on_amd.py: error: -m needs the name of a module")
    name, *arguments = command[1:] if is_module else command
    if not is_module and not pathlib.Path(name).is_file():
        raise Failure(2, f"execute_on_amd.py: error: there is no script {name}")
    sys.argv = [name, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else str(pathlib.Path(name).resolve().parent))
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main(argv=None):
    parser = new_parser()
    options = parser.parse_args(argv)
    parser.need_folders(vars(options))
    parser.refuse_protected_files(vars(options))
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # @torch.compile functions run as they are
    try:
        import triton
    except ImportError:
        print(f"execute_on_amd.py: {missing_package('triton')}", file=sys.stderr)
        return 2
    triton.knobs.runtime.interpret = False
    from amd.own_kernels import ACCESSES, Session
    from check_training import Terminal, ended_by_exception

    session = Session(
        options.target, options.configurations, options.compare, options.kernel, options.instructions, options.order
    )
    hide_own_modules()
    if options.json:
        options.json = os.path.abspath(options.json)  # the script may change its folder
    terminal = Terminal()  # and replace print, or send its output elsewhere
    try:
        with session.running(), ended_by_exception():
            status = run_script(options.command)
    except Failure as failure:
        terminal.write(f"{printable(str(failure))}\n", error=True)
        return failure.status
    lines = [f"{options.target}: the script launched no Triton kernel"]
    if session.rows:
        lines = [f"{options.target}, executed without a GPU:", *session.table().splitlines()]
        for name in ACCESSES:
            if table := session.access_table(name):
                lines += ["", *table.splitlines()]
    terminal.write("\n" + "\n".join(map(printable, lines)).rstrip() + "\n")
    if options.json:
        content = {"target": options.target, "status": status, "kernels": session.report()}
        try:
            write_whole(options.json, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            terminal.write(f"execute_on_amd.py: {options.json} cannot be written: {error.strerror}\n", error=True)
            return 2
    if status:
        return status
    return int(session.failed())


if __name__ == "__main__":
    sys.exit(main())
