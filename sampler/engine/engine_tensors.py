"""Checks bit by bit that an engine holds a version's weights: its tensors' checksums against the manifest's.

Checksums are computed in place, on a GPU too; engine_layout.py knows the location of each published tensor.

A tensor that cannot be compared to the bit is unproven: named and counted, never passed in silence. It is checked by
its values as far as possible, and the canary covers the rest:

    packed        for a CPU's product, the matrix dropped: what the layer multiplies by, column by column
    rearranged    by a kernel, an interleaving, a merge that no name tells: the numbers are the published ones, in
                  another order, and so they are in every tensor of the kind; in one alone they are wrong
    narrowed      held in fewer bits: it must be the published tensor, rounded
    computed      each load overwrites it, for it is filled with NaN before; one that was −exp of the published tensor,
                  or is in other layers, as Mamba's A, must be
    quantised, or a shard of a tensor-parallel engine: the canary alone

A tensor that was comparable once must always be. Engine tensors and published ones without a counterpart are wrong.
"""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.files.weights import TensorInfo
from common.processes.watchdog import report_progress
from model.checksum import ZEROS, unlike, unordered_sum
from sampler.engine import vllm_insides
from sampler.engine.engine_layout import (
    NUMBER,
    EngineModel,
    Layout,
    Part,
    as_published,
    kind_of,
    layer_of,
    same_numbers,
    settled,
)


@dataclass
class Proof:
    """The results of comparing an engine with the published tensors."""

    proven: set[str] = field(default_factory=set)
    unproven: dict[str, str] = field(default_factory=dict)  # name -> why it can not be compared
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    narrow: set[str] = field(
        default_factory=set
    )  # the engine's tensors with fewer bits than any published one


def of_ranks(proofs: Sequence[Proof]) -> Proof:
    """Returns the proofs of the ranks of one engine merged into one."""
    return Proof(
        set().union(*(p.proven for p in proofs)),
        {name: why for p in proofs for name, why in p.unproven.items()},
        [text for p in proofs for text in p.wrong],
        max(p.seconds for p in proofs),
        set().union(*(p.narrow for p in proofs)),
    )


def prove(
    model: Any,
    expected: Mapping[str, TensorInfo],
    layout: Layout | None = None,
    published: Mapping[str, Tensor] | None = None,
) -> Proof:
    """Compares a vLLM model with the published tensors.

    layout: the results of earlier loads of this engine, which is updated. published: the tensors, on a CPU; without
    them packed tensors are left to the canary, and rearranged or narrowed ones are wrong.
    """
    started_s, layout = time.monotonic(), layout or Layout()
    engine = EngineModel(model, expected, published or {}, seed=layout.loads)
    found, proof = engine.named(), Proof(narrow=_narrow(model, expected))
    kinds = defaultdict[tuple[Any, ...], list[str]](list)
    for name in expected.keys() - {part.name for parts in found.values() for part in parts}:
        kinds[kind_of(name), *expected[name].shape].append(name)
    homeless = []
    for kind, names in sorted(kinds.items()):
        names.sort()
        rules = settled(engine, names, layout.rules.get(kind))
        if not rules:
            homeless += names
            continue
        layout.rules[kind] = rules
        for name in names:
            found.setdefault(engine.at(rules[0], name) or "", []).append(
                rules[0].part(name, expected[name])
            )
    aliases = {
        id(engine.parameters[name]): parts
        for name, parts in found.items()
        if name in engine.parameters
    }
    free = [
        name for name, p in engine.parameters.items() if name not in found and id(p) not in aliases
    ]
    rearranged = _rearranged_homes(proof, engine, homeless, free)
    _give_homes(proof, engine, homeless, free, layout)
    located = {
        name: found.get(name)
        or aliases.get(id(engine.parameters.get(name)))
        or []  # a tied LM head is the embedding
        for name in {**engine.parameters, **found}
    }
    differ = unlike(_expected_sums(engine, located))
    for name, parts in located.items():
        if parts:
            if moved := _prove_one(proof, name, engine, parts, differ):
                rearranged[name] = moved
        elif name in free and vllm_insides.is_made_of_others(name):
            layout.computed[name] = name
            if engine.parameters[name].isnan().any():
                proof.wrong.append(f"the engine's {name} was not made anew after the load")
        elif name in free:
            proof.wrong.append(f"nothing was published for the engine's {name}")
        report_progress("comparing the engine's weights")
    _judge_rearranged(proof, engine, rearranged)
    _judge_computed(proof, engine, layout)
    proof.proven -= proof.unproven.keys()
    proof.wrong += [f"{name} was compared before, and is not now: {proof.unproven[name]}"
                    for name in sorted(layout.proven & proof.unproven.keys())]  # fmt: skip
    layout.proven |= proof.proven
    layout.loads += 1
    proof.seconds = time.monotonic() - started_s
    return proof


