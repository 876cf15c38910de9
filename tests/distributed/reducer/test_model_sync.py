"""Construction: comparison and broadcast of models, options that differ between ranks, and refused arguments."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradwire
from tests.support.bits import assert_same_bits, assert_same_on_all_ranks
from tests.support.ranks import from_all_ranks, on_ranks
from tests.support.training import SMALL, build, error_of, train, train_steps

DDP = gradwire.DistributedDataParallel


class WithState(nn.Module):
    """A trained and a frozen parameter, and two buffers, the second of which no checkpoint has."""

    def __init__(self, weight=None, frozen=None, first=None, second=None, extra=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) if weight is None else weight)
        self.fixed = nn.Parameter(torch.ones(4) if frozen is None else frozen, requires_grad=False)
        self.register_buffer("first", torch.ones(5) if first is None else first)
        self.register_buffer("second", torch.ones(2) if second is None else second, persistent=False)
        if extra:
            self.register_buffer("extra", torch.ones(()))

    def forward(self, x):
        return (self.weight * x).sum()


WEIGHT = "params[0], weight, on rank {last} with", "appears not to match sizes/strides of the same param in process 0"
FROZEN, FIRST = "frozen parameter fixed: (4,) torch.float32", "buffer first: (5,) torch.float32"
# How the last rank differs, and the words of the error. PyTorch's class does not compare dtypes, and raises on the last
# rank only.
STATES = {
    "shape": ({"weight": torch.ones(4)}, WEIGHT),
    "strides": ({"weight": torch.ones(6)[::2]}, WEIGHT),
    "dtype": ({"weight": torch.ones(3).double()}, WEIGHT),
    "frozen shape": ({"frozen": torch.ones(6)}, (FROZEN, "(6,) torch.float32 on cpu on rank {last}")),
    "frozen dtype": ({"frozen": torch.ones(4).double()}, (FROZEN, "(4,) torch.float64 on cpu on rank {last}")),
    "buffer shape": ({"first": torch.ones(7)}, (FIRST, "(7,) torch.float32 on cpu on rank {last}")),
    "buffer dtype": ({"first": torch.ones(5).int()}, (FIRST, "(5,) torch.int32 on cpu on rank {last}")),
    "buffer size": (
        {"second": torch.ones(1, 2)},
        ("buffer second: (2,) torch.float32", "(1, 2) torch.float32 on cpu on rank {last}"),
    ),
    "one more buffer": ({"extra": True}, ("buffer extra: nothing", "() torch.float32 on cpu on rank {last}")),
}


@pytest.mark.parametrize("difference", STATES)
@on_ranks(2, 3)
def test_parameters_and_buffers_that_differ_raise_on_every_rank(difference):
    options, words = STATES[difference]
    last = dist.get_world_size() - 1
    module = WithState(**(options if dist.get_rank() == last else {}))
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    kind, message = error_of(DDP, module)
    assert kind == "RuntimeError"
    assert message.startswith("DDP expects same model across all ranks")
    assert all(each.format(last=last) in message for each in words)
    assert all(map(torch.equal, tensors, before))
    assert_same_on_all_ranks(from_all_ranks(message))


def module_of(**tables):
    """A module with parameters and buffers of one layout, by name."""
    module = nn.Module()
    for name in tables.get("trained", ("weight",)):
        module.register_parameter(name, nn.Parameter(torch.full((3,), float(ord(name[0])))))
    for name in tables.get("frozen", ()):
        module.register_parameter(name, nn.Parameter(torch.ones(3), requires_grad=False))
    for name in tables.get("buffers", ()):
        module.register_buffer(name, torch.full((3,), float(ord(name[0]))))
    return module


# Tables of rank 0 and of the others, and the words of the error.
NAMES = {
    "trained, reordered": ({"trained": "ab"}, {"trained": "ba"}, "params[0] is b on rank 1 and a in process 0"),
    "trained, renamed": ({"trained": "ab"}, {"trained": "ac"}, "params[1] is c on rank 1 and b in process 0"),
    "frozen, reordered": (
        {"frozen": "ab"},
        {"frozen": "ba"},
        "order of frozen parameters and buffers: frozen parameter a, frozen parameter b, ",
    ),
    "buffers, reordered": (
        {"buffers": "ab"},
        {"buffers": "ba"},
        "order of frozen parameters and buffers: buffer a, buffer b, ",
    ),
    "buffers, renamed": (
        {"buffers": "ab"},
        {"buffers": "ac"},
        "buffer b: (3,) torch.float32 on cpu on rank 0; nothing on",
    ),
}


@pytest.mark.parametrize("difference", NAMES)
@on_ranks(2, 3)
def test_equal_layouts_under_other_names_raise_on_every_rank(difference):
    first, others, words = NAMES[difference]
    module = module_of(**(others if dist.get_rank() else first))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    kind, text = error_of(DDP, module)
    assert kind == "RuntimeError"
    assert text.startswith("DDP expects same model across all ranks")
    assert words in text
    assert_same_bits(dict(module.state_dict()), before)


@on_ranks(2)
def test_names_that_wrappers_of_modules_add_may_differ():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if dist.get_rank():
        module[1] = checkpoint_wrapper(module[1])
    DDP(module)(torch.ones(4, 2)).sum().backward()
    assert_same_on_all_ranks(from_all_ranks([each.grad for each in module.parameters()]))


def as_bytes(module):
    return {
        name: (str(tensor.dtype), tensor.stride(), tensor.reshape(-1).view(torch.uint8).tolist())
        for name, tensor in module.state_dict().items()
    }


@on_ranks(2, 3)
def test_construction_gives_every_rank_the_state_of_rank_0():
    torch.manual_seed(dist.get_rank())
    module = nn.Module()
    dtypes = (torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float16)
    for i, dtype in enumerate(dtypes):
        module.register_parameter(f"parameter{i}", nn.Parameter(torch.randn(3, 2).to(dtype)))
    for i, dtype in enumerate((torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn)):
        module.register_buffer(f"buffer{i}", torch.full((3, 2), dist.get_rank()).to(dtype))
    module.empty = nn.Parameter(torch.zeros(0))
    module.register_buffer("scalar", torch.tensor(5 * dist.get_rank()))
    module.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    module.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    own = as_bytes(module)
    DDP(module, init_sync=False)
    assert as_bytes(module) == own
    DDP(module)
    results = from_all_ranks((own, as_bytes(module)))
    wanted = results[0][0]
    for _, state in results:
        assert state == wanted
    assert results[1][0]["conv.weight"] != wanted["conv.weight"]


# Their values on rank 0 and on the others, and further options.
UNEQUAL_OPTIONS = {
    "check_every": (2, 3, {}),
    "find_unused_parameters": (True, False, {}),
    "static_graph": (True, False, {}),
    "skip_all_reduce_unused_params": (True, False, {"find_unused_parameters": True}),
    "forward_sync_buffers": (True, False, {}),
}


@pytest.mark.parametrize("option", UNEQUAL_OPTIONS)
@on_ranks(2, 3)
def test_options_that_decide_collectives_raise_where_they_differ(option):
    first, other, further = UNEQUAL_OPTIONS[option]
    kind, text = error_of(DDP, build("conv"), **{option: other if dist.get_rank() else first}, **further)
    assert kind == "RuntimeError"
    assert f"{option}: {first} on rank 0; {other} on rank{'s 1, 2' if dist.get_world_size() == 3 else ' 1'}" in text


@pytest.mark.parametrize("hook", [None, "fp16", "powersgd"])
@on_ranks(2, 3)
def test_options_that_change_no_collective_may_differ(hook):
    rank = dist.get_rank()
    unequal = train("gradwire", "mlp", hook=hook, gradient_as_bucket_view=rank == 0, bucket_cap_mb=SMALL * (1 + rank))
    results = from_all_ranks((unequal, train("gradwire", "mlp", hook=hook, bucket_cap_mb=SMALL)))
    assert_same_on_all_ranks([unequal for unequal, _ in results])
    for unequal, equal in results:
        assert_same_bits(unequal, equal)


@on_ranks(2, 3)
def test_nothing_is_compared_without_init_sync():
    assert (
        error_of(DDP, WithState(first=torch.ones(dist.get_rank())), init_sync=False, forward_sync_buffers=False) is None
    )


BAD_ARGUMENTS = {
    "a string for a group": ({"process_group": "x"}, "TypeError", "process_group is 'x'; expected a torch.dist"),
    "a number for a group": ({"process_group": 3}, "TypeError", "process_group is 3; expected a torch.dist"),
    "not in the group": (
        {"process_group": dist.GroupMember.NON_GROUP_MEMBER},
        "ValueError",
        "process_group is GroupMember.NON_GROUP_MEMBER",
    ),
    "negative size": ({"bucket_cap_mb": -1}, "ValueError", "bucket_cap_mb is -1; expected a number of MiB"),
    "NaN": ({"bucket_cap_mb": math.nan}, "ValueError", "bucket_cap_mb is nan; expected a number of MiB"),
    "infinite": ({"bucket_cap_mb": math.inf}, "ValueError", "bucket_cap_mb is inf; expected a number of MiB"),
    "too large": ({"bucket_cap_mb": 1e13}, "ValueError", "bucket_cap_mb is 10000000000000.0; expected a number"),
    "bool": ({"bucket_cap_mb": True}, "TypeError", "bucket_cap_mb is True; expected a number of MiB"),
    "string": ({"bucket_cap_mb": "1"}, "TypeError", "bucket_cap_mb is '1'; expected a number of MiB"),
    "list for a size": ({"bucket_cap_mb": [1]}, "TypeError", "bucket_cap_mb is [1]; expected a number of MiB"),
    "empty list": ({"bucket_cap_mb_list": []}, "ValueError", "bucket_cap_mb_list is empty; expected"),
    "size for a list": ({"bucket_cap_mb_list": 1}, "TypeError", "bucket_cap_mb_list is 1; expected a list"),
    "string for a list": ({"bucket_cap_mb_list": "12"}, "TypeError", "bucket_cap_mb_list is '12'; expected a list"),
    "negative in a list": ({"bucket_cap_mb_list": [1, -2]}, "ValueError", "bucket_cap_mb_list[1] is -2; expected"),
    "NaN in a list": ({"bucket_cap_mb_list": [math.nan]}, "ValueError", "bucket_cap_mb_list[0] is nan; expected"),
    **{
        f"check_every={value!r}": (
            {"check_every": value},
            "ValueError",
            f"check_every is {value!r}; expected a whole number of",
        )
        for value in (0, -1, 2.5, True, "100")
    },
    "None in a list": ({"bucket_cap_mb_list": [1, None]}, "TypeError", "bucket_cap_mb_list[1] is None; expected"),
}


@pytest.mark.parametrize("bad", BAD_ARGUMENTS)
def test_bad_argument_is_refused_at_construction(bad):
    arguments, kind, text = BAD_ARGUMENTS[bad]
    name, message = error_of(DDP, nn.Linear(2, 2), **arguments)
    assert name == kind
    assert message.startswith(text)


class Codes(torch.Tensor):
    """A quantized matrix: a tensor subclass without memory of its own, as quantization libraries have it."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{function} of {cls.__name__}")


