"""Proves that an engine holds a version's weights: compares its tensors with the published ones.

Every published tensor is first located: in which engine tensor, and which rows of it. Then each is
judged. It is proven if the checksum of those rows, computed on their own device, is the manifest's.
It is unproven, which is named and counted, if vLLM does not hold the published bits. Then it is
checked by its values as far as possible, and the canary covers the rest:

    packed       vLLM dropped the matrix for a CPU's product. The layer's own product must be the
                 published matrix's, column by column (packed_product.py).
    rearranged   A kernel, an interleaving or a merge that no name tells put the published numbers
                 into another order. All tensors of the kind must be so; a single one is wrong.
    narrowed     The tensor has fewer bits. It must be the published tensor, rounded.
    computed     vLLM makes another tensor of it, which is filled with NaN before each load, so that
                 a load that does not reach it is found. If one is −exp of the published tensor, as
                 Mamba's A is, all others of the kind must be, too.
    quantised, or a shard of a tensor-parallel engine: only the canary checks it.

Everything else is wrong: other bits, a tensor that was comparable before and no longer is, an
engine tensor that nothing was published for, and a published one that the engine has no place for.
"""

import math
import time
from collections import Counter
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
    Kind,
    Layout,
    Part,
    as_published,
    expert_of,
    kind_of,
    layer_of,
)
from sampler.engine.engine_model import PACKED, EngineModel, split_over
from sampler.engine.layout_rules import find_anywhere, locate
from sampler.engine.rearranged import has_same_numbers, names_by_sum


@dataclass
class Proof:
    """The results of comparing an engine with the published tensors."""

    proven: set[str] = field(default_factory=set)  # names of published tensors
    unproven: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be compared
    wrong: list[str] = field(default_factory=list)  # one sentence for each difference
    seconds: float = 0.0
    # engine tensors with fewer bits than any published one
    narrow: set[str] = field(default_factory=set)


def of_ranks(proofs: Sequence[Proof]) -> Proof:
    """Returns the proofs of the ranks of one engine merged into one."""
    merged = Proof()
    for proof in proofs:
        merged.proven |= proof.proven
        merged.unproven |= proof.unproven
        merged.wrong += proof.wrong
        merged.seconds = max(merged.seconds, proof.seconds)
        merged.narrow |= proof.narrow
    return merged


def prove(
    model: Any,
    expected: Mapping[str, TensorInfo],
    layout: Layout | None = None,
    published: Mapping[str, Tensor] | None = None,
) -> Proof:
    """Compares a vLLM model with the published tensors.

    layout: the results of earlier loads of this engine, which is updated.
    published: the tensors, on a CPU. Without them the canary alone checks packed and narrowed
    tensors, and rearranged ones are wrong.
    """
    start = time.monotonic()
    layout = layout or Layout()
    engine = EngineModel(model, expected, published or {}, seed=layout.loads)
    comparison = _Comparison(engine, layout, Proof(narrow=narrow_tensors(model, expected)))
    comparison.run()
    layout.loads += 1
    comparison.proof.seconds = time.monotonic() - start
    return comparison.proof


def spoil(model: Any, layout: Layout) -> None:
    """Fills the tensors that the next load computes with NaN.

    So a load that does not reach one of them is noticed.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for engine_name in set(layout.computed.values()):
        parameters[engine_name].data.fill_(math.nan)


def narrow_tensors(model: Any, expected: Mapping[str, TensorInfo]) -> set[str]:
    """Returns the engine's tensors that have fewer bits than any published one."""
    itemsizes = [getattr(torch, info.dtype).itemsize for info in expected.values()]
    fewest = min(itemsizes, default=0)
    narrow = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.itemsize < fewest:
            narrow.add(name)
    return narrow


def num_nonzero(tensors: Sequence[Tensor]) -> Tensor:
    """Returns how many numbers are not 0, on the tensors' device."""
    return torch.stack([tensor.count_nonzero() for tensor in tensors]).sum()


