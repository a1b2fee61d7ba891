"""`ingot.optimize`: an nn.Module that computes what the original does, faster.

The optimised module *is* the original under another class: both share one `__dict__`, and with it
parameters, buffers, submodules, attributes and hooks. Whatever a user does to one, the other sees;
state_dict, train(), to(), optimisers and pickling need no code of ours. Only `forward` differs: it
hands the original's to TorchDynamo, whose backend Ingot is.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ingot.live import policy
from ingot.live.reporting import report
from ingot.live.state import State, intercepted, is_traced, nested
from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError, library

_grad = torch.is_grad_enabled


def _original_forward(cls: type) -> Callable:
    """The forward that the user's class would have without us."""
    for base in _after_ours(cls):
        if "forward" in base.__dict__:
            found = base.__dict__["forward"]
            return found if isinstance(found, types.FunctionType) else _function_of(found)
    raise TypeError(f"{cls.__name__} has no forward of its own")


def _function_of(found: Any) -> Callable:
    """For what is no function in a class: a property, a partialmethod, an object that is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bind = getattr(type(found), "__get__", None)
        return (bind(found, self, type(self)) if bind else found)(*args, **kwargs)

    return forward


def _original_class(cls: type) -> type:
    return _after_ours(cls)[0]


def _after_ours(cls: type) -> tuple[type, ...]:
    return cls.__mro__[cls.__mro__.index(OptimizedModule) + 1 :]


def _see_forward(cls: type[OptimizedModule]) -> None:
    """Now, and again once somebody has put another function in its place in the user's class."""
    cls._ingot_original = _original_forward(cls)
    cls.forward = _presented_as(cls._ingot_original)
    home = _original_class(cls)
    watched = isinstance(inspect.getattr_static(home, "forward"), types.FunctionType)
    cls._ingot_home = home if watched else cls
    cls._ingot_found = cls._ingot_home.forward


def _presented_as(original: Callable) -> Callable:
    """OptimizedModule's forward with the parameters of the original: trainers choose what to pass a
    model by them, and exporters name inputs after them."""
    forward = OptimizedModule.forward
    made = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__)
    made.__doc__, made.__wrapped__ = original.__doc__, original
    made.__annotations__ = getattr(original, "__annotations__", {})
    return made


