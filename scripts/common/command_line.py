"""The tools' command line: one parser, errors as one line, and the options that several tools share."""

import argparse
import ast
import contextlib
import difflib
import math
import os
import pathlib
import re
import signal
import sys
import threading
import time

from common.versions import SCRIPTS, load_file

# Sizes for a machine without a GPU, where version 3's kernels run in Triton's interpreter.
CPU_SIZES = "--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 256".split()
FIRST_BATCH = ["--batch-size", "8", "--seq-len", "128"]  # of version 1's first exercises
PRESETS = ("tiny", "small", "medium")  # of the training scripts
PRECISIONS = {  # name -> options of the training scripts
    "float32": [],
    "tf32": ["--tf32"],
    "bfloat16": ["--use-amp", "--amp-dtype", "bfloat16"],
    "float16": ["--use-amp", "--amp-dtype", "float16"],
    "fp8": ["--use-amp", "--amp-dtype", "bfloat16", "--fp8"],  # of version 3, and of Hugging Face's model with torchao
}
SHORT_PRECISIONS = {"float32": "fp32", "tf32": "TF32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}
RESULTS = {"json", "csv", "output", "output_report"}  # options that name a file for results


class Failure(Exception):
    """End a tool with this exit status (2 for bad input, 1 for a failure) and, unless it is empty, one sentence."""

    def __init__(self, status, sentence=""):
        super().__init__(sentence)
        self.status = status


def printable(text):
    """Return the text with an escape such as \\x1b for each control character, which a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_protected(path):
    """Return whether a file exists that its owner, or the file system, lets nobody write; root could all the same."""
    path = os.path.realpath(path)
    return os.path.isfile(path) and not (os.stat(path).st_mode & 0o222 and os.access(path, os.W_OK))


def refuse_protected(path):
    """Raise Failure if a file is write-protected: replacing it needs no permission but the folder's."""
    if is_protected(path):
        raise Failure(2, f"{printable(str(path))} is write-protected: name another file")


class Screen:
    """Write to a stream what printable() returns of each line.

    Names of files, folders, kernels and processes come from anywhere: all that a tool prints goes through here.
    """

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write("\n".join(map(printable, text.split("\n"))))

    def __getattr__(self, name):
        return getattr(self.stream, name)


class Parser(argparse.ArgumentParser):
    """Parse a tool's options, described by its module's docstring; a wrong one prints one line, exit status 2."""

    def __init__(self, program, description, with_json=True):
        layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(program, None, description, allow_abbrev=False, **layout)
        self.color = False  # from Python 3.14 on argparse writes escape codes
        if with_json:
            self.add_argument("--json", metavar="FILE", help="write the results as JSON (-: print them as JSON)")

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _print_message(self, message, file=None):
        super()._print_message(message, Screen(file or sys.stderr))

    def parse_args(self, args=None, namespace=None):
        """Parse as argparse does; name the option that is nearest to an unknown one."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self.nearest(rest)}")
        return parsed

    def nearest(self, words):
        """Return "; did you mean ...?" with the options that the unknown ones among the words resemble, or ""."""
        unknown = [word.split("=")[0] for word in words if word.startswith("--")]
        alike = [difflib.get_close_matches(word, self._option_string_actions, 1) for word in unknown]
        found = [match for matches in alike for match in matches]
        return f"; did you mean {' '.join(found)}?" if found else ""

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does; refuse the one option of the training scripts that a tool has to give itself."""
        parsed, rest = super().parse_known_args(args, namespace)
        if any(word.split("=")[0] == "--metrics-file" for word in rest):
            self.error(
                "leave out --metrics-file: this tool names the files of its runs itself; --help says where results go"
            )
        return parsed, rest

    def run(self, work, argv, passes_on=False):
        """Run work(options) as run_tool does; with passes_on work(options, the options that are not listed)."""
        parsed = self.parse_known_args(argv) if passes_on else [self.parse_args(argv)]
        self.refuse_to_overwrite(vars(parsed[0]))
        self.need_folders(vars(parsed[0]))
        self.refuse_protected_files(vars(parsed[0]))
        return run_tool(self.prog, lambda: work(*parsed))

    def refuse_to_overwrite(self, options):
        """Refuse a file for results that another option reads: what was measured would be gone."""
        values = [value for name, value in options.items() if name not in RESULTS]
        words = [word for value in values for word in (value if isinstance(value, list) else [value])]
        files = [word for word in words if isinstance(word, (str, os.PathLike)) and os.path.isfile(word)]
        for name in sorted(RESULTS & options.keys()):
            result = options[name] or ""
            if os.path.isfile(result) and any(os.path.samefile(file, result) for file in files):
                self.error(f"--{name.replace('_', '-')} {result} is a file that this tool reads: choose another name")

    def need_folders(self, options):
        """Refuse a file for results in a folder that is not there, before hours of work; a tool may make its own."""
        made = [os.path.abspath(value) for value in options.values() if isinstance(value, (str, os.PathLike))]
        for name in sorted({"json", "csv"} & options.keys()):
            folder = os.path.dirname(os.path.abspath(options[name] or ""))
            if not os.path.isdir(folder) and folder not in made:
                self.error(f"--{name} {options[name]}: its folder does not exist")

    def refuse_protected_files(self, options):
        """Refuse a write-protected file for results, before hours of work."""
        for name in sorted({"json", "csv", "output_report"} & options.keys()):
            if options[name] and is_protected(options[name]):
                words = "is write-protected: name another file"
                self.error(f"--{name.replace('_', '-')} {options[name]} {words}")


def missing_package(name):
    """Return what to do about a package that this Python lacks."""
    return f"{sys.executable} has no {name}: run `source .venv/bin/activate` first; scripts/quickstart.sh makes .venv"


@contextlib.contextmanager
def terminated_like_interrupted():
    """Let SIGTERM, which `timeout` and schedulers send, end a block like Ctrl-C: what it started ends too."""
    before = signal.getsignal(signal.SIGTERM)
    ours = before == signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


def run_tool(program, work):
    """Run a tool's work and return its exit status; print errors as one line instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a letter that the terminal lacks must not end a tool
    screens = contextlib.redirect_stdout(Screen(sys.stdout)), contextlib.redirect_stderr(Screen(sys.stderr))
    with screens[0], screens[1], terminated_like_interrupted():
        return status_of(program, work)


def caused_by_interrupt(error):
    """Tell whether an error was raised from Ctrl-C, as up to Python 3.11 one in an import can be."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def status_of(program, work):
    """Return the exit status of a tool's work; print an error as one line."""
    try:
        return work() or 0
    except Failure as error:
        if str(error):
            print(f"{program}: {error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        print(f"{program}: {missing_package(error.name)}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = error.filename or "the output"
        verb = "written"
        if isinstance(error, IsADirectoryError | PermissionError):  # of a file to be read, or of one to be written
            verb = "opened"
        # A file that is not there can be written wherever its folder is: it was to be read.
        elif isinstance(error, FileNotFoundError) and pathlib.Path(error.filename or "").parent.is_dir():
            verb = "read"
        print(f"{program}: {name} cannot be {verb}: {error.strerror}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, RuntimeError) as error:
        if not caused_by_interrupt(error):
            raise
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def progress(sentence):
    print(sentence, file=sys.stderr, flush=True)


class Pace:
    """Tell when long work has been silent for so many seconds that its user should hear how far it is."""

    def __init__(self, seconds=10):
        self.seconds = seconds
        self.begin()

    def begin(self):
        self.last = time.monotonic()

    def is_due(self):
        """Return whether the time has passed; if so, begin anew."""
        if time.monotonic() - self.last < self.seconds:
            return False
        self.begin()
        return True


def result_folder(name, option="--profile-dir"):
    """Return the folder that an option names, created if needed."""
    folder = pathlib.Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(1, f"{option} {folder} cannot be made: {error.strerror}") from None
    return folder


def trace_folder(name, option="--profile-dir"):
    """Return the folder for PyTorch's traces that an option names; refuse a name that would break them."""
    if re.search(r'[\x00-\x1f"\\\ud800-\udfff]', str(name)):
        wanted = "must be UTF-8 without control characters, quotes and backslashes: PyTorch's traces do not escape them"
        raise Failure(2, f"{option} {wanted}, got {printable(str(name))}")
    return result_folder(name, option)


# ---------------------------------------------------------------- options


def whole(text):
    """Convert a text of plain digits; int alone takes 1_0 and the digits of other scripts too."""
    if not re.fullmatch("[-+]?[0-9]+", text.strip()):
        raise ValueError(f"{text!r} isn't a whole number")
    return int(text)


def positive(text):
    """Convert an option's text to a whole number of at least 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def finite(text):
    """Convert an option's text to a finite number of at least 0; float alone takes nan, inf and 1_0 too."""
    value = float(text)
    if not 0 <= value < math.inf or not text.isascii() or "_" in text:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return value


def listed(choices=None, convert=str):
    """Return a converter for values separated by commas, each one of the choices if there are any."""

    def parse(text):
        written = text.strip("\"'")  # quotes that were escaped for a shell arrive with the list
        try:
            values = [convert(part) for part in written.split(",") if part]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: separate whole numbers with commas, as in 4,8") from None
        if not values or any(choices and value not in choices for value in values):
            allowed = ", ".join(map(str, choices)) if choices else "one or more values"
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {allowed}")
        return list(dict.fromkeys(values))

    return parse


numbers = listed(convert=positive)


def add_version_option(parser):
    words = "1 to 4 (default: the version in whose folder you call the tool)"
    parser.add_argument("--version", type=int, choices=SCRIPTS, metavar="N", help=words)


def version_meant(wanted=None):
    """Return the wanted version, or else that of the folder that the program was called from or in.

    The folders offer the tools as symbolic links, so the path by which a tool was called tells the version.
    """
    if wanted is not None:
        return wanted
    for folder in (pathlib.Path(sys.argv[0]).absolute().parent, pathlib.Path.cwd()):
        for version, script in SCRIPTS.items():
            if script.parent == folder.resolve():
                return version
    raise Failure(2, "say which version with --version 1, 2, 3 or 4, or run this in a version's folder")


def add_steps(parser, option="--steps"):
    parser.add_argument(option, type=positive, metavar="N", help="number of steps, if the profile doesn't say it")


def add_gpu(parser):
    parser.add_argument("--gpu", metavar="NAME", help="GPU or process to read, if the profile has several")


def add_time_limit(parser):
    words = "start nothing that couldn't finish within S seconds"
    parser.add_argument("--time-limit", type=finite, metavar="S", help=words)


# ---------------------------------------------------------------- options for the training scripts


def on_cpu(argv):
    """Return whether these options train on the CPU; if so, have version 3's kernels interpreted."""
    import torch

    chosen = [word for flag, word in zip(argv, argv[1:], strict=False) if flag == "--device"]
    cpu = chosen[-1:] == ["cpu"] or "--device=cpu" in argv or not torch.cuda.is_available()
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before version 3 imports Triton
    return cpu


def with_sizes(argv):
    """Return the options, on a CPU after those of a very small model unless they choose sizes themselves."""
    if on_cpu(argv) and not any(word.startswith(("--preset", "--hidden-dim", "--num-layers")) for word in argv):
        return [*CPU_SIZES, *argv]
    return argv


def with_first_batch(argv):
    """Return the options after FIRST_BATCH unless they name a preset, so profiles without sizes are of one batch."""
    if any(word.startswith("--preset") for word in argv):
        return argv
    return [*FIRST_BATCH, *argv]


def script_path(name, option):
    """Return the training script that a file or a version's folder means."""
    path = pathlib.Path(name)
    if path.is_dir():
        path = next(path.glob("tiny_llama_v*.py"), path)
    if not path.is_file():
        raise Failure(2, f"{option} {name} does not exist, or has no tiny_llama_v*.py in it: name the script itself")
    return path


def load_script(path, option):
    """Return the module of a training script anywhere, one of the four or a copy with changes.

    Any other program is refused before it runs: its import could train for hours.
    """
    path = path.resolve()
    foreign = f"{option} {path} is not a training script of this workshop: it has no Trainer"
    foreign += "; check_training.py takes any script"
    try:
        statements = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise Failure(2, f"{option} {path} isn't valid Python: {error.msg} in line {error.lineno}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise Failure(2, f"{option} {path} isn't valid Python: {error}") from None
    imports = [alias for node in statements if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.asname or alias.name for alias in imports} | {getattr(node, "name", None) for node in statements}
    if "*" not in names and not {"Trainer", "canonical_views"} <= names:
        raise Failure(2, foreign)
    try:
        module = load_file(path, path.stem if path in SCRIPTS.values() else f"{path.stem}_{abs(hash(path))}")
    except ModuleNotFoundError:
        raise  # run_tool says what to do
    except SystemExit:
        what = "put its work under if __name__ == '__main__'"
        raise Failure(2, f"{option} {path} ended the process when it was imported: {what}") from None
    except Exception as error:
        if caused_by_interrupt(error):
            raise KeyboardInterrupt from None
        raise Failure(2, f"{option} {path} cannot be imported: {type(error).__name__}: {error}") from None
    if not hasattr(module, "Trainer") or not hasattr(module, "canonical_views"):
        raise Failure(2, foreign)
    return module