class Tagged(torch.Tensor):
    """A tensor subclass with memory of its own."""


class Adapted(nn.Module):
    """A frozen matrix of some class, with a trained adapter."""

    def __init__(self, kind=Codes, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(-8, 8, (4, 4), dtype=torch.int8, generator=generator)
        values = 0.5 * codes.float()
        frozen = {Codes: lambda: Codes(codes, 0.5), Tagged: lambda: values.as_subclass(Tagged), None: lambda: values}
        self.base = nn.Parameter(frozen[kind](), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(4, 4, generator=generator))

    def forward(self, x):
        base = self.base.codes * self.base.scale if isinstance(self.base, Codes) else self.base
        return (x @ (base + self.adapter)).square().sum()

    def batch(self, generator):
        return (torch.randn(3, 4, generator=generator),)


def adapted(remedy, **options):
    module = Adapted()
    if remedy == "ignored":
        module._ddp_params_and_buffers_to_ignore = ["base"]
    else:
        options["init_sync"] = False
    return DDP(module, process_group=dist.new_group(), **options)


@on_ranks(2, 3)
def test_frozen_parameter_without_memory_of_its_own_raises_with_the_remedies():
    kind, message = error_of(lambda: DDP(Adapted()))
    assert kind == "NotImplementedError"
    assert message.startswith(f"base cannot be copied from rank 0: it is a {Codes.__module__}.Codes, which has no ")
    assert "module._ddp_params_and_buffers_to_ignore" in message and "init_sync=False" in message


@pytest.mark.parametrize("options", [{}, {"check_every": 1}], ids=["plain", "check_every"])
@pytest.mark.parametrize("remedy", ["ignored", "init_sync"])
@on_ranks(2, 3)
def test_remedies_for_a_frozen_parameter_without_memory_of_its_own_work(remedy, options):
    ddp = adapted(remedy, **options)
    seen = train_steps(ddp, 3)
    assert_same_bits(seen, train_steps(DDP(Adapted(None)), 3))
    ddp.resynchronize(from_rank=0)
    assert_same_bits(train_steps(ddp, 3), seen)


@on_ranks(2, 3)
def test_parameter_without_memory_of_its_own_on_one_rank_raises_on_all():
    last = dist.get_rank() == dist.get_world_size() - 1
    kind, message = error_of(lambda: DDP(Adapted(Codes if last else None), process_group=dist.new_group()))
    assert kind == "RuntimeError"
    assert "parameters without memory of their own" in message and "['base']" in message


@on_ranks(2)
def test_frozen_parameter_of_a_subclass_with_memory_is_copied():
    ddp = DDP(Adapted(Tagged, seed=dist.get_rank()))
    assert type(ddp.module.base) is Tagged
    assert_same_bits(ddp.module.base.as_subclass(torch.Tensor), Adapted(None).base.data)
    assert_same_on_all_ranks(from_all_ranks(train_steps(ddp)))
