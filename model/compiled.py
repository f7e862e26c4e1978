"""Functions and layers that torch compiles on an accelerator, and that run as they are on a CPU or without a compiler.

Everything is compiled for tensors of any length. FlexAttention takes no symbolic scale or cap, so floats are constants.
The backward is compiled with the forward, so that a failure of either is known before anything ran.

What does not compile runs as it is, and one line says so. A failure counts for the shape that failed, never for
another one. But lengths differ from row to row, and a failing compilation may take a minute: after two failures among
lengths between two powers of two, the next attempt there waits, each time for twice as many other shapes. Only new
compilations wait. What is compiled already serves every shape that it fits.

A failure that no length changes, because a kernel needs more shared memory than the device has, is remembered for its
kind: from the next row on layers are compiled without this kind.

Gradient checkpointing computes a layer again in backward, which must save the same tensors as the
forward did. So a recomputation repeats what the layer's forward has done, whatever was compiled or
has failed since then.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import _StopRecomputationError

from common import bfloat16
from common.processes.exits import say
from common.processes.out_of_memory import is_out_of_memory, is_out_of_shared_memory
from model import devices
from model.transformers_internals import decoder_layers

# Adapters, windows and recomputation together need the 8 graphs to which torch limits a function.
_MAX_GRAPHS = 64
# Torch keeps the compiler's settings for each thread. Backward on an accelerator recomputes layers in
# a thread of its own. So each call sets them, and restores them for functions that a user compiles.
# `torch._dynamo.config.patch` would take more than twice as long.
_set_for_dynamo = torch._dynamo.config._make_closure_patcher(
    specialize_float=True,
    suppress_errors=False,  # `_Attempt` runs what was given as it is, and says so
    fail_on_recompile_limit_hit=True,
    recompile_limit=_MAX_GRAPHS,
    # all layers of a family are one code object, and some of their graphs may be of a single layer
    accumulated_recompile_limit=_MAX_GRAPHS * 1000,
)
_functorch_config: Any = torch._functorch.config
_set_for_backward = _functorch_config._make_closure_patcher(force_non_lazy_backward_lowering=True)
_ATTEMPTS_AT_ONCE = 2  # failures in a range of lengths before the next attempt waits


@dataclass
class _Failures:
    """The shapes that did not compile, of those in one range of lengths."""

    shapes: set[Hashable] = field(default_factory=set)
    _last_shape: Hashable = None
    _num_waiting: int = 0  # changes of the shape since the last failure

    def allow_attempt(self, shape: Hashable) -> bool:
        """Returns whether this shape may be compiled now. If not, it counts as one that waited."""
        if shape in self.shapes:
            return False
        if shape != self._last_shape:
            self._last_shape = shape
            self._num_waiting += 1
        return len(self.shapes) < _ATTEMPTS_AT_ONCE or self._num_waiting > 2 ** len(self.shapes)

    def add(self, shape: Hashable) -> None:
        self.shapes.add(shape)
        self._num_waiting = 0


_uncompiled: dict[Hashable, dict[Hashable, _Failures]] = {}  # by function or kind of layer, then by range of lengths
_failed_kinds: set[str] = set()  # of which some shape was not compiled
_abandoned_kinds: set[str] = set()  # that are not compiled any more
# kinds that are not tried again in this row, and are abandoned when the next one begins
_abandoned_in_row: set[str] = set()
# shapes of layers whose attention was abandoned in this row
_failed_with_attention: list[tuple[_Failures, Hashable]] = []
# modules that ran uncompiled in their last forward with gradients
_ran_uncompiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_said_once: set[Hashable] = set()  # what is true of every row


def compiled(
    function: Callable[..., Any],
    tensor: Tensor,
    *given: Any,
    instead: Callable[[], Any] | None = None,
    kind: str | None = None,
    module: torch.nn.Module | None = None,
) -> Any:
    """Returns function(tensor, *given), compiled once for tensors of any length if the first is on an accelerator.

    instead: called where nothing is compiled; by default the function itself. Each shape's failure is said once.
    kind: what the function computes, in words, without the length. `is_abandoned` tells when it is no longer compiled.
    module: the caller, which calls once in a forward. Its recomputation repeats its forward.
    """
    instead = instead or functools.partial(function, tensor, *given)
    if not is_compiled(tensor):
        return instead()

    def run() -> Any:
        return _compiled(function)(tensor, *given)

    name = f"{function.__module__}.{function.__qualname__}"
    attempt = _Attempt((function, kind), name, kind, module, (tensor, *given))
    return attempt.run(run, instead, errors=(Exception,))


def is_compiled(tensor: Tensor) -> bool:
    """Returns whether functions of the tensor are compiled: on a device that Triton supports."""
    if not devices.is_accelerator(tensor.device) or isinstance(tensor, FakeTensor):
        return False
    return not bfloat16.is_missing(devices.compute_capability(tensor.device))


def is_abandoned(kind: str) -> bool:
    """Returns whether a kind is no longer compiled. The compiler may ask, and compiles anew once the answer differs."""
    return kind in _abandoned_kinds


def abandon(kinds: Iterable[str]) -> None:
    """Compiles these kinds no more, and says so of those that this process has compiled until now.

    Call it between rows: a recomputation in backward must find the kinds of its forward.
    """
    kinds = set(kinds)
    for kind in sorted(kinds - abandoned_kinds()):
        say(f"{kind} is not compiled and slower from now on, because a compilation failed here or on another rank")
    _abandoned_kinds.update(kinds)


def begin_row() -> None:
    """Abandons the kinds that needed too much shared memory in the row before this one.

    Until its backward is over, layers that were compiled with such a kind are recomputed with it.
    """
    if _abandoned_in_row:
        _abandoned_kinds.update(_abandoned_in_row)
        _abandoned_in_row.clear()
        # without these kinds the layers around them may compile
        for failures, shape in _failed_with_attention:
            failures.shapes.discard(shape)
        _failed_with_attention.clear()


def failed_kinds() -> frozenset[str]:
    """Returns the kinds of which some shape was not compiled."""
    return frozenset(_failed_kinds)


def has_failed() -> bool:
    """Returns whether anything was not compiled in this process."""
    return bool(_uncompiled or _failed_kinds or _abandoned_kinds)


def abandoned_kinds() -> frozenset[str]:
    """Returns the kinds that are not compiled any more, those of the present row among them."""
    return frozenset(_abandoned_kinds | _abandoned_in_row)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


def compile_layers(model: torch.nn.Module) -> None:
    """Compiles the model's decoder layers in place, each by itself: layers of one kind share what is compiled.

    A layer is compiled when it is first called. What cannot be compiled runs as it is, and one line says so.
    """
    for layer in decoder_layers(model):
        _compile_layer(layer)


def _compile_layer(layer: torch.nn.Module) -> None:
    layer.compile(dynamic=True)
    call: Any = layer._compiled_call_impl
    name = type(layer).__name__
    kind_of_layer = (name, *_options_of(layer))

    def run(*given: Any, **named: Any) -> Any:
        tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
        attempt = _Attempt(kind_of_layer, name, None, layer, tensors)
        skipped_before = _num_skipped_frames()
        output = attempt.run(
            functools.partial(call, *given, **named),
            functools.partial(layer._call_impl, *given, **named),
            errors=(TorchDynamoException, FailOnRecompileLimitHit),
        )
        if _num_skipped_frames() > skipped_before and ("skipped", kind_of_layer) not in _said_once:
            _said_once.add(("skipped", kind_of_layer))
            remedy = "TORCH_LOGS=graph_breaks names its lines"
            say(f"some code of {name} cannot be compiled and runs as it is, which is slower; {remedy}")
        return output

    layer._compiled_call_impl = run


def _options_of(layer: torch.nn.Module) -> Iterator[Hashable]:
    """Yields what distinguishes kinds of layers: the forms of their weights, and settings such as a window."""
    for name, parameter in layer.named_parameters():
        yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str | None) and name not in ("layer_idx", "training"):
                yield path, name, value


def _num_skipped_frames() -> int:
    """Returns how many functions torch has given up without an error, each of which runs as it is from then on."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