def _expected_sums(
    engine: EngineModel, located: Mapping[str, list[Part]]
) -> Iterator[tuple[str, Tensor, str]]:
    """Yields the tensors whose checksums tell what the engine holds; a tied LM head, the embedding itself, comes once.

    Two questions come as a tensor that must be 0, because they then need no wait of their own: whether a tensor was
    widened without loss, and whether it has numbers beside the published ones.
    """
    seen = set[str]()
    for name, parts in located.items():
        tensor, infos = engine.tensors[name], [part.info for part in parts]
        if (
            not parts
            or _key(tensor, parts[0]) in seen
            or _not_comparable(engine.module(name), tensor, infos)
        ):
            continue
        whole = engine.value(name)
        held = [part.of(whole) for part in parts]
        for part, own in zip(parts, held, strict=True):
            given = own.to(getattr(torch, part.info.dtype))
            yield _key(tensor, part), given, part.info.checksum
            if given.dtype != own.dtype:
                yield _key(tensor, part, " widened"), given.to(own.dtype) != own, ZEROS
            seen.add(_key(tensor, part))
        if sum(own.numel() for own in held) < whole.numel():
            others = _nonzero([whole]) - _nonzero(held)
            yield _key(tensor, parts[0], " and others"), others.clamp(min=0), ZEROS
        report_progress("comparing the engine's weights")


def _nonzero(tensors: Sequence[Tensor]) -> Tensor:
    """Returns how many numbers are not 0, on the tensors' device."""
    return torch.stack([tensor.count_nonzero() for tensor in tensors]).sum()


def _key(tensor: Tensor, part: Part, what: str = "") -> str:
    return f"{part.name} in {id(tensor)}{what}"


def _narrow(model: Any, expected: Mapping[str, TensorInfo]) -> set[str]:
    fewest = min((getattr(torch, info.dtype).itemsize for info in expected.values()), default=0)
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name for name, t in tensors if t.is_floating_point() and t.itemsize < fewest}


def _give_homes(
    proof: Proof, engine: EngineModel, homeless: list[str], free: list[str], layout: Layout
) -> None:
    """Locates published tensors that the engine does not hold unchanged, and removes their engine tensors from `free`.

    At the first load, an engine tensor of the same layer and size, or with a slot for the expert, is taken as computed
    from them; later only that one is. It need not be known into which of a layer's packed matrices a tensor went.
    """
    expected, used = engine.expected, dict[int, None]()
    for name in {(kind_of(name), *expected[name].shape): name for name in homeless[::-1]}.values():
        if not layout.loads and (home := engine.misplaced(name)):
            proof.wrong.append(_misplaced(home, name))
    for name in homeless:
        size, numbers = math.prod(expected[name].shape), NUMBER.findall(name)
        near = {home: engine.parameters[home] for home in free if layer_of(home) == layer_of(name)}
        packed = [
            home for home, p in near.items() if not p.numel() and len(expected[name].shape) > 1
        ]
        split = [home for home in near if _is_split(engine.module(home))]
        same = [home for home, p in near.items() if p.numel() == size and id(p) not in used]
        slots = [
            home
            for home, p in near.items()
            if len(numbers) > 1 and p.ndim > 2 and len(p) > int(numbers[-1])
        ]
        if name in layout.computed or (
            not layout.loads and not packed and not split and (same or slots)
        ):
            homes = [layout.computed.setdefault(name, (same or slots or [""])[0])]
            proof.unproven[name] = f"{homes[0]}: vLLM computes with it as it loads it"
            if homes[0] not in near or near[homes[0]].isnan().any():
                proof.wrong.append(
                    f"the load of the published {name} did not reach the engine's {homes[0]}"
                )
        elif packed and any(engine.shows_product(home, name) for home in packed):
            proof.wrong.append(f"no packed matrix of its layer multiplies by the published {name}")
            homes = packed
        elif packed or split:
            homes = packed or split[:1]
            size = vllm_insides.tensor_parallel_size(engine.module(homes[0]))
            proof.unproven[name] = f"{homes[0]}: {PACKED if packed else _split(size)}"
        else:
            proof.wrong.append(f"the engine has no place for the published {name}")
            continue
        used |= {id(engine.parameters.get(home)): None for home in homes}
    free[:] = [home for home in free if id(engine.parameters[home]) not in used]