class _Comparison:
    """The comparison of an engine with the published tensors after one load."""

    def __init__(self, engine: EngineModel, layout: Layout, proof: Proof):
        self.engine = engine
        self.layout = layout
        self.proof = proof
        # engine tensor -> the published tensors that it must hold bit by bit
        self.parts: dict[str, list[Part]] = {}
        # engine tensor -> the published tensors that it holds in another order
        self.rearranged: dict[str, list[Part]] = {}
        # engine tensors in which no published one was located
        self.free: list[str] = []

    def run(self) -> None:
        """Locates and judges all tensors."""
        self.parts = locate(self.engine, self.layout)
        located = {part.name for parts in self.parts.values() for part in parts}
        self._share_parts()
        unlocated = self._locate_rearranged(sorted(self.engine.expected.keys() - located))
        self._account_for(unlocated)
        self._compare()
        self._judge_rearranged()
        self._judge_computed()
        self.proof.proven -= self.proof.unproven.keys()
        for name in sorted(self.layout.proven & self.proof.unproven.keys()):
            why = self.proof.unproven[name]
            self.proof.wrong.append(f"{name} was compared before, and is not now: {why}")
        self.layout.proven |= self.proof.proven

    # ---- where the published tensors are -------------------------------------------------------

    def _share_parts(self) -> None:
        """Gives a tied LM head the parts of the embedding. Tensors without parts are free."""
        first_name = self.engine.first_name
        parts_of_first = {first_name[name]: parts for name, parts in self.parts.items()}
        for name in self.engine.parameters:
            if name in self.parts:
                continue
            if first_name[name] in parts_of_first:
                self.parts[name] = parts_of_first[first_name[name]]
            else:
                self.free.append(name)

    def _locate_rearranged(self, unlocated: list[str]) -> list[str]:
        """Finds engine tensors that hold published ones of their layer in another order.

        Numbers of another layer or expert are wrong, and so is a tensor that is nowhere while
        others of its kind are found. Returns the published tensors that are still not located.
        """
        engine = self.engine
        candidates = []
        for name in self.free:
            if engine.tensors[name].numel() and engine.num_ranks(name) == 1:
                candidates.append(name)
        layers = {layer_of(name) for name in candidates}
        nearby = [name for name in unlocated if layer_of(name) in layers]
        if not nearby or not engine.published:
            return unlocated
        names_of_sum = names_by_sum(engine.published, nearby)
        found: set[str] = set()
        for engine_name in candidates:
            tensor = as_published(engine.value(engine_name), engine.expected[unlocated[0]])
            names = names_of_sum.get(unordered_sum(tensor))
            if names is None:
                continue
            is_own_layer = layer_of(engine_name) == layer_of(names[0])
            given = {name: engine.published[name] for name in names}
            if not is_own_layer or not has_same_numbers(tensor, given):
                self._misplaced(engine_name, names[0])
            self.rearranged[engine_name] = [Part(name, engine.expected[name]) for name in names]
            self.free.remove(engine_name)
            found |= given.keys()
        found_kinds = {kind_of(name) for name in found}
        remaining = []
        for name in unlocated:
            if name in found:
                continue
            if kind_of(name) in found_kinds:
                self.proof.wrong.append(
                    f"the engine does not hold the published {name}, as it holds others of its kind"
                )
            else:
                remaining.append(name)
        return remaining

    def _account_for(self, unlocated: list[str]) -> None:
        """Says what became of published tensors whose numbers the engine does not hold.

        Their engine tensors are no longer free.
        """
        if self.layout.loads == 0:
            one_of_kind: dict[Kind, str] = {}
            for name in unlocated:
                one_of_kind.setdefault(Kind.of(name, self.engine.expected[name]), name)
            for name in one_of_kind.values():
                engine_name = find_anywhere(self.engine, name)
                if engine_name is not None:
                    self._misplaced(engine_name, name)
        used: set[str] = set()  # engine tensors, by their first names
        for name in unlocated:
            for engine_name in self._became(name, used):
                used.add(self.engine.first_name.get(engine_name, engine_name))
        self.free = [name for name in self.free if self.engine.first_name[name] not in used]

    def _became(self, name: str, used: set[str]) -> list[str]:
        """Says what became of a published tensor, and returns the engine tensors made of it.

        It need not be known into which of a layer's packed matrices a tensor went.
        """
        near = [home for home in self.free if layer_of(home) == layer_of(name)]
        packed = []
        if len(self.engine.expected[name].shape) > 1:
            packed = [home for home in near if not self.engine.tensors[home].numel()]
        split = [home for home in near if self.engine.num_ranks(home) > 1]
        if self.layout.loads == 0 and name not in self.layout.computed and not packed and not split:
            home = self._computed_from(name, near, used)
            if home is not None:
                self.layout.computed[name] = home
        if name in self.layout.computed:
            home = self.layout.computed[name]
            self.proof.unproven[name] = f"{home}: vLLM computes with it as it loads it"
            if home not in near or self.engine.tensors[home].isnan().any():
                self.proof.wrong.append(
                    f"the load of the published {name} did not reach the engine's {home}"
                )
            return [home]
        if any(self.engine.shows_product(home, name) for home in packed):
            self.proof.wrong.append(
                f"no packed matrix of its layer multiplies by the published {name}"
            )
            return packed
        if packed:
            self.proof.unproven[name] = f"{packed[0]}: {PACKED}"
            return packed
        if split:
            self.proof.unproven[name] = f"{split[0]}: {split_over(self.engine.num_ranks(split[0]))}"
            return split[:1]
        self.proof.wrong.append(f"the engine has no place for the published {name}")
        return []

    def _computed_from(self, name: str, near: list[str], used: set[str]) -> str | None:
        """Returns an engine tensor that may be computed from a published one at the first load.

        It has the size of the published one, or else a slot for its expert. None: there is none.
        """
        size = math.prod(self.engine.expected[name].shape)
        for home in near:
            if (
                self.engine.tensors[home].numel() == size
                and self.engine.first_name[home] not in used
            ):
                return home
        expert = expert_of(name)
        if expert is None:
            return None
        for home in near:
            tensor = self.engine.tensors[home]
            if tensor.ndim > 2 and len(tensor) > expert:
                return home
        return None

    # ---- what the engine's tensors hold --------------------------------------------------------

    def _compare(self) -> None:
        """Judges every engine tensor that is located or free."""
        different = unlike(self._questions())
        for name in {**self.engine.parameters, **self.parts}:
            if name in self.parts:
                self._judge(name, self.parts[name], different)
            elif name in self.free and vllm_insides.is_made_of_others(name):
                self.layout.computed[name] = name
                if self.engine.parameters[name].isnan().any():
                    self.proof.wrong.append(f"the engine's {name} was not made anew after the load")
            elif name in self.free:
                self.proof.wrong.append(f"nothing was published for the engine's {name}")
            report_progress("comparing the engine's weights")

    def _questions(self) -> Iterator[tuple[str, Tensor, str]]:
        """Yields (question, tensor, its checksum if the answer is yes) for comparable tensors.

        Two questions come as a tensor that must be 0, because they then need no wait of their own:
        whether a tensor was widened without loss, and whether it has numbers beside the published
        ones. A tied LM head, which is the embedding itself, comes once.
        """
        asked = set()
        for name, parts in self.parts.items():
            question = self._question(name, parts[0])
            if question in asked or self.engine.why_not_comparable(name, parts):
                continue
            asked.add(question)
            tensor = self.engine.value(name)
            num_held = 0
            views = []
            for part in parts:
                view = part.of(tensor)
                views.append(view)
                num_held += view.numel()
                narrow = view.to(getattr(torch, part.info.dtype))
                yield self._question(name, part), narrow, part.info.checksum
                if narrow.dtype != view.dtype:
                    yield (
                        self._question(name, part, " exactly"),
                        narrow.to(view.dtype) != view,
                        ZEROS,
                    )
            if num_held < tensor.numel():
                others = num_nonzero([tensor]) - num_nonzero(views)
                yield self._question(name, parts[0], " alone"), others.clamp(min=0), ZEROS
            report_progress("comparing the engine's weights")

    def _question(self, name: str, part: Part, more: str = "") -> str:
        return f"{self.engine.first_name[name]} holds {part.name}{more}"

    def _judge(self, name: str, parts: list[Part], different: set[str]) -> None:
        """Judges an engine tensor. different: the questions whose answer is no."""
        why = self.engine.why_not_comparable(name, parts)
        if why:
            for part in parts:
                self.proof.unproven[part.name] = f"{name}: {why}"
        if why == PACKED:
            self._judge_packed(name, parts)
        elif why and name in self.proof.narrow:
            for part in parts:
                if not self.engine.holds_rounded(name, part):
                    self._not_held(name, part)
        elif not why:
            self._judge_comparable(name, parts, different)

    def _judge_packed(self, name: str, parts: list[Part]) -> None:
        rearranged = []
        for part in parts:
            if not self.engine.multiplies_otherwise(name, part):
                continue
            if self.engine.multiplies_otherwise(name, part, in_any_order=True):
                self.proof.wrong.append(
                    f"the engine's {name} does not multiply by the published {part.name}"
                )
            else:
                rearranged.append(part)
        if rearranged:
            self.rearranged[name] = rearranged

    def _judge_comparable(self, name: str, parts: list[Part], different: set[str]) -> None:
        others = []
        for part in parts:
            questions = {self._question(name, part), self._question(name, part, " exactly")}
            if questions & different:
                others.append(part)
            else:
                self.proof.proven.add(part.name)
        if others and self._has_same_numbers(name, parts):
            self.rearranged[name] = others
            return
        for part in others:
            self._not_held(name, part)
        if not others and any(self.engine.multiplies_otherwise(name, part) for part in parts):
            self.proof.wrong.append(f"the engine's {name} is not what its layer multiplies by")
        if self._question(name, parts[0], " alone") in different:
            self.proof.wrong.append(
                f"the engine's {name} has numbers that are neither published nor zero"
            )

    def _has_same_numbers(self, name: str, parts: list[Part]) -> bool:
        """Returns whether an engine tensor holds the numbers of its parts in another order."""
        published = self.engine.published
        if any(part.name not in published for part in parts):
            return False
        tensor = as_published(self.engine.value(name), parts[0].info)
        return has_same_numbers(tensor, {part.name: published[part.name] for part in parts})

    def _judge_rearranged(self) -> None:
        """Decides whether a kernel or a mistake has reordered the published numbers.

        vLLM treats all tensors of a kind alike. If a kind has only one tensor, unchanged rows mean
        that rows were swapped by mistake, because kernels need another order of the numbers within
        a row.
        """
        moved = {part.name for parts in self.rearranged.values() for part in parts}
        num_moved = Counter(kind_of(name) for name in moved)
        judged = self.proof.proven | self.proof.unproven.keys()
        in_order = set()  # kinds of which a tensor is not reordered
        for name in self.engine.expected:
            if name in judged and name not in moved:
                in_order.add(kind_of(name))
        for engine_name, parts in self.rearranged.items():
            for part in parts:
                kind = kind_of(part.name)
                is_single = num_moved[kind] == 1
                if kind in in_order or (
                    is_single and self.engine.has_whole_rows(engine_name, part)
                ):
                    self._not_held(engine_name, part)
                else:
                    self.proof.unproven[part.name] = f"{engine_name}: vLLM has rearranged it"

    def _judge_computed(self) -> None:
        """Refuses tensors that are not −exp of a published one although others of its kind are."""
        others = []
        for name, engine_name in self.layout.computed.items():
            if name not in self.engine.published:
                continue
            if self.engine.is_decay(engine_name, name):
                self.layout.decays.add(kind_of(name))
            else:
                others.append(name)
        for name in others:
            if kind_of(name) in self.layout.decays:
                engine_name = self.layout.computed[name]
                self.proof.wrong.append(
                    f"the engine's {engine_name} is not −exp of the published {name}, "
                    "as others of its kind are"
                )

    def _not_held(self, engine_name: str, part: Part) -> None:
        self.proof.wrong.append(
            f"the engine's {engine_name} does not hold the published {part.name}"
        )

    def _misplaced(self, engine_name: str, name: str) -> None:
        self.proof.wrong.append(
            f"the engine's {engine_name} holds the published {name}, which belongs elsewhere"
        )
