"""Read the assembly of one kernel, as Triton returns it: its instructions, its labels, and how it is launched."""

import dataclasses
import functools
import re

ENCODINGS = ("_e64_dpp", "_e32", "_e64", "_dpp", "_sdwa")
DIRECTIVE_OR_NOTHING = re.compile(r"\.|$")
LABEL = re.compile(r"(\.?\w+):")
# "amdgcn-amd-amdhsa--gfx942"; since Triton 3.9 "amdgpu9.42-amd-amdhsa-unknown-gfx942"
TARGET = r"\.amdgcn_target \"\S*-(gfx\w+)"
SETS_MODE = ("s_setreg_imm32_b32", "s_denorm_mode")
# What the modes of floats must be when a kernel starts: round to nearest, and keep denormal numbers of 16 and 64 bits.
MODES = {"round_mode_32": (0,), "round_mode_16_64": (0,), "denorm_mode_32": (0, 3), "denorm_mode_16_64": (3,)}


class Fault(Exception):
    """Tell what a kernel did that it must not do, or what this interpreter does not know."""


class UnsupportedError(Fault):
    """Tell what this interpreter does not know: the kernel may be right."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. name has no suffix of its encoding; place is the line of the kernel that it comes from."""

    name: str
    encoding: str  # "", "e32", "e64", "dpp", "sdwa" or "e64_dpp"
    operands: tuple[str, ...]
    modifiers: dict[str, str]  # "offset:16" is {"offset": "16"}, "offen" is {"offen": ""}
    text: str
    place: str = ""

    def __str__(self):
        return f"{self.text}  ({self.place})" if self.place else self.text


FP16_OVFL = re.compile(r"hwreg\(HW_REG_(?:WAVE_)?MODE, 23, 1\), 1")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The code of one kernel, and what its metadata says about a launch."""

    name: str
    target: str
    width: int  # lanes of a wave
    code: tuple[tuple[Instruction, ...], ...]  # each one instruction, or the two halves of a dual-issue pair
    labels: dict[str, int]  # label -> index of the instruction after it
    vgprs: int
    agprs: int
    scratch: int  # bytes per lane
    lds: int  # bytes that are known at compile time; Triton's launches request more
    scratch_buffer: bool  # the first four scalar registers describe scratch memory as a buffer
    user_sgprs: int
    kernarg_sgpr: int  # the first of the two that hold the address of the arguments
    workgroup_ids: tuple[bool, bool, bool]  # which of x, y and z the kernel is given
    kernarg_size: int
    arguments: tuple[tuple[int, int, str], ...]  # offset, size, kind
    flushes: bool = False  # starts with a mode in which denormal float32 is zero (Triton's allow_flush_denorm)

    @functools.cached_property
    def may_flush(self):
        """Tell whether denormal float32 is zero for some instruction."""
        return self.flushes or any(half.name in SETS_MODE for pair in self.code for half in pair)

    @functools.cached_property
    def limits_half(self):
        """Tell whether the kernel sets the mode FP16_OVFL: float16 that overflows is the largest number."""
        return any(FP16_OVFL.search(half.text) for pair in self.code for half in pair)


def split_outside_brackets(text, separator):
    """Split at a separator (a regular expression) that stands outside of [] and ()."""
    not_inside = r"(?![^\[]*\])(?![^(]*\))"  # the next bracket of each kind, if any, is not one that closes
    parts = re.split(f"(?:{separator}){not_inside}", text)
    return [part.strip() for part in parts if part.strip()]


def parse_instruction(text, place=""):
    """Return the Instruction of one line of assembly."""
    name, _, rest = text.strip().partition(" ")
    encoding = next((suffix for suffix in ENCODINGS if name.endswith(suffix)), "")
    operands = split_outside_brackets(rest, ",")
    modifiers = {}
    if operands:
        last, *words = split_outside_brackets(operands[-1], r"\s+")
        operands[-1] = last
        modifiers = {key: value for key, _, value in (word.partition(":") for word in words)}
    return Instruction(name.removesuffix(encoding), encoding[1:], tuple(operands), modifiers, text.strip(), place)


def parse_line(text, place=""):
    """Return the instruction of a line, or the two of a dual-issue pair (RDNA3's VOPD)."""
    return tuple(parse_instruction(half.replace("v_dual_", "v_"), place) for half in text.split("::"))


def parse_kernel(text):
    """Return the Kernel of a file of assembly that holds one."""

    def directive(name, default=0):
        found = re.search(rf"\.amdhsa_{name} (\d+)", text)
        return int(found[1]) if found else default

    def metadata(name):
        return int(re.search(rf"^\s+\.{name}:\s*(\d+)", text, re.MULTILINE)[1])

    name = re.search(r"\.amdhsa_kernel (\S+)", text)[1]
    target = re.search(TARGET, text)[1]
    for mode, known in MODES.items():
        if (value := directive(f"float_{mode}", known[-1])) not in known:
            raise UnsupportedError(f"{target} {name}: .amdhsa_float_{mode} {value}")
    body = text[re.search(rf"^{re.escape(name)}:", text, re.MULTILINE).end() : text.index(".amdhsa_kernel")]
    files = dict(re.findall(r"\.file\s+(\d+) .*?\"([^\"]*)\"\s*$", text, re.MULTILINE))
    code = []
    labels = {}
    place = ""
    for line in body.splitlines():
        line = line.split(";")[0].strip()
        location = re.match(r"\.loc\s+(\d+) (\d+)", line)
        if location and location[2] != "0":
            place = f"{files.get(location[1], 'line')}:{location[2]}"
        elif label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif not DIRECTIVE_OR_NOTHING.match(line):
            code.append(parse_line(line, place))
    registers = directive("next_free_vgpr")
    vgprs = directive("accum_offset", registers)  # CDNA: the AGPRs follow
    before_kernarg = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}  # scalar registers, if asked for
    arguments = re.findall(r"\.offset:\s+(\d+)\n\s+\.size:\s+(\d+)\n\s+\.value_kind:\s+(\w+)", text)
    return Kernel(
        name=name,
        target=target,
        width=metadata("wavefront_size"),
        code=tuple(code),
        labels=labels,
        vgprs=vgprs,
        agprs=max(0, registers - vgprs),
        scratch=directive("private_segment_fixed_size"),
        lds=directive("group_segment_fixed_size"),
        scratch_buffer=bool(directive("system_sgpr_private_segment_wavefront_offset")),
        user_sgprs=directive("user_sgpr_count"),
        kernarg_sgpr=sum(count * directive(f"user_sgpr_{name}") for name, count in before_kernarg.items()),
        workgroup_ids=tuple(bool(directive(f"system_sgpr_workgroup_id_{axis}")) for axis in "xyz"),
        kernarg_size=directive("kernarg_size"),
        arguments=tuple((int(offset), int(size), kind) for offset, size, kind in arguments),
        flushes=directive("float_denorm_mode_32", 3) == 0,
    )
