"""Delete or change single instructions of version 3's kernels, and count how many of these mutants the checks notice.

Half of a kernel's mutants lack an instruction; in the others a source operand is another register or number. The draw
leaves out waits and their like, which the interpreter does not model, the end of the program, and what the case does
not execute. A mutant that changes nothing may be the same program: the result is not used here, or the other
operand holds the same value.
"""

import dataclasses
import functools
import random
import re
from unittest import mock

import torch

import kernel_cases
from amd import launch
from amd.assembly import Fault, parse_kernel
from amd.execute import Program, kind_of, translate
from common.versions import load_version
from kernel_cases import attention_case, loss_case, norm_case, rope_case, swiglu_case

V3 = load_version(3)
# Cases that fill most of a tile: what computes masked elements cannot be noticed.
NORM = functools.partial(norm_case, 9, 500)
SWIGLU = functools.partial(swiglu_case, 2, width=2100)
ATTENTION = functools.partial(attention_case, 1, 75, 2, 1, 16, rotated=True)
LOSS = functools.partial(loss_case, 2, V=4200)
CASES = {
    "rmsnorm_forward_kernel": NORM,
    "rmsnorm_backward_kernel": NORM,
    "column_sum_kernel": kernel_cases.check_column_sums,
    "rope_kernel": functools.partial(rope_case, 1, 30, 3, 1, 32),
    "swiglu_forward_kernel": SWIGLU,
    "swiglu_backward_kernel": SWIGLU,
    "attention_forward_kernel": ATTENTION,
    "attention_backward_dq_kernel": ATTENTION,
    "attention_backward_dkdv_kernel": ATTENTION,
    "cross_entropy_forward_kernel": LOSS,
    "cross_entropy_backward_kernel": LOSS,
    "adamw_kernel": kernel_cases.check_adamw,
}


def changed(instruction, draw):
    """Return an instruction with another source operand, or None where there is none to change."""
    places = list(range(1, len(instruction.operands)))
    draw.shuffle(places)
    for i in places:
        text = instruction.operands[i]
        if register := re.fullmatch(r"([vsa])(\d+)", text):
            other = f"{register[1]}{max(0, int(register[2]) + draw.choice((-1, 1)))}"
        elif re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
            other = str(int(text, 0) + 1)
        elif text in ("1.0", "0.5", "2.0"):
            other = "4.0"
        else:
            continue
        operands = (*instruction.operands[:i], other, *instruction.operands[i + 1 :])
        words = f"{instruction.text} -> operand {other}"
        return dataclasses.replace(instruction, operands=operands, text=words)
    return None


class Mutator:
    """Stand for launch.program_of: programs as they are, but for one instruction of one kernel."""

    def __init__(self, name):
        self.name = name
        self.programs = {}
        self.counts = {}
        self.mutant = None  # (index, function of a wave)

    def __call__(self, assembly):
        if assembly not in self.programs:
            self.programs[assembly] = Program(parse_kernel(assembly), limit=3000)
        program = self.programs[assembly]
        if program.kernel.name != self.name or self.mutant is None or self.chosen is not program:
            return self.counting(program) if program.kernel.name == self.name and self.mutant is None else program
        index, function = self.mutant
        other = Program.__new__(Program)
        vars(other).update(vars(program), steps=[*program.steps[:index], function, *program.steps[index + 1 :]])
        return other

    def counting(self, program):
        """Return the program, which notes what it executes."""
        run = program.run
        mutator = self

        def noting(wave, counts):
            run(wave, counts)
            mutator.counts[id(program)] = (program, counts)

        other = Program.__new__(Program)
        vars(other).update(vars(program), run=noting)
        return other

    def draw(self, draw):
        """Choose a mutant, and return it in words."""
        program, counts = draw.choice(list(self.counts.values()))
        while True:
            index = draw.randrange(len(counts))
            pair = program.kernel.code[index]
            if not counts[index] or kind_of(pair[0]) == "no effect" or pair[0].name == "s_endpgm":
                continue
            if draw.random() < 0.5:
                self.mutant, self.chosen = (index, lambda wave: None), program
                return f"without {' :: '.join(half.text for half in pair)}"
            other = changed(pair[0], draw)
            try:
                function = other and translate((other, *pair[1:]), program.kernel)
            except Fault:
                continue
            if function:
                self.mutant, self.chosen = (index, function), program
                return other.text


def outcome(target, name, dtype, mutator):
    """Return "" if all is right, else what the check says."""
    cpu = torch.device("cpu")
    with launch.executed_version(V3, target), mock.patch.object(launch, "program_of", mutator):
        try:
            if name == "adamw_kernel":
                kernel_cases.check_adamw(V3, dtype, cpu)
            elif name == "column_sum_kernel":
                kernel_cases.check_column_sums(V3, cpu)
            else:
                kernel_cases.check(V3, CASES[name](), dtype, cpu)
        except Fault as fault:
            return f"fault: {fault}"
        except (kernel_cases.Wrong, RuntimeError) as wrong:
            return f"wrong: {wrong}"
    return ""


def measure(target, name, dtype, number):
    """Return how many mutants of a kernel were a "fault" or a "wrong" result, and those not noticed, in words."""
    dtype = getattr(torch, dtype)
    mutator = Mutator(name)
    draw = random.Random(1)
    if said := outcome(target, name, dtype, mutator):
        raise RuntimeError(f"{target} {name} without a mutant: {said}")
    found = {"fault": 0, "wrong": 0, "not noticed": []}
    for _ in range(number):
        words = mutator.draw(draw)
        said = outcome(target, name, dtype, mutator)
        if said:
            found[said.partition(":")[0]] += 1
        else:
            found["not noticed"].append(words)
    return found