class OptimizedModule(nn.Module):
    """Put before a model's class, it makes its calls run through Ingot:
    `class ModelNew(ingot.OptimizedModule, Model)`. `ingot.optimize` does so for an instance.

    `ingot_precision` and `ingot_options` are class attributes that such a class may set.
    """

    # Outside of __dict__, which the original shares.
    __slots__ = ("_ingot", "_ingot_left")

    ingot_precision: str | None = None
    ingot_options: dict | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # TorchDynamo, compiling for somebody else, takes the branch while it traces.
        if is_traced():
            return type(self)._ingot_original(self, *args, **kwargs)
        cls = type(self)
        if cls._ingot_home.forward is not cls._ingot_found:
            _see_forward(cls)
        try:
            left = _own_left(self)
        except AttributeError:
            left = None
            _new_state(self)
        if left is not None:
            training, gradients, more = left
            if self.training is training and _grad() is gradients and next(more, False):
                return type(self)._ingot_original(self, *args, **kwargs)
        state = _own_state(self)
        if state.original_forward is not cls._ingot_original:
            state = _make_state(self, **state.settings())
        # What watches this thread's operators must see the original's.
        if nested(args, kwargs) or state.left.hold_again(self, args, kwargs) or intercepted():
            return type(self)._ingot_original(self, *args, **kwargs)
        return state.call(self, *args, **kwargs)

    def __init_subclass__(cls, **keywords: Any) -> None:
        # Of ours the user's class is told nothing: it may keep a register of its subclasses, or ask
        # for keywords.
        if "_ingot_dynamic" not in cls.__dict__:
            super().__init_subclass__(**keywords)
        if "forward" not in cls.__dict__:
            _see_forward(cls)

    def _replicate_for_data_parallel(self) -> nn.Module:
        """DataParallel makes its replicas anew at every call: they share what was compiled."""
        replica = super()._replicate_for_data_parallel()
        _set_state(replica, _state_of(self))
        return replica

    def __prepare_scriptable__(self) -> nn.Module:
        """torch.jit.script reads the source text of the original."""
        original = object.__new__(_original_class(type(self)))
        object.__setattr__(original, "__dict__", dict(self.__dict__, _modules=dict(self._modules)))
        prepare = getattr(type(original), "__prepare_scriptable__", None)
        return prepare(original) if prepare else original

    def ingot_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles and loads all that a call with tensors like these, dense ones, needs, so that it
        can be captured in a CUDA graph. Runs nothing: buffers stay as they are. Whether gradients
        are on and which training flags are set counts as it would at the call. Where Python code
        that TorchDynamo cannot capture breaks the forward in two, what comes before it is
        prepared. Where all of it is PyTorch's since regions would gain nothing, nothing is."""
        state = _state_of(self)
        _set_state(self, state)  # the next call is looked at
        state.prepare(self, args, kwargs, with_kernels=True)

    def ingot_freeze(self) -> None:
        """Keeps the weights of matrix products, packed as Ingot's own kernels read them, for the
        calls in eval mode that follow; costs as much memory as the weights, on their device.

        Nothing goes stale that PyTorch counts: a parameter that was replaced, moved, loaded or
        written is packed again at the next call. What it does not count, writes through `.data`
        and by foreign kernels, asks for another `ingot_freeze()`. CUDA graphs captured meanwhile
        read the packed weights, which live until one of these, `ingot_unfreeze()` or such a change:
        capture again after it. Calls in training mode and with a library's products are as before:
        `ingot_report()["programs"][i]["frozen_bytes"]` stays 0, and the log says so. Raises
        IngotError in training mode."""
        state = _state_of(self)
        if self.training:
            raise IngotError(
                f"{state.name} is in training mode; weights are frozen for inference: call eval() "
                "first",
                STATUS_INVALID_ARGUMENT,
            )
        state.set_frozen(True)

    def ingot_unfreeze(self) -> None:
        """Gives the packed weights' memory back; weights are packed at every call again."""
        _state_of(self).set_frozen(False)

    def ingot_report(self, batch: int | None = None) -> dict:
        """What was taken over and what was not, over all that was captured so far.

        Returns `operators_replaced` (list of {what, where, by}), `optimisations` (list of {what,
        identity_or_reason, where}), `unsupported` (list of {what, where, why}), `programs` (the
        library's explanation of each region, with its mode and the bytes of frozen weights that it
        keeps). batch: for which sizes and predicted
        times are given (default: that of the last call, else 1)."""
        state = _state_of(self)
        return report(state.graphs, state.breaks, batch)

    def __reduce_ex__(self, protocol: int) -> Any:
        cls = type(self)
        dynamic = cls.__dict__.get("_ingot_dynamic", False)
        settings = _state_of(self).settings()
        getstate = next(
            (b.__dict__["__getstate__"] for b in cls.__mro__ if "__getstate__" in b.__dict__), None
        )
        if getstate is None or getstate is getattr(object, "__getstate__", None):
            state = self.__dict__.copy()
        else:
            state = getstate(self)
        home = _original_class(cls) if dynamic else cls
        return _rebuild, (home, dynamic, settings), state


# Past a `__getattr__` of the user's: a wrapper's hands out what the module inside it has, which
# would be the state of another one.
_own_state = OptimizedModule._ingot.__get__
_own_left = OptimizedModule._ingot_left.__get__


def _make_state(module: OptimizedModule, **settings) -> State:
    cls = type(module)
    if cls._ingot_home.forward is not cls._ingot_found:
        _see_forward(cls)
    state = State(cls._ingot_original, _original_class(cls).__name__, **settings)
    _set_state(module, state)
    return state


def _set_state(module: OptimizedModule, state: State) -> None:
    object.__setattr__(module, "_ingot", state)
    object.__setattr__(module, "_ingot_left", None)


def _new_state(module: OptimizedModule) -> State:
    cls = type(module)
    return _make_state(module, precision=cls.ingot_precision, options=cls.ingot_options)


def _state_of(module: OptimizedModule) -> State:
    try:
        return _own_state(module)
    except AttributeError:
        return _new_state(module)


