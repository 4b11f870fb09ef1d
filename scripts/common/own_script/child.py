"""Run one training script under the control of compare_training.py: record its first steps, then time its own loop.

    python child.py '{"command": ["train.py"], "folder": "/tmp/x", "steps": 3, "inbox": 5, "outbox": 6}'

The script runs unchanged. In each of its first steps it is held at the first call of its model, where it hands over its
weights or takes others, and is recorded until the next one. Then the hooks are gone but for those that count steps,
and the script runs so many steps of its own loop whenever it is asked. Messages are lines of JSON, tensors are files.

How a running script is followed is the Watcher's in check_training.py. That file is loaded under a private name, and
nothing else of ours is imported: the script's project may have modules called check_training or common.

The random state is set at the entry of each recorded call, and put back after it: what the model draws changes neither
the other calls nor the batches. A script that draws nothing inside its model computes its own numbers.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import pathlib
import random
import sys
import time
import traceback

import torch
from torch import nn
from torch.utils import _pytree as pytree

OUTPUTS = 3  # of a model, whose gradients are compared
SAMPLE = 4096  # elements kept of what a module takes and returns
MODULE_SETTINGS = "eps momentum p negative_slope alpha num_groups".split()
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
leave = os._exit  # the watcher replaces it, because a script may call it


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
    stride = values.numel() // SAMPLE | 1
    while math.gcd(stride, values.numel()) > 1:  # or it would follow some columns and leave the others out
        stride += 2
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


def settings_of_module(module):
    """Return the numbers that a module computes with, such as a norm's eps; dropout's p counts in training only."""
    found = {name: getattr(module, name, None) for name in MODULE_SETTINGS}
    if not module.training:
        del found["p"]
    return {name: float(value) for name, value in found.items() if type(value) in (int, float)}


# ---------------------------------------------------------------- the child


class Child(check.Watcher):
    """Record a script, and answer the parent."""

    tool = "compare_training"
    files = check.Watcher.files | {__file__}
    callers = check.CALLERS | {"recorded", "traced", "counted"}
    subject = "it "
    raised = ""

    def __init__(self, request):
        super().__init__()
        self.steps_wanted = request["steps"]
        self.folder = pathlib.Path(request["folder"])
        self.inbox = os.fdopen(request["inbox"])
        self.outbox = os.fdopen(request["outbox"], "w")
        self.handed_over = 0
        self.phase = "start"  # start, recording, recorded, timing, ended
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
        self.scalers = None
        self.looked = False  # were the gradients of the optimizer's step recorded already?
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
        self.handed_over += 1
        path = self.folder / f"{self.handed_over}.pt"
        torch.save(content, path)
        return str(path)

    def next_request(self):
        line = self.inbox.readline()
        if not line:  # the parent is gone
            leave(0)
        return json.loads(line)

    # ------------------------------------------------------------ modules
    def is_root(self, module):
        """Tell whether this is an outermost call in training, of a module that trains."""
        if self.in_backward or not torch.is_grad_enabled():
            return False
        if is_capturing() or check.is_transformed():
            return False
        return any(param.requires_grad and check.has_values(param) for param in check.params_of(module))

    def called(self, run, module, args, kwargs):
        """Run a module's call; hold, seed and record it if it is an outermost one."""
        if self.phase not in ("start", "recording") or self.blind():
            return run(module, *args, **kwargs)
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
        call["modules"] = {name: settings_of_module(part) for part, name in self.modules.items()}
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
                output = module(*args, **kwargs)
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
    @contextlib.contextmanager
    def around_backward(self, loss):
        """Record the scalar that backward begins from, without a gradient scaler's factor, and what it computes."""
        if self.phase != "recording" or is_capturing():
            yield
            return
        if loss is not None:
            self.step["losses"].append(float(loss.detach()) / self.scale())
        yield
        scale = self.scale()
        with_grad = {name: param for name, param in self.model.named_parameters() if param.grad is not None}
        late = [check.clean(name) for name, param in with_grad.items() if id(param) not in self.names]
        if late:
            self.end_because(
                f"its model gets {check.folded(late, 3)} after its first call: make all parameters before it"
            )
        given = {self.names[id(param)]: param.grad for param in with_grad.values()}
        self.step["given"] = {name: on_cpu(gradient) / scale for name, gradient in given.items()}

    def scale(self):
        if self.scalers is None:
            self.scalers = [scaler for scaler in check.existing(torch.amp.GradScaler) if scaler.is_enabled()]
        return self.scalers[0].get_scale() if self.scalers else 1.0

    def end_unseen(self):
        """End a script that has no optimizer's step."""
        self.end_because(self.why_it_ended())

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

    def before_step(self, optimizer):
        """Begin a step: only what its closure computes first is recorded."""
        self.looked = False

    @torch.no_grad()
    def look(self, optimizer):
        """Record the gradients and the settings of an optimizer's step."""
        if self.phase != "recording" or self.looked or is_capturing():
            return
        self.looked = True
        self.steps_in_backward |= self.in_backward
        scale = getattr(optimizer, "grad_scale", None)  # a fused step that divides by the scaler's factor itself
        if not any(self.name_of(param) for param in check.params_of(optimizer)):
            self.foreign.add(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self.name_of(param)
                if name is None:
                    continue
                self.optimizers.lead = self.optimizers.lead or optimizer
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
    def after_step(self, optimizer):
        """Count a step if it is the lead's; what changes its weights after it is another thing."""
        if is_capturing():
            self.captured |= optimizer is self.optimizers.lead
            return
        if self.phase == "recording":
            mine = {self.names.get(id(param)) for param in check.params_of(optimizer)}
            self.sums |= self.sums_of(mine & self.held.keys())
        if self.optimizers.is_lead(optimizer):
            self.count()

    def count(self):
        """Count a step of the loop; hold it where the parent waits for it."""
        self.steps += 1
        if self.phase == "recording" and self.captured:
            self.end_because("its step went into a GPU graph before it could be recorded: switch graphs off")
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
        self.unhook()
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

    def end_because(self, reason):
        """End the script with a reason for the parent."""
        self.say("ended", reason=reason, steps=self.steps)
        self.phase = "ended"
        self.end()

    def end_process(self):
        """End the process of a script that goes on although it was ended."""
        leave(0)

    def failed(self, error):
        """Say which error ended the script. The parent may show its traceback."""
        traceback.print_exception(error)
        return super().failed(error)

    # ------------------------------------------------------------ GPU graphs
    def count_replays(self):
        """Count the replay of a GPU graph as a step, if the optimizer's step was captured."""
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph):
            replay(graph)
            if self.captured:
                self.count()

        torch.cuda.CUDAGraph.replay = counted


# ---------------------------------------------------------------- the script


def run(request):
    """Run the script under the hooks, and tell the parent how it ended."""
    child = Child(request)
    seed(0)  # for a script that sets no seed
    if torch.cuda.is_available():
        child.count_replays()
    reason = check.run_script(child, request["command"])
    if child.phase == "ended":
        return
    if child.phase == "recording" and child.steps and reason is None:
        child.say_recorded()
    child.say("ended", reason=reason or child.why_it_ended(), steps=child.steps)


def main(argument):
    run(json.loads(argument))
    sys.stdout.flush()
    sys.stderr.flush()
    leave(0)  # a script's threads may wait for it


if __name__ == "__main__":
    main(sys.argv[1])