def _rearranged_homes(
    proof: Proof, engine: EngineModel, homeless: list[str], free: list[str]
) -> dict[str, list[Part]]:
    """Returns {engine's tensor: the unlocated published ones of its layer whose numbers together are its own}.

    Removes them from `homeless`, and the engine's tensors from `free`. Numbers of another layer or expert are wrong,
    and so are the remaining tensors of a kind of which others were found.
    """
    published, homes, sums = engine.published, dict[str, list[Part]](), dict[int, list[str]]()
    whole_ones = [
        name for name in free if engine.tensors[name].numel() and not _is_split(engine.module(name))
    ]
    layers = set(map(layer_of, homeless)) & set(map(layer_of, whole_ones)) if published else set()
    for layer in sorted(layers):
        kinds = defaultdict[str, list[str]](list)
        for name in homeless:
            if layer_of(name) == layer:
                kinds[kind_of(name)].append(name)
        of_kinds = {
            kind: sum(unordered_sum(published[name]) for name in names)
            for kind, names in kinds.items()
        }
        for some in itertools.chain.from_iterable(
            itertools.combinations(kinds, count) for count in (1, 2, 3)
        ):
            sums[sum(of_kinds[kind] for kind in some) % 2**64] = [
                name for kind in some for name in kinds[kind]
            ]
    for home in whole_ones if sums else ():
        whole = as_published(engine.value(home), engine.expected[homeless[0]])
        if not (chosen := sums.get(unordered_sum(whole))):
            continue
        if layer_of(home) != layer_of(chosen[0]) or not same_numbers(
            whole, {n: published[n] for n in chosen}
        ):
            proof.wrong.append(_misplaced(home, chosen[0]))
        homes[home] = [Part(name, engine.expected[name]) for name in chosen]
        free.remove(home)
    found = {part.name for parts in homes.values() for part in parts}
    lost = [
        name for name in homeless if name not in found and kind_of(name) in set(map(kind_of, found))
    ]
    proof.wrong += [
        f"the engine does not hold the published {name}, as it holds others of its kind"
        for name in lost
    ]
    homeless[:] = [name for name in homeless if name not in found and name not in lost]
    return homes


def _judge_rearranged(
    proof: Proof, engine: EngineModel, rearranged: Mapping[str, list[Part]]
) -> None:
    """Decides whether a kernel or a mistake has reordered the published numbers in the engine's tensors.

    vLLM treats all tensors of a kind alike. If a kind has only one tensor, unchanged rows mean that rows were swapped
    by mistake, because kernels need another order of the numbers within a row.
    """
    moved = {part.name for parts in rearranged.values() for part in parts}
    kinds = Counter(map(kind_of, moved))
    plain = {
        kind_of(name)
        for name in engine.expected.keys() - moved
        if name in proof.proven | proof.unproven.keys()
    }
    for name, parts in rearranged.items():
        for part in parts:
            kind = kind_of(part.name)
            if kind not in plain and (kinds[kind] > 1 or not engine.has_whole_rows(name, part)):
                proof.unproven[part.name] = f"{name}: vLLM has rearranged it"
            else:
                proof.wrong.append(_other(name, part))


def _judge_computed(proof: Proof, engine: EngineModel, layout: Layout) -> None:
    """Refuses tensors that are not −exp of a published one, if others of its kind are or have been."""
    computed = {name: home for name, home in layout.computed.items() if name in engine.published}
    is_decay = {name: engine.is_decay(home, name) for name, home in computed.items()}
    layout.decays |= {kind_of(name) for name in computed if is_decay[name]}
    proof.wrong += [
        f"the engine's {computed[name]} is not −exp of the published {name}, as others of its kind are"
        for name in computed
        if not is_decay[name] and kind_of(name) in layout.decays
    ]


def _other(name: str, part: Part) -> str:
    return f"the engine's {name} does not hold the published {part.name}"


def _misplaced(engine_name: str, published: str) -> str:
    return f"the engine's {engine_name} holds the published {published}, which belongs elsewhere"


def spoil(model: Any, layout: Layout) -> None:
    """Fills the tensors that the next load computes with NaN, so that a load that does not reach one is noticed."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for home in set(layout.computed.values()):
        parameters[home].data.fill_(math.nan)


def _prove_one(
    proof: Proof, name: str, engine: EngineModel, parts: list[Part], differ: set[str]
) -> list[Part]:
    """Judges one of the engine's tensors by its sums that differ. Returns the parts that it holds in another order."""
    tensor = engine.tensors[name]
    if why := _not_comparable(engine.module(name), tensor, [part.info for part in parts]):
        proof.unproven |= {part.name: f"{name}: {why}" for part in parts}
        if why is PACKED:
            others = [part for part in parts if not engine.multiplies_by(name, part)]
            moved = [
                part for part in others if engine.multiplies_by(name, part, is_rearranged=True)
            ]
            lost = [part.name for part in others if part not in moved]
            proof.wrong += [
                f"the engine's {name} does not multiply by the published {each}" for each in lost
            ]
            return moved
        if name in proof.narrow:
            proof.wrong += [
                _other(name, part) for part in parts if not engine.holds_rounded(name, part)
            ]
        return []
    others = [
        part for part in parts if differ & {_key(tensor, part), _key(tensor, part, " widened")}
    ]
    proof.proven |= {part.name for part in parts if part not in others}
    if others:
        given = {
            part.name: engine.published[part.name]
            for part in parts
            if part.name in engine.published
        }
        if len(given) == len(parts) and same_numbers(
            as_published(engine.value(name), parts[0].info), given
        ):
            return others
        proof.wrong += [_other(name, part) for part in others]
    elif any(not engine.multiplies_by(name, part) for part in parts):
        proof.wrong.append(f"the engine's {name} is not what its layer multiplies by")
    if _key(tensor, parts[0], " and others") in differ:
        proof.wrong.append(f"the engine's {name} has numbers that are neither published nor zero")
    return []