def _rebuild(home: type, dynamic: bool, settings: dict) -> OptimizedModule:
    cls = _optimized_class(home) if dynamic else home
    module = object.__new__(cls)
    _make_state(module, **settings)
    return module


def _optimized_class(cls: type) -> type:
    # Kept by its instances alone: PyTorch makes a class for each module that is parametrized, and
    # that class keeps the module.
    for made in type.__subclasses__(cls):
        if "_ingot_dynamic" in made.__dict__:
            return made
    name = f"Optimized{cls.__name__}"
    body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "_ingot_dynamic": True}
    initialised = getattr(cls, "cls_to_become", None)
    if initialised is not None:  # what PyTorch makes of a lazy module at its first call
        body["cls_to_become"] = _optimized_class(initialised)
    try:
        return type(name, (OptimizedModule, cls), body)
    except TypeError as error:  # its __slots__, or its metaclass, allow none
        raise TypeError(f"a {cls.__name__} cannot be optimised: {error}") from None


def optimize(
    module: nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
    *,
    precision: str | None = None,
    device: str | torch.device | None = None,
    options: dict | None = None,
) -> OptimizedModule:
    """An nn.Module that computes what `module` does and shares everything with it.

    example_inputs: arguments of a call; only shapes, dtypes and strides matter, and the batch size
    (the first dimension) may differ from call to call. With them the module is captured and planned
    now, else at its first call. Kernels are compiled in the background, or by `ingot_prepare`.
    precision: of float32 matrix products, "fp32", "ieee", "high", "tf32", "bf16" or "fp16"; None
    follows PyTorch's own switches. device: where to move the module first. options: further options
    of ingot_program_create.

    Parts that Ingot does not know are named by a warning and run by PyTorch. Raises TypeError where
    `module` is not an nn.Module that can be shared, ValueError for an unknown precision, IngotError
    where the library is absent.
    """
    policy.check_precision(precision)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("TorchScript modules cannot be captured: give the module it was made from")
    if not isinstance(module, nn.Module):
        raise TypeError(f"ingot.optimize takes an nn.Module, not a {type(module).__name__}")
    library()  # a missing or foreign library is reported here, not at the first call
    _capture_in_no_thread_that_ends()
    if device is not None:
        module.to(device)
    cls = type(module) if isinstance(module, OptimizedModule) else _optimized_class(type(module))
    optimized = object.__new__(cls)  # FSDP2's classes make others
    object.__setattr__(optimized, "__dict__", module.__dict__)
    _share_fsdp_state(module, optimized)
    state = _make_state(optimized, precision=precision, options=options)
    _tell_what_runs_instead(module, state)
    if example_inputs is not None:
        _capture_now(optimized, state, example_inputs, device)
    return optimized


@functools.cache
def _capture_in_no_thread_that_ends() -> None:
    """Without a GPU, PyTorch keeps for all threads what the first one to capture had for itself:
    where calls come from threads that end, the second capture crashed the process."""
    with FakeTensorMode():
        pass


def _tell_what_runs_instead(module: nn.Module, state: State) -> None:
    """Of what a library has put on the instance, which goes before the class's forward."""
    if "forward" in vars(module):
        state.warn(
            "its forward was replaced (`model.forward = ...`): a call runs what replaced it, which "
            "is PyTorch's. Optimise the model first, and let its forward be replaced then"
        )
    elif vars(module).get("_compiled_call_impl") is not None:
        state.warn(
            "its compile() was called: a call runs what that compiled. Optimise a model without "
            "it, or call compile(backend='ingot')"
        )


def _share_fsdp_state(module: nn.Module, optimized: nn.Module) -> None:
    """FSDP2 finds what it knows of a module by the module's identity."""
    states = sys.modules.get("torch.distributed._composable_state")
    state = states and states._get_module_state(module)
    if state is not None:
        states._insert_module_state(optimized, state)


def _capture_now(module, state: State, example_inputs, device) -> None:
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (list, tuple)):
        raise TypeError("example_inputs must be a list or tuple of a call's arguments")
    args = tuple(example_inputs)
    if device is not None:
        args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    state.prepare(module, args, {}, with_kernels=False)