@dataclass
class _Attempt:
    """One call of a function or layer that is compiled if it can be."""

    target: Hashable  # the function, or the kind of layer
    name: str
    kind: str | None
    module: torch.nn.Module | None  # the layer, or the module that calls the function
    values: Iterable[Any]  # its arguments

    def run(self, call: Callable[[], Any], instead: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
        """Returns call(), or instead() if that cannot be compiled. errors: classes of errors of the compiler."""
        if self.module is not None and _is_in_backward():
            if self.module in _ran_uncompiled:
                return instead()
        else:
            instead = self._noting(instead)
            if self.kind is not None and self.kind in abandoned_kinds():
                return instead()
            if self.target in _uncompiled and not self._may_compile():
                return self._run_what_is_compiled(call, instead, errors)
        try:
            return _with_settings(call)
        except Exception as error:
            self._raise_unless_of_compiler(error, errors)
            return self._run_instead(instead, error)

    def _noting(self, instead: Callable[[], Any]) -> Callable[[], Any]:
        """Returns `instead` so that a recomputation of this module in backward will run it, too."""
        module = self.module
        if module is None or not torch.is_grad_enabled():
            return instead
        _ran_uncompiled.discard(module)

        def noted() -> Any:
            _ran_uncompiled.add(module)
            return instead()

        return noted

    def _may_compile(self) -> bool:
        shape, lengths = self._shape()
        failures = _uncompiled[self.target].get(lengths)
        return failures is None or failures.allow_attempt(shape)

    def _run_what_is_compiled(
        self, call: Callable[[], Any], instead: Callable[[], Any], errors: tuple[type[Exception], ...]
    ) -> Any:
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return _with_settings(call)
        except Exception as error:
            if "fail_on_recompile" in str(error):
                return instead()
            self._raise_unless_of_compiler(error, errors)
            return self._run_instead(instead, error)

    def _raise_unless_of_compiler(self, error: Exception, errors: tuple[type[Exception], ...]) -> None:
        """Raises an error again that is of memory, or that ends a recomputation early as it should."""
        if isinstance(error, _StopRecomputationError):
            raise error
        if is_out_of_memory(error):  # within the compiler's own error, too
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            raise torch.OutOfMemoryError(str(error)) from error
        if not isinstance(error, errors) and not is_out_of_shared_memory(error):
            raise error

    def _run_instead(self, instead: Callable[[], Any], error: Exception) -> Any:
        if self.kind is not None:
            _failed_kinds.add(self.kind)
            if is_out_of_shared_memory(error):
                _abandoned_in_row.add(self.kind)
                say(f"{self.kind} is not compiled and slower from now on: {_reason(error)}")
                return instead()
        shape, lengths = self._shape()
        failures = _uncompiled.setdefault(self.target, {}).setdefault(lengths, _Failures())
        is_new = shape not in failures.shapes
        failures.add(shape)
        num_abandoned = len(_abandoned_in_row)
        output = instead()
        if len(_abandoned_in_row) > num_abandoned:  # by a part of this layer, which has said so
            _failed_with_attention.append((failures, shape))
        elif is_new:
            self._say_failure(error)
        return output

    def _say_failure(self, error: Exception) -> None:
        if isinstance(error, FailOnRecompileLimitHit):
            if ("limit", self.target) not in _said_once:
                _said_once.add(("limit", self.target))
                limit = f"recompile_limit allows {_MAX_GRAPHS} graphs"
                say(f"{self.name} is not compiled and slower for some rows: {limit}")
            return
        sizes = next((tuple(x.shape) for x in self.values if isinstance(x, Tensor)), ())
        say(f"for {' × '.join(map(str, sizes))} {self.name} is not compiled and slower: {_reason(error)}")

    def _shape(self) -> tuple[Hashable, Hashable]:
        """Returns the arguments' shapes, and the same with ranges in place of the lengths that differ between rows."""
        facts = list(_facts(self.values))
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        exact = tuple(fact for fact, _ in facts)
        ranges = tuple(fact_range for _, fact_range in facts)
        return (*modes, *exact), (*modes, *ranges)


def _with_settings(call: Callable[[], Any]) -> Any:
    """Returns call(), during which the compiler has Tandem's settings in this thread. Calls may nest."""
    restore_dynamo = _set_for_dynamo()
    restore_backward = _set_for_backward()
    try:
        return call()
    finally:
        restore_backward()
        restore_dynamo()


def _is_in_backward() -> bool:
    """Returns whether torch's backward runs, within which gradient checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def _facts(values: Iterable[Any]) -> Iterator[tuple[Hashable, Hashable]]:
    """Yields what the compiler looks at in each value, exactly, and with ranges in place of lengths."""
    for value in values:
        if isinstance(value, Tensor):
            kind = value.dtype, value.device.type, value.requires_grad
            sizes = tuple(value.shape)
            ranges: list[Hashable] = [_range(size) for size in sizes]
            if len(sizes) > 2:  # [rows, T, D] and [rows, H, T, d]: heads and widths are the model's
                ranges = [*sizes[:-2], ranges[-2], sizes[-1]]
            yield (*kind, sizes), (*kind, *ranges)
        elif isinstance(value, int):
            yield value, _range(value)
        elif isinstance(value, float | str | None):
            yield value, value
        else:
            name = type(value).__name__
            yield name, name


def _range(length: int) -> str:
    """Returns the range of lengths between two powers of two that holds this one: "< 128" for 64 to 127."""
    return f"< {1 << length.bit_length()}"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    start = max(0, text.find("out of resource"))
    return text[start : start + 200]
