"""Run one training script under the control of compare_training.py: record its first steps, then time its own loop.

    python child.py '{"command": ["train.py"], "folder": "/tmp/x", "steps": 3, "inbox": 5, "outbox": 6}'

The script runs unchanged. In each of its first steps it is held at the first call of its model, where it hands over its
weights or takes others, and is recorded until the next one. Then the hooks are gone but for the one that counts steps,
and the script runs so many steps of its own loop whenever it is asked. Messages are lines of JSON, tensors are files.

The random state is set at the entry of each recorded call, and put back after it: what the model draws changes neither
the other calls nor the batches. A script that draws nothing inside its model computes its own numbers.
"""

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import random
import sys
import threading
import time
import traceback

import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks
from torch.utils import _pytree as pytree

CALLERS = {"call", "recorded", "traced", "watched", "backward", "counted", "run"}  # run the script's code
OUTPUTS = 3  # of a model, whose gradients are compared
SAMPLE = 4096  # elements kept of what a module takes and returns
SETTINGS = "lr betas eps weight_decay momentum dampening nesterov amsgrad alpha rho".split()


def load_check():
    """Return check_training.py as a module under a name that no script imports."""
    path = pathlib.Path(__file__).resolve().parents[2] / "check_training.py"
    spec = importlib.util.spec_from_file_location("_check_training", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = load_check()


# ---------------------------------------------------------------- random state


def random_state():
    """Return the state of all generators that a script may use."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state):
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def is_same_state(one, other):
    """Tell whether nothing was drawn between two states of PyTorch's generators."""
    same = torch.equal(one["torch"], other["torch"])
    return same and all(map(torch.equal, one.get("cuda", ()), other.get("cuda", ())))


@contextlib.contextmanager
def seeded(number):
    """Set the random state for a block, and put it back; yield a list that then says whether the block drew."""
    drew = []
    before = random_state()
    seed(number)
    start = random_state()
    try:
        yield drew
    finally:
        drew.append(not is_same_state(start, random_state()))
        set_random_state(before)


# ---------------------------------------------------------------- tensors


def on_cpu(tensor):
    """Return a tensor's values in plain CPU memory of their own."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return check.plain(tensor).cpu().clone()


def is_capturing():
    """Tell whether a GPU graph is being captured, in which nothing may be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def sample(tensor):
    """Return some elements, evenly spread: two tensors of one size give the same places."""
    values = check.plain(tensor).flatten()
    stride = values.numel() // SAMPLE | 1  # odd, or it might follow one column
    return values[::stride].float().cpu()


def data_of(tree):
    """Return the tensors that a call is given as data: not those that another module computed."""
    return [tensor for tensor in check.tensors(tree) if not tensor.requires_grad and check.has_values(tensor)]


def with_data(tree, values):
    """Return arguments with these values in the place of their first data tensors."""
    left = list(values)

    def replace(tensor):
        if tensor.requires_grad or not left:
            return tensor
        value = left.pop(0)
        return value.to(tensor.device, tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, replace, tree)


def is_constant(tensor):
    return bool(tensor.numel() < 2 or (tensor == tensor.flatten()[0]).all())


def copies_of(params):
    """Return {id of a parameter: tensors elsewhere with its values}: masters, averages, saved initial weights.

    A constant, such as a norm's weight of ones, equals too much to be known by its values.
    """
    params = [param for param in params if param.is_floating_point() and not is_constant(param)]
    kinds = {(param.shape, param.dtype, param.device) for param in params}
    dtypes = {(shape, device): dtype for shape, dtype, device in kinds}
    own = {id(param) for param in params}
    others = []
    for thing in check.existing(torch.Tensor, nn.Parameter):
        if type(thing) not in (torch.Tensor, nn.Parameter) or not thing.is_floating_point():
            continue  # a compiler's tensors have no values
        if thing.layout is torch.strided and id(thing) not in own and (thing.shape, thing.device) in dtypes:
            others.append(thing)
    rounded = [thing.detach().to(dtypes[thing.shape, thing.device]) for thing in others]
    by_sum = {}
    for thing, total in zip(others, check.bit_sums(rounded), strict=True):
        by_sum.setdefault((thing.shape, total), []).append(thing)
    sums = zip(params, check.bit_sums(params), strict=True)
    return {id(param): by_sum.get((param.shape, total), []) for param, total in sums}


def settings_of(group):
    """Return the numbers that an optimizer's group of parameters is updated with."""
    found = {}
    for name in SETTINGS:
        value = group.get(name)
        if isinstance(value, (tuple, list)):
            found[name] = [float(item) for item in value if item is not None]  # Adafactor's eps may hold a None
        elif value is not None:
            found[name] = float(value)
    return found


# ---------------------------------------------------------------- the child


class Ended(SystemExit):
    """End the script where the parent has all that it needs, or can have nothing."""


class Child:
    """Follow a script, and answer the parent."""

    def __init__(self, request):
        self.steps_wanted = request["steps"]
        self.folder = pathlib.Path(request["folder"])
        self.inbox = os.fdopen(request["inbox"])
        self.outbox = os.fdopen(request["outbox"], "w")
        self.main = threading.current_thread()
        self.files = 0
        self.phase = "start"  # start, recording, recorded, timing
        self.undo = []
        # the model
        self.tops = {}  # root module -> the whole model around it
        self.model = None
        self.params = {}  # name -> parameter
        self.names = {}  # id of a parameter, or of its master -> name
        self.modules = {}  # module -> name
        self.running = False  # is a root module's call going on?
        self.calls = 0
        self.trace = None  # what the modules of a step's first call took and returned
        # the loop
        self.in_backward = False
        self.backwards = 0
        self.scalers = None
        self.lead = None  # the optimizer whose steps are counted
        self.steps = 0
        self.saved = 0
        self.held = {}  # name -> (optimizer, its parameter: the model's own, or a float32 master of it)
        self.start = {}  # name -> value at the first call of a step
        self.sums = {}  # name -> bit sum there, or after the last optimizer.step()
        self.buffers = {}  # name -> value there
        self.step = self.new_step()
        self.kinds = set()  # classes of the optimizers
        self.strays = set()  # parameters of the optimizers that are not the model's
        self.foreign = set()  # classes of the optimizers that hold no parameter of the model
        self.steps_in_backward = False
        self.captured = False  # is the optimizer's step in a GPU graph?
        self.left = 0  # steps until the next answer
        self.began = 0.0

    # ------------------------------------------------------------ messages
    def say(self, at, **content):
        self.outbox.write(json.dumps({"at": at, **content}) + "\n")
        self.outbox.flush()

    def save(self, content):
        """Write tensors, and return the file's name."""
        self.files += 1
        path = self.folder / f"{self.files}.pt"
        torch.save(content, path)
        return str(path)

    def next_request(self):
        line = self.inbox.readline()
        if not line:  # the parent is gone
            os._exit(0)
        return json.loads(line)

    def listens(self):
        return self.phase in ("start", "recording") and threading.current_thread() is self.main

    # ------------------------------------------------------------ modules
    def is_root(self, module):
        """Tell whether this is an outermost call in training, of a module that trains."""
        if self.in_backward or not torch.is_grad_enabled():
            return False
        if is_capturing() or check.is_transformed():
            return False
        return any(param.requires_grad and check.has_values(param) for param in check.params_of(module))

    def call(self, run, module, args, kwargs):
        """Run a module's call; hold, seed and record it if it is an outermost one."""
        if self.running:
            return self.traced(run, module, args, kwargs)
        if not self.is_root(module):
            return run(module, *args, **kwargs)
        if self.steps > self.saved:
            self.finish_step()
            if self.steps < self.steps_wanted:
                self.say("held")
                self.obey()
        if self.steps >= self.steps_wanted:
            self.hand_over()
            return run(module, *args, **kwargs)
        self.running = True
        try:
            if any(nn.parameter.is_lazy(param) for param in module.parameters()):  # this call makes them
                return run(module, *args, **kwargs)
            if module not in self.tops:
                self.tops[module] = check.top_of(module)
            if self.model is None or self.was_dry_run(self.tops[module]):
                self.calls = 0
                self.step = self.new_step()
                self.adopt(self.tops[module])
                self.hold(module, args, kwargs)
            return self.recorded(run, module, args, kwargs)
        finally:
            self.running = False

    def was_dry_run(self, top):
        """Tell whether nothing trained yet, and the calls until now were of a model that was not whole, or of another.

        top: the whole model of the call that begins.
        """
        if self.backwards or self.steps:
            return False
        if top is self.model:
            return check.ids_of(top) != self.names.keys()
        if self.model in set(top.modules()):
            return True
        held = check.ids_of(*check.existing(torch.optim.Optimizer))
        return bool(held & check.ids_of(top)) and not held & self.names.keys()

    def adopt(self, model):
        """Take in the model: the names of its parameters and modules."""
        self.model = model
        self.params = {check.clean(name): param for name, param in model.named_parameters()}
        self.names = {id(param): name for name, param in self.params.items()}
        self.modules = {module: check.clean(name) for name, module in model.named_modules()}

    def recorded(self, run, module, args, kwargs):
        """Run and record an outermost call."""
        if not self.step["calls"]:
            self.start = {name: self.value_of(name) for name in self.params}
            self.sums = self.sums_of(self.params)
            self.buffers = self.buffers_now()
        call = {"data": [on_cpu(tensor) for tensor in data_of((args, kwargs))]}
        call["evaluating"] = [name for part, name in self.modules.items() if not part.training]
        self.step["calls"].append(call)
        self.calls += 1
        if len(self.step["calls"]) == 1:
            self.trace = call["trace"] = []
        with seeded(self.calls) as drew:
            output = self.traced(run, module, args, kwargs)
        call["drew"] = drew[0]
        self.trace = None
        outputs = [tensor for tensor in check.tensors(output) if tensor.is_floating_point()]
        call["outputs"] = [sample(tensor) for tensor in outputs]
        call["shapes"] = [list(tensor.shape) for tensor in outputs]
        return output

    def traced(self, run, module, args, kwargs):
        """Run a module's call, and keep samples of what it takes and returns in a step's first call."""
        name = self.modules.get(module)
        if self.trace is None or name is None:
            return run(module, *args, **kwargs)
        self.keep("in", name, module, (args, kwargs))
        output = run(module, *args, **kwargs)
        if self.trace is not None:
            self.keep("out", name, module, output)
        return output

    def keep(self, side, name, module, tree):
        """Add samples to the trace. A loss function's labels are no floating-point numbers, and left out."""
        values = [sample(item) for item in check.tensors(tree) if item.is_floating_point() and check.has_values(item)]
        self.trace.append({"side": side, "name": name, "class": type(module).__name__, "values": values})

    # ------------------------------------------------------------ held at the first call
    def hold(self, module, args, kwargs):
        """Tell the parent about the model and the first call, and do what it asks for."""
        aliases = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            aliases.setdefault(self.names[id(param)], []).append(check.clean(name))
        content = {
            "weights": {self.names[id(param)]: on_cpu(param) for param in self.model.parameters()},
            "data": [on_cpu(tensor) for tensor in data_of((args, kwargs))],
        }
        described = {
            "tied": {name: names for name, names in aliases.items() if len(names) > 1},
            "precision": self.precision(),
        }
        self.say("model", file=self.save(content), **described)
        self.obey(functools.partial(self.replay, module, args, kwargs))

    def obey(self, replay=None):
        """Do what the parent asks for until it says record."""
        while True:
            request = self.next_request()
            if request["do"] == "record":
                self.phase = "recording"
                return
            if request["do"] == "load":
                self.load(request["file"])
                self.say("loaded")
            if request["do"] == "weights":
                self.say("weights", file=self.save({name: self.value_of(name) for name in self.params}))
            if request["do"] == "replay":
                self.say("replayed", **replay(request))

    def precision(self):
        """Return what decides the size of a rounding, as the options of a training script say it."""
        param = next(self.model.parameters())
        kind = param.device.type
        low = {str(item.dtype).removeprefix("torch.") for item in self.model.parameters() if item.element_size() == 2}
        if torch.is_autocast_enabled(kind):
            low.add(str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
        tf32 = kind == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
        amp = "bfloat16" if "bfloat16" in low else next(iter(low), "bfloat16")
        return {"device": kind, "use_amp": bool(low), "amp_dtype": amp, "tf32": bool(tf32)}

    @torch.no_grad()
    def load(self, file):
        """Overwrite parameters, and all copies of them elsewhere, in place."""
        params = list(self.model.parameters())
        copies = copies_of(params)  # before the file's tensors exist, which may have the same values
        weights = torch.load(file, weights_only=True)
        for param in params:
            value = weights.get(self.names[id(param)])
            if value is None:
                continue
            param.copy_(value)
            for copy in copies.get(id(param), ()):
                copy.copy_(value)

    def replay(self, module, args, kwargs, request):
        """Run the model on given data; return outputs, and gradients under one fixed gradient of each output."""
        values = torch.load(request["file"], weights_only=True)["data"]
        while isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        modes = {part: part.training for part in self.model.modules()}
        buffers = {buffer: buffer.clone() for buffer in self.model.buffers()}
        if request["evaluate"]:
            self.model.eval()
        params = {self.names[id(p)]: p for p in self.model.parameters() if p.requires_grad}
        own = data_of((args, kwargs))
        args, kwargs = with_data((args, kwargs), values)
        self.trace = []
        try:
            if len(own) > len(values):
                raise TypeError(f"it takes {len(own)} tensors, but the other script's gets {len(values)}")
            with seeded(1):
                output = self.traced(self.original_call, module, args, kwargs)
            trace = self.trace
            outputs = [item for item in check.tensors(output) if item.requires_grad and item.is_floating_point()]
            if not outputs:
                raise TypeError("its output has no tensor that needs a gradient")
            outputs = outputs[:OUTPUTS]
            content = {"outputs": [on_cpu(item) for item in outputs], "gradients": [], "trace": trace}
            for item in outputs:
                generator = torch.Generator().manual_seed(item.numel())
                along = torch.randn(item.shape, generator=generator).to(item.device, item.dtype)
                found = torch.autograd.grad(item, list(params.values()), along, retain_graph=True, allow_unused=True)
                found = {name: gradient for name, gradient in zip(params, found, strict=True) if gradient is not None}
                content["gradients"].append({name: on_cpu(gradient) for name, gradient in found.items()})
            return {"file": self.save(content)}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        finally:
            self.trace = None
            for part, training in modes.items():
                part.training = training
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)

    # ------------------------------------------------------------ backward
    def backward(self, run, roots, *args, **kwargs):
        """Record the scalar that backward begins from, without a gradient scaler's factor."""
        if self.in_backward or threading.current_thread() is not self.main:
            return run(roots, *args, **kwargs)
        if self.phase == "recording" and not is_capturing():
            loss = next((root for root in check.tensors([roots]) if root.numel() == 1), None)
            if loss is not None:
                self.step["losses"].append(float(loss.detach()) / self.scale())
        self.in_backward = True
        try:
            result = run(roots, *args, **kwargs)
        finally:
            self.in_backward = False
        if self.phase == "recording" and not is_capturing():
            scale = self.scale()
            with_grad = {name: param for name, param in self.model.named_parameters() if param.grad is not None}
            late = [check.clean(name) for name, param in with_grad.items() if id(param) not in self.names]
            if late:
                self.end(f"its model gets {check.folded(late, 3)} after its first call: make all parameters before it")
            given = {self.names[id(param)]: param.grad for param in with_grad.values()}
            self.step["given"] = {name: on_cpu(gradient) / scale for name, gradient in given.items()}
        self.backwards += 1
        self.give_up()
        return result

    def scale(self):
        if self.scalers is None:
            self.scalers = [scaler for scaler in check.existing(torch.amp.GradScaler) if scaler.is_enabled()]
        return self.scalers[0].get_scale() if self.scalers else 1.0

    def give_up(self):
        """End a script that has no optimizer's step."""
        if self.steps or self.lead or self.backwards % check.BACKWARDS:
            return
        if self.backwards >= check.MICRO_BATCHES or not check.existing(torch.optim.Optimizer):
            self.end(self.why_it_ended())

    # ------------------------------------------------------------ optimizers
    def new_step(self):
        found = {"calls": [], "losses": [], "given": {}, "gradients": {}, "updates": {}, "settings": {}}
        # outside: weights that change outside of optimizer.step(). still: buffers that do not change
        return found | {"outside": [], "buffers": {}, "still": []}

    def name_of(self, param):
        """Return the name of an optimizer's parameter; one that is a master of the model's has that one's."""
        if id(param) in self.names:
            return self.names[id(param)]
        for name, other in self.params.items():
            alike = other.shape == param.shape and other.device == param.device
            if not alike or other.element_size() != 2 or name in self.held:
                continue
            if torch.equal(param.detach().to(other.dtype), other):
                self.names[id(param)] = name
                return name
        if param.requires_grad and param.grad is not None:
            self.strays.add(id(param))
        return None

    def value_of(self, name):
        """Return a copy of what trains: a parameter, or the float32 master of it if the two agree."""
        param = self.params[name]
        optimizer, value = self.held.get(name, (None, param))
        if value is param and optimizer:
            key = check.copy_key(param, optimizer)
            value = param if key is None else optimizer.state[param][key]
        if value is not param and not torch.equal(value.detach().to(param.dtype), param):
            value = param
        return on_cpu(value)

    def buffers_now(self):
        """Return {name: value} of the floating buffers, such as a batch norm's running mean."""
        found = {check.clean(name): buffer for name, buffer in self.model.named_buffers()}
        found = {name: item for name, item in found.items() if item.is_floating_point() and check.has_values(item)}
        return {name: on_cpu(item) for name, item in found.items()}

    def sums_of(self, names):
        """Return the bit sums of these parameters; those with a master elsewhere are left out: the script copies it."""
        own = [name for name in names if self.held.get(name, (None, self.params[name]))[1] is self.params[name]]
        return dict(zip(own, check.bit_sums([self.params[name] for name in own]), strict=True))

    def look_outside(self, names):
        """Note which parameters changed since the step began, or since the last optimizer.step()."""
        now = self.sums_of(names)
        self.step["outside"] += [name for name, total in now.items() if total != self.sums.get(name, total)]

    def step_begins(self, optimizer, args, kwargs):
        """Look at an optimizer before its step, or once its closure has computed the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or not self.listens():
            self.look(optimizer)
            return None
        calls = []

        @functools.wraps(closure)
        def watched():
            calls.append(closure())
            if len(calls) == 1:
                self.look(optimizer)
            return calls[-1]

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    @torch.no_grad()
    def look(self, optimizer):
        """Record the gradients and the settings of an optimizer's step."""
        if self.phase != "recording" or self.model is None:
            return
        if torch.compiler.is_compiling() or is_capturing():
            return
        self.steps_in_backward |= self.in_backward
        scale = getattr(optimizer, "grad_scale", None)  # a fused step that divides by the scaler's factor itself
        if not any(self.name_of(param) for param in check.params_of(optimizer)):
            self.foreign.add(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self.name_of(param)
                if name is None:
                    continue
                self.lead = self.lead or optimizer
                self.kinds.add(type(optimizer).__name__)
                self.step["settings"][name] = settings_of(group)
                is_new = name not in self.held
                self.held[name] = (optimizer, param)
                if is_new:
                    self.start[name] = self.value_of(name)
                self.look_outside([name])
                if param.grad is not None:
                    gradient = param.grad if scale is None else param.grad / scale
                    self.step["gradients"][name] = on_cpu(gradient)

    @torch.no_grad()
    def step_ended(self, optimizer, args, kwargs):
        """Count a step if it is the lead's; what changes its weights after it is another thing."""
        if torch.compiler.is_compiling():
            return
        if is_capturing():
            self.captured |= optimizer is self.lead
            return
        if self.phase == "recording":
            mine = {self.names.get(id(param)) for param in check.params_of(optimizer)}
            self.sums |= self.sums_of(mine & self.held.keys())
        if optimizer is self.lead or self.replaces_lead(optimizer):
            self.lead = optimizer
            self.count()

    def replaces_lead(self, optimizer):
        """Tell whether an optimizer holds the lead's parameters, as one that a script makes anew in its loop."""
        return bool(self.lead) and check.ids_of(optimizer) == check.ids_of(self.lead)

    def count(self):
        """Count a step of the loop; hold it where the parent waits for it."""
        self.steps += 1
        if self.phase == "recording" and self.captured:
            self.end("its step went into a GPU graph before it could be recorded: switch graphs off")
        if self.phase == "timing":
            self.left -= 1
            if not self.left:
                self.answer()

    def finish_step(self):
        """Hand a step to the parent, once all optimizers have stepped and the script has done what follows them."""
        for name, start in self.start.items():
            update = (self.value_of(name).double() - start.double()).float()
            if name in self.step["settings"] or update.any():
                self.step["updates"][name] = update
        self.look_outside(self.params)
        for name, buffer in self.buffers_now().items():
            if name in self.buffers and torch.equal(buffer, self.buffers[name]):
                self.step["still"].append(name)
            self.step["buffers"][name] = buffer
        self.saved = self.steps
        self.say("step", number=self.steps, file=self.save(self.step))
        self.step = self.new_step()

    # ------------------------------------------------------------ the rest of the recording
    def hand_over(self):
        """End the recording, remove what recorded, and wait for the first steps to be timed."""
        self.say_recorded()
        for undo in self.undo:
            undo()
        self.undo.clear()
        self.phase = "timing"
        self.wait()

    def say_recorded(self):
        if self.steps > self.saved:
            self.finish_step()
        self.phase = "recorded"
        held = check.ids_of(*check.existing(torch.optim.Optimizer))
        models = {type(top).__name__ for top in self.tops.values() if self.trains(top, held)}
        facts = {"optimizers": sorted(self.kinds), "models": sorted(models), "strays": len(self.strays)}
        self.say("recorded", steps_in_backward=self.steps_in_backward, **facts)

    def trains(self, top, held):
        """Tell whether a model has parameters of its own that an optimizer holds or backward reached."""
        own = [param for param in check.params_of(top) if id(param) not in self.names]
        return any(id(param) in held or param.grad is not None for param in own)

    def wait(self):
        """Wait for the parent to ask for steps."""
        request = self.next_request()
        self.left = request["steps"]
        if torch.cuda.is_initialized():
            if request["reset"]:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def answer(self):
        """Tell how long the steps took, with the GPU's work done."""
        memory = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if torch.cuda.is_initialized():
            memory = torch.cuda.max_memory_allocated() / 2**20
        self.say("steps", seconds=seconds, memory_mib=memory)
        self.wait()

    def why_it_ended(self):
        """Return why a script's end came too early."""
        if self.model is None and check.compiled_graphs():
            return "its model runs in a compiled function only: compile the model itself, not what calls it"
        if self.model is None:
            return "no module with parameters was called with gradients"
        if not self.steps and self.foreign:
            first = type(self.model).__name__
            return f"its {' and '.join(sorted(self.foreign))} holds no parameter of the model that ran first, a {first}"
        if not self.steps:
            passes = f"in {self.backwards} backward passes"
            return f"no torch.optim optimizer stepped {passes}: updates by hand can't be compared"
        return "short"

    def end(self, reason):
        """End the script with a reason for the parent."""
        self.say("ended", reason=reason, steps=self.steps)
        self.phase = "ended"
        raise Ended(0)

    # ------------------------------------------------------------ hooks
    def install(self):
        """Watch the calls of modules, backward, the optimizers and the replays of GPU graphs."""
        call = self.original_call = nn.Module.__call__
        backward = torch.autograd.backward

        @functools.wraps(call)
        def watched(module, *args, **kwargs):
            if torch.compiler.is_compiling() or not self.listens():
                return call(module, *args, **kwargs)
            return self.call(call, module, args, kwargs)

        nn.Module.__call__ = watched
        torch.autograd.backward = functools.wraps(backward)(functools.partial(self.backward, backward))
        begins = optimizer_hooks.register_optimizer_step_pre_hook(self.step_begins)
        optimizer_hooks.register_optimizer_step_post_hook(self.step_ended)
        self.undo = [
            functools.partial(setattr, nn.Module, "__call__", call),
            functools.partial(setattr, torch.autograd, "backward", backward),
            begins.remove,
        ]
        if torch.cuda.is_available():
            self.count_replays()

    def count_replays(self):
        """Count the replay of a GPU graph as a step, if the optimizer's step was captured."""
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph):
            replay(graph)
            if self.captured:
                self.count()

        torch.cuda.CUDAGraph.replay = counted


# ---------------------------------------------------------------- the script


def sentence_on(error):
    """Say which error ended the script, and where in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, check.__file__)
    what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    known = [frame for frame in frames if frame.filename in ours or not check.LIBRARIES.search(frame.filename)]
    last = known[-1]
    if last.filename in ours and last.name not in CALLERS:
        where = f"{os.path.basename(last.filename)}, line {last.lineno}"
        return f"compare_training itself failed, not the script: {what} ({where})"
    mine = [frame for frame in known if frame.filename not in ours]
    place = f" ({os.path.basename(mine[-1].filename)}, line {mine[-1].lineno})" if mine else ""
    return f"{what}{place}"


def run(request):
    """Run the script under the hooks, and tell the parent how it ended."""
    child = Child(request)
    arguments, start = check.script_of(request["command"])
    module = request["command"][0] == "-m"
    sys.argv = arguments
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(arguments[0]))
    seed(0)  # for a script that sets no seed
    child.install()
    reason = None
    try:
        start(arguments[0] if module else os.path.abspath(arguments[0]), run_name="__main__")
    except Ended:
        return
    except SystemExit as end:
        words = check.words_on_exit(end.code)
        reason = f"it {words}" if words else None
    except Exception as error:
        traceback.print_exc()
        reason = sentence_on(error)
    if child.phase == "recording" and child.steps and reason is None:
        child.say_recorded()
    child.say("ended", reason=reason or child.why_it_ended(), steps=child.steps)


def main(argument):
    run(json.loads(argument))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a script's threads may wait for it


if __name__ == "__main__":
    main(sys.argv[1])