PACKED = "vLLM packed it for a CPU"


def _is_split(module: Any) -> bool:
    return vllm_insides.tensor_parallel_size(module) > 1


def _split(size: int) -> str:
    return f"it is split over {size} ranks"


def _not_comparable(module: Any, tensor: Tensor, infos: list[TensorInfo]) -> str:
    """Returns why the engine's tensor cannot have the published bits; "" if it must have them."""
    size = sum(math.prod(info.shape) for info in infos)
    if tensor.numel() == 0 and size:
        return PACKED
    if (ranks := vllm_insides.tensor_parallel_size(module)) > 1 and size != tensor.numel():
        return _split(ranks)
    if method := vllm_insides.quantised_by(module):
        return f"vLLM transforms it ({method})"
    if tensor.dtype not in (getattr(torch, infos[0].dtype), torch.float32):
        return f"vLLM holds it in {tensor.dtype}, published is {infos[0].dtype}"
    return ""


def prove_adapters(model: Any, expected: Mapping[str, TensorInfo]) -> Proof:
    """Compares the adapter in a model's LoRA layers. B is published without the factor alpha / r, expected with it.

    A layer that vLLM splits into more parts than were published (the one projection before a state) has A in each of
    them, and B's rows one part after the other; several published tensors share it in their order, and the first has
    all further parts. Numbers around the published ones, up to vLLM's largest rank, and all other layers must be 0.
    """
    fused, named = vllm_insides.fused_layers(model), vllm_insides.adapter_names(model)
    published_in = Counter(whole for whole, _ in fused.values())
    layers = vllm_insides.adapter_stacks(model)
    proof, seen = Proof(narrow=_narrow(model, expected)), set[tuple[str, str, int]]()
    path_of, required = dict[str, str](), list[tuple[str, Tensor, str]]()
    for name, info in expected.items():
        path, _, which = (
            named(name.removeprefix("base_model.model.")).removesuffix(".weight").rpartition(".")
        )
        parent, _, leaf = path.rpartition(".")
        whole, part = (leaf, 0) if path in layers else fused.get(leaf, (leaf, 0))
        layer_path = ".".join(filter(None, (parent, whole)))
        if layer_path not in layers:
            proof.wrong.append(f"the engine has no place for the published {name}")
            continue
        of_layer = layers[layer_path][which]
        more = len(of_layer) - (1 if whole == leaf else published_in[whole])
        own = range(part + more * (part > 0), part + more + 1)
        seen |= {(layer_path, which, i) for i in own}
        own_stacks, (rows, columns) = [of_layer[i] for i in own], info.shape
        held = (
            [torch.cat([stack[:, :columns] for stack in own_stacks])]
            if which == "lora_B"
            else own_stacks
        )
        path_of[name] = layer_path
        required += [
            (f"{name} {i}", stack[:rows, :columns], info.checksum) for i, stack in enumerate(held)
        ]
        around = [stack[rows:] for stack in held] + [stack[:, columns:] for stack in own_stacks]
        required.append((f"around {name}", _nonzero(around), ZEROS))
        report_progress("comparing the engine's adapters")
    for path, stacks in layers.items():
        for which, parts in stacks.items():
            if others := [stack for i, stack in enumerate(parts) if (path, which, i) not in seen]:
                required.append((f"the engine's {path} has a {which}", _nonzero(others), ZEROS))
    differ = unlike(required)
    for name, path in path_of.items():
        if any(f"{name} {i}" in differ for i in range(len(layers[path]["lora_A"]))):
            proof.wrong.append(f"the engine's {path} does not hold the published {name}")
        elif f"around {name}" in differ:
            proof.wrong.append(f"the engine's {path} has numbers around the published {name}")
        else:
            proof.proven.add(name)
    unpublished = sorted(said for said in differ if said.startswith("the engine's "))
    proof.wrong += [f"{said} that nothing was published for" for said in unpublished]
    return proof
