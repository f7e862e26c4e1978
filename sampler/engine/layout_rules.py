"""Locates published tensors in an engine's tensors: by names, or else by shapes and checksums.

A rule holds for every layer and every expert, or it is no rule, so that swapped experts or layers
are not taken for another layout, but are wrong. While all tensors are equal, as zeros are, several
rules hold; each load keeps those that still do.
"""

from collections import defaultdict

from sampler.engine import vllm_insides
from sampler.engine.engine_layout import Kind, Layout, Part, Rule, expert_of, fits, layer_of
from sampler.engine.engine_model import EngineModel

# Number of tensors of a kind from which rules are derived; the first one alone may be damaged.
_SAMPLES = 4


def locate(engine: EngineModel, layout: Layout) -> dict[str, list[Part]]:
    """Returns {engine tensor: its parts} for all published tensors that names or rules locate.

    layout: its rules are updated.
    """
    parts = engine.named_parts()
    named = {part.name for of_tensor in parts.values() for part in of_tensor}
    kinds = defaultdict(list)
    for name in sorted(engine.expected.keys() - named):
        kinds[Kind.of(name, engine.expected[name])].append(name)
    for kind, names in kinds.items():
        rules = _find_rules(engine, names, layout.rules.get(kind))
        if not rules:
            continue
        layout.rules[kind] = rules
        for name in names:
            engine_name = engine.at(rules[0], name)
            if engine_name is not None:
                part = rules[0].part(name, engine.expected[name])
                parts.setdefault(engine_name, []).append(part)
    return parts


def _find_rules(engine: EngineModel, names: list[str], known: list[Rule] | None) -> list[Rule]:
    """Returns the rules that hold for all published tensors of a kind.

    If none holds for all, it returns the one that holds for most of them, so that the others are
    wrong, or [] if it holds for less than half.
    names: those of the kind. known: the rules after the last load, None at the first one.
    """
    if known is not None and len(known) == 1:
        return known
    candidates = known
    if candidates is None:
        candidates = _candidates(engine, names)
    num_held = {}
    for rule in candidates:
        num_held[rule] = sum(_holds(engine, rule, name) for name in names)
    most = max(num_held.values(), default=0)
    best = [rule for rule, count in num_held.items() if count == most]
    if most == len(names):
        return best
    if known or most >= len(names) / 2:
        return best[:1]
    return []


def _candidates(engine: EngineModel, names: list[str]) -> list[Rule]:
    """Returns the rules that hold for at least one of a few tensors of a kind."""
    step = max(1, len(names) // _SAMPLES)
    samples = names[::step][:_SAMPLES]
    possible: dict[Rule, None] = {}
    for name in samples:
        possible |= dict.fromkeys(_possible(engine, name))
    return [rule for rule in possible if any(_holds(engine, rule, name) for name in samples)]


def _possible(engine: EngineModel, name: str) -> list[Rule]:
    """Returns the rules that the shapes of a layer's engine tensors allow."""
    shape = engine.expected[name].shape
    expert = expert_of(name)
    rules = []
    of_layer = engine.layers.get(layer_of(name), {})
    for kind, engine_name in of_layer.items():
        tensor = engine.tensors[engine_name]
        if tensor.numel():
            has_slot_dimension = tensor.ndim == len(shape) + 1
            has_slots = has_slot_dimension and expert is not None and expert < len(tensor)
            engine_shape = list(tensor.shape)
            if has_slots:
                engine_shape = engine_shape[1:]
            for begin, is_transposed in fits(engine_shape, shape):
                rules.append(Rule(kind, begin, has_slots, is_transposed))
        elif len(shape) == 2 and engine.shows_product(engine_name, name):
            engine_shape = vllm_insides.matrix_shape(engine.module(engine_name))
            for begin, is_transposed in fits(engine_shape, shape):
                if not is_transposed:
                    rules.append(Rule(kind, begin, False, False))
    return rules


def _holds(engine: EngineModel, rule: Rule, name: str) -> bool:
    """Returns whether the engine holds a published tensor where a rule locates it."""
    engine_name = engine.at(rule, name)
    if engine_name is None:
        return False
    part = rule.part(name, engine.expected[name])
    if engine.tensors[engine_name].numel():
        return part.is_in(engine.value(engine_name))
    if not engine.shows_product(engine_name, name):
        return False
    return not engine.multiplies_otherwise(engine_name, part)


def find_anywhere(engine: EngineModel, name: str) -> str | None:
    """Returns an engine tensor of any layer that holds a published one in any slot, or None."""
    for of_layer in engine.layers.values():
        for engine_name in of_layer.values():
            if _holds_anywhere(engine, engine_name, name):
                return engine_name
    return None


def _holds_anywhere(engine: EngineModel, engine_name: str, name: str) -> bool:
    info = engine.expected[name]
    tensor = engine.value(engine_name)
    if name in engine.published:  # one number is compared faster than the checksum of each place
        first_number = engine.published[name].flatten()[0]
        if not (tensor == first_number.to(tensor)).any():
            return False
    slots: list[int | None] = [None]
    if tensor.ndim == len(info.shape) + 1:
        slots = list(range(len(tensor)))
    engine_shape = tensor.shape[tensor.ndim - len(info.shape) :]
    for begin, is_transposed in fits(engine_shape, info.shape):
        for slot in slots:
            if Part(name, info, begin, slot, is_transposed).is_in(tensor):
                return True
    return False
