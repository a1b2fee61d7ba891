"""TorchDynamo, asked for one module's forward, with guards that notice all that can change it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.variables import nn_module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

from ingot.capture.captured import CaptureError
from ingot.capture.causal import AskedInVainError, question_put_off
from ingot.capture.derivative import unwatched
from ingot.capture.encoder_layer import traceable
from ingot.capture.feed import batched_inputs
from ingot.capture.nodes import is_users_own
from ingot.live.backward import compile_lock
from ingot.live.seen_sizes import SeenSizes
from ingot.live.vain import TRIES, CapturesInVain
from ingot.log import logger
from ingot.runtime.library import IngotError

# In force while a frame is compiled, and only then: they decide what is guarded. By Dynamo's own
# defaults, a hook that is put on a child later is overlooked, and so is requires_grad_() of a
# parameter; an integer attribute that changes recompiles at every call; and all instances of a
# class share eight compilations.
_WHILE_COMPILING = {
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "allow_unspec_int_on_nn_module": True,
    # Gradients are handed over region by region: DDP needs no graphs cut at its buckets.
    "optimize_ddp": False,
    # Otherwise nothing of a forward with an LSTM or a GRU is captured, not even what is beside it.
    "allow_rnn": True,
    # What is known of a parameter from its capture would forbid torch.utils.swap_tensors.
    "invalidate_compile_context_weakrefs": True,
    # Otherwise what a forward draws by NumPy comes from PyTorch's generator.
    "use_numpy_random_stream": True,
    # Two calls, for profilers, at each call: a tenth of its host time.
    "record_runtime_overhead": False,
    "recompile_limit": 64,
    "cache_size_limit": 64,
    "accumulated_recompile_limit": 1 << 20,
}


# What says something of a call, and computes nothing: said behind its operators, not between. Those
# of logging where a forward is captured once.
_REORDERABLE = "reorderable_logging_functions"
_SAID = {print, warnings.warn}
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception", "log")
_MESSAGES = _SAID | {getattr(logging, level) for level in _LEVELS}

_serial = itertools.count()
_to_forget: list[types.CodeType] = []
# Of code whose own says this file: that of the function which it was made from.
_files: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()


def compiled(
    function: Callable,
    backend: Callable,
    seen: Callable[[Any], None],
    warn: Callable[[str], None],
    broke: Callable[[str, str], None],
    lost: Callable[[str, str], None],
    vain: CapturesInVain,
) -> Callable | None:
    """`function` (of a module and a call's arguments) as Dynamo runs it; None where Dynamo is
    switched off. Its cache hangs on the code object, so give it one of its own. seen: is told the
    module before a frame is compiled; warn: is told when Dynamo gives the function up, and what to
    do; broke: why, and where if that is known, it cut a graph in two; lost: the same of a call that
    PyTorch runs whole; vain: says which calls are not worth a capture.
    """
    context = torch._dynamo.optimize(backend=backend)
    if torch._dynamo.config.disable or not hasattr(context, "callback"):
        return None
    context.callback = _Careful(context.callback, function.__code__, seen, warn, broke, lost, vain)
    return context(function)


class NotWholeError(CaptureError):
    """Dynamo does not take a call as one graph."""


def run_whole(function: Callable, backend: Callable, *arguments: Any) -> Any:
    """A call of `function` as one graph, with no size symbolic but those that are marked; what it
    prints is no part of the graph. Raises NotWholeError."""
    try:
        return _run_once(function, backend, arguments, nopython=True)
    except Exception as error:  # many kinds, of Dynamo's own and of what it looks at
        raise NotWholeError(f"TorchDynamo does not take it as one graph: {_told(error)}") from error


def run_in_pieces(function: Callable, backend: Callable, *arguments: Any) -> Any:
    """The same as several graphs, with what cannot be captured run between them."""
    return _run_once(function, backend, arguments, nopython=False)


def _run_once(function: Callable, backend: Callable, arguments: tuple, nopython: bool) -> Any:
    own = with_own_code(function)
    settings = {
        **_WHILE_COMPILING,
        "allow_rnn": not nopython,  # a graph that is to be whole is for a file, which holds none
        "automatic_dynamic_shapes": False,
        _REORDERABLE: _MESSAGES,
    }
    try:
        with _capturing(settings):
            return torch._dynamo.optimize(backend=backend, nopython=nopython)(own)(*arguments)
    finally:
        forget(own.__code__)


@contextlib.contextmanager
def _capturing(settings: dict[str, Any], put_off: bool = True) -> Iterator[None]:
    patched = torch._dynamo.config.patch(_known(settings))
    with patched, unwatched(), traceable(), question_put_off(put_off), _told_once():
        yield


# What tracing logs that tells our users nothing. An operator that its arguments do not suit is
# PyTorch's to refuse, in the call itself, with a line: no traceback of the tracer's before it.
# Where a graph breaks Ingot says so itself, and no switch of Dynamo's is theirs to turn.
_UNHELPFUL: dict[str, Callable[[logging.LogRecord], bool]] = {
    "torch._subclasses.fake_tensor": lambda record: record.exc_info is not None,
    "torch._dynamo.variables.tensor": lambda record: record.levelno == logging.WARNING,
}


class _Unhelpful(logging.Filter):
    """Lets through all but these records of this thread, and them too where TORCH_LOGS asks for
    details."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.logger, self._drops = logging.getLogger(name), _UNHELPFUL[name]
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        dropped = record.thread == self._thread and self._drops(record)
        return not dropped or self.logger.isEnabledFor(logging.DEBUG)


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    filters = [_Unhelpful(name) for name in _UNHELPFUL]
    for each in filters:
        each.logger.addFilter(each)
    try:
        yield
    finally:
        for each in filters:
            each.logger.removeFilter(each)


class _NoWeightsError(Exception):
    """A lazy module was met that was not called yet."""


_initialize_lazy_module = nn_module.initialize_lazy_module
_lazy_lock = threading.Lock()
_leaving: list[int] = []  # threads, each as often as it is within _lazy_modules_left()


@contextlib.contextmanager
def _lazy_modules_left() -> Iterator[None]:
    """Within it a lazy module's first call is PyTorch's, in this thread: Dynamo would make the
    weights while it traces, and give what is drawn next the same random numbers again."""
    own = threading.get_ident()
    with _lazy_lock:
        _leaving.append(own)
        nn_module.initialize_lazy_module = _initialize_elsewhere
    try:
        yield
    finally:
        with _lazy_lock:
            _leaving.remove(own)
            if not _leaving:
                nn_module.initialize_lazy_module = _initialize_lazy_module


def _initialize_elsewhere(tx: Any, module: nn.Module, *arguments: Any) -> None:
    if threading.get_ident() in _leaving and hasattr(module, "_initialize_hook"):
        raise _NoWeightsError("a lazy module has no weights yet")
    _initialize_lazy_module(tx, module, *arguments)


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _told(error: Exception) -> str:
    """The first line of an error's message, with the line of the user's that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    place = _innermost(getattr(error, "real_stack", None))
    return (lines[0] if lines else type(error).__name__) + (place and f" ({place})")


def _innermost(frames: Iterable | None) -> str:
    """ "model.py:14"; "" of no frames."""
    found = list(frames or ())
    return f"{os.path.basename(found[-1].filename)}:{found[-1].lineno}" if found else ""


def _place(code: types.CodeType) -> str:
    return f"{code.co_name} ({_line(code)})"


def _line(code: types.CodeType) -> str:
    file = _files.get(code, code.co_filename)
    return f"{os.path.basename(file)}:{code.co_firstlineno}"


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that this release has, each under one name."""
    known = torch._dynamo.config._config
    limits = {"cache_size_limit", "recompile_limit"} - {_limit_name()}
    return {name: value for name, value in settings.items() if name in known and name not in limits}


def _limit_name() -> str:
    """How this release calls the most compilations of one code object."""
    known = torch._dynamo.config._config
    return "recompile_limit" if "recompile_limit" in known else "cache_size_limit"


def break_behind(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why, and where, Dynamo ended a graph before its frame did."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    own = (frame for frame in reason.user_stack or () if is_users_own(frame.filename))
    return reason.reason, _innermost(own)


class _Careful:
    """Dynamo's compilation of a frame, under the settings above, with the batch size symbolic."""

    def __init__(
        self,
        callback: Callable,
        code: types.CodeType,
        seen: Callable,
        warn: Callable,
        broke: Callable,
        lost: Callable,
        vain: CapturesInVain,
    ):
        self._callback, self._code, self._seen = callback, code, seen
        self._warn, self._broke, self._lost, self._vain = warn, broke, lost, vain
        self._given_up = 0
        # By this name (before 2.7, the second) Dynamo finds the backend behind a callback.
        self._torchdynamo_orig_backend = self._torchdynamo_orig_callable = callback
        self._settings = _known(_WHILE_COMPILING)
        self._sizes = SeenSizes()

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if self._vain.spares(frame.f_code):
            return _by_pytorch_this_time("SKIP")
        values = list(frame.f_locals.values())
        self._seen(values[0] if values else None)
        tensors = [t for t in pytree.tree_leaves(values) if type(t) is torch.Tensor]
        batch = batched_inputs(tensors)[1]
        # Labels too: one size for theirs would be one for the whole batch.
        batched = [t for t in tensors if batch > 1 and t.dim() and t.size(0) == batch]
        for tensor in batched:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            with self._vain.noting(frame.f_code):
                found = self._for_any_size_or_this(batched, frame, *args, **kwargs)
        except Exception as error:  # many kinds, of Dynamo's own and of what it looks at
            wrong_use = getattr(error, "inner_exception", None)
            if isinstance(wrong_use, IngotError):
                raise wrong_use from None
            logger.info("TorchDynamo could not compile a call: %s", error)
            if not isinstance(_first_cause(error), _NoWeightsError):
                self._note_failure(frame.f_code, error)
            return _by_pytorch_this_time("SKIP")
        self._vain.succeeded(frame.f_code)
        return self._unless_given_up(found, frame.f_code)

    def _note_failure(self, code: types.CodeType, error: Exception) -> None:
        self._lost(f"TorchDynamo fails: {_told(error)}", _line(code))
        if self._vain.failed(code) == TRIES:
            self._warn(
                f"TorchDynamo has failed at {TRIES} calls of {_place(code)}, which PyTorch ran, "
                f"and is hardly asked again: {_told(error)}"
            )

    def _for_any_size_or_this(
        self, batched: list[torch.Tensor], frame: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """What the forward computes of sizes that are symbolic may be no argument of the operator
        that it is for, and operators may ask for numbers of their operands' sizes."""
        known = self._vain.knows(frame.f_code)
        try:
            found = self._captured(frame, *args, **kwargs)
            if not (known and _is_given_up(found)):
                return found
        except Exception as error:
            by_us = isinstance(getattr(error, "inner_exception", None), IngotError)
            if by_us or not batched or isinstance(_first_cause(error), _NoWeightsError):
                raise
            logger.info("TorchDynamo could not compile a call for any batch size: %s", error)
            for tensor in batched:
                tensor._dynamo_weak_dynamic_indices.discard(0)
        return self._captured(frame, *args, **kwargs, for_this_size=True)

    def _captured(
        self, *arguments: Any, put_off: bool = True, for_this_size: bool = False, **named: Any
    ) -> Any:
        settings = self._limited_settings()
        if for_this_size:
            settings["automatic_dynamic_shapes"] = False
        try:
            capturing = _capturing(settings, put_off)
            with self._sizes.alone(), capturing, self._telling_breaks(), _lazy_modules_left():
                return self._callback(*arguments, **named)
        except Exception as error:  # Dynamo's, around the backend's
            if not isinstance(getattr(error, "inner_exception", None), AskedInVainError):
                raise
        return self._captured(*arguments, put_off=False, for_this_size=for_this_size, **named)

    @contextlib.contextmanager
    def _telling_breaks(self) -> Iterator[None]:
        """Those of a graph that is empty so far, which no backend sees."""
        counted = torch._dynamo.utils.counters["graph_break"]
        before = counted.copy()
        yield
        for reason in counted - before:
            self._broke(reason, "")

    def _limited_settings(self) -> dict[str, Any]:
        """With the user's own limit of compilations where that is higher, and what else the user
        takes for a message."""
        name = _limit_name()
        limit = max(self._settings[name], getattr(torch._dynamo.config, name))
        said = _SAID | getattr(torch._dynamo.config, _REORDERABLE, set())
        return {**self._settings, _REORDERABLE: said, name: limit}

    def _unless_given_up(self, found: Any, code: types.CodeType) -> Any:
        """Dynamo gives a frame up for good where it cannot capture one call of it. The next calls
        may be others: a few of them are looked at."""
        if not _is_given_up(found) or torch._dynamo.trace_rules.check(code):  # PyTorch's own code
            return found
        if found.frame_exec_strategy.cur_action == torch._dynamo.types.FrameAction.RUN_ONLY:
            limit = self._limited_settings()[_limit_name()]
            self._warn(
                f"TorchDynamo has compiled {_place(code)} {limit} times, its limit: calls unlike "
                "these are PyTorch's from now on. TORCH_LOGS=recompiles tells what changes from "
                "call to call: make it a tensor, or keep it; or set a higher "
                f"torch._dynamo.config.{_limit_name()} before the first call"
            )
            return found
        self._given_up += 1
        logger.info("TorchDynamo could not capture a call; what it calls is captured by itself")
        if code is self._code:
            why = "TorchDynamo captures nothing of it (TORCH_LOGS=graph_breaks tells the lines)"
            self._lost(why, _line(code))
            self._warn(
                f"TorchDynamo captures nothing of {_place(code)}: PyTorch runs it, and Ingot only "
                "what it calls of classes that are not PyTorch's own, or that was optimised by "
                "itself. TORCH_LOGS=graph_breaks tells the lines to change"
            )
        return _by_pytorch_this_time("DEFAULT") if self._given_up <= TRIES else found


def _is_given_up(found: Any) -> bool:
    """Whether Dynamo takes a frame for one that it cannot capture, whatever it is called with."""
    return getattr(found, "guarded_code", True) is None and found.apply_to_code


def has_no_weights_yet(module: nn.Module) -> bool:
    """Whether there are lazy modules in one that were not called."""
    lazy = (part for part in module.modules() if isinstance(part, LazyModuleMixin))
    return any(part.has_uninitialized_params() for part in lazy)


def _by_pytorch_this_time(callees: str) -> Any:
    """PyTorch runs the frame, with an error of its own if there is one; the next call is looked at
    again. (Dynamo's own way of suppressing an error gives the frame up for good.) callees: what
    happens to the functions that the frame calls, as Dynamo names it."""
    types_ = torch._dynamo.types
    if not hasattr(types_, "ConvertFrameReturn"):
        return None
    action = types_.FrameAction
    strategy = types_.FrameExecStrategy(action.SKIP, getattr(action, callees))
    return types_.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def forget(code: types.CodeType) -> None:
    """What was compiled for a code object, which Dynamo's own tables keep alive."""
    _to_forget.append(code)
    _forget_now()


def _forget_now() -> None:
    # Where this thread is within Dynamo, it may be freeing what hangs on this very code, as in
    # torch._dynamo.reset(): freed once more, the process would be aborted.
    while _to_forget and not compile_lock._is_owned():
        torch._C._dynamo.eval_frame.reset_code(_to_forget.pop())


def with_own_code(function: Callable) -> Callable:
    """The same function with a code object of its own, on which Dynamo's cache hangs; unequal to
    all others, since some of Dynamo's tables ask for equality."""
    _forget_now()
    code = function.__code__
    changes: dict[str, Any] = {"co_consts": (*code.co_consts, f"ingot {next(_serial)}")}
    if torch._dynamo.trace_rules.check(function):
        # A forward of PyTorch's own (nn.Sequential's) is a frame that Dynamo leaves alone, by its
        # file; called through a wrapper, all such would share one code object and its cache.
        changes["co_filename"] = __file__
    made = types.FunctionType(
        code.replace(**changes),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    _files[made.__code__] = code.co_filename
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__module__ = function.__module__
    return made
