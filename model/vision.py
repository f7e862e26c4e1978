"""Images in packed rows: positions of the vision tower's features, and of each token on three axes (M-RoPE).

    prompt 5 ▣ ▣ ▣ ▣ ▣ ▣ 6 with an image of 2 × 3 tokens, completions [8 9] and [7]

    time      0 │ 1 1 1 1 1 1 │ 4 │ 5 6 │ 5        an image begins where the text before it ends;
    height    0 │ 1 1 1 2 2 2 │ 4 │ 5 6 │ 5        what follows goes on one behind its largest place,
    width     0 │ 1 2 3 1 2 3 │ 4 │ 5 6 │ 5        on all three axes alike

(Wang et al., arXiv 2409.12191, section 2.1.) The tower runs once per image, however many completions read it, and
attends within each image alone. A row without images gets a blank one that nothing reads: ZeRO gathers and reduces the
tower's parameters in every forward and backward, so that a rank without images must run it, too. Left out: videos.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import EncodedImage
from model import attention
from model.files.folder import VISION_FAMILIES
from model.files.hub import present_file
from model.files.images import FORMAT_FILES, ImageFormat, decode_patches, image_format
from model.packing import PackedRow, Span, VisionInput


@dataclass(frozen=True)
class VisionLayout:
    """The properties of a model that are needed to put images into its rows."""

    image_token: int  # stands in prompts, once for each feature
    form: ImageFormat
    start: int = -1  # stand before and after an image
    end: int = -1
    video: int = -1
    files: tuple[tuple[str, bytes], ...] = ()  # (name, contents) of its processor, saved with its weights


def has_vision_tower(config: Any) -> bool:
    """Returns whether a model of this transformers configuration has a supported vision tower."""
    return config.model_type in VISION_FAMILIES


def layout_of(config: Any, path: str, revision: str | None) -> VisionLayout | None:
    """Returns the layout of the model at `path` with this transformers config; None without a vision tower.

    Raises UserError if the model's files do not say how it cuts images.
    """
    if not has_vision_tower(config):
        return None
    names = (*FORMAT_FILES, "video_preprocessor_config.json")
    files = (present_file(path, name, revision) for name in names)
    return VisionLayout(
        config.image_token_id,
        image_format(path, revision),
        config.vision_start_token_id,
        config.vision_end_token_id,
        config.video_token_id,
        tuple((file.name, file.read_bytes()) for file in files if file),
    )


def with_vision(row: PackedRow, layout: VisionLayout | None) -> PackedRow:
    """Returns the row with positions on three axes, and with its images, or a blank one, as vision input.

    Without a layout it is unchanged. Raises ValueError if a prompt does not hold its images' tokens.
    """
    if layout is None:
        assert not row.images, "images for a model without a vision tower"
        return row
    if not any(row.images):
        return _with_blank(row, layout)
    different = {id(image): image for images in row.images for image in images}  # sequences of a group share images
    sizes = [layout.form.num_tokens(image) for image in different.values()]
    feature_of = dict(zip(different, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    ids, text = row.input_ids.flatten(), row.position_ids.flatten()
    positions, merge = text.expand(3, -1).clone(), layout.form.merge_size
    places: list[int] = []
    features: list[int] = []
    for (begin, end), images in zip(_sequences(row), row.images, strict=True):
        begins = _image_begins(ids[begin:end], images, layout)
        grids = [(rows // merge, columns // merge) for _, rows, columns in (image.grid_thw for image in images)]
        table = axes(int(text[begin:end].max()) + 1, begins, grids)
        positions[:, begin:end] = torch.from_numpy(table)[:, text[begin:end]]
        for at, image in zip(begins, images, strict=True):
            size, feature = layout.form.num_tokens(image), feature_of[id(image)]
            places.extend(range(begin + at, begin + at + size))
            features.extend(range(feature, feature + size))
    vision = VisionInput(
        patches=torch.from_numpy(np.concatenate([decode_patches(image, layout.form) for image in different.values()])),
        grid_thw=torch.tensor([image.grid_thw for image in different.values()]),
        places=torch.tensor(places),
        features=torch.tensor(features),
    )
    return replace(row, position_ids=positions.view(3, *row.input_ids.shape), vision=vision)


def axes(length: int, begins: Sequence[int], grids: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Returns [3, length] positions on the axes of time, height and width of a sequence's tokens 0, 1, …

    begins: the index of each image's first token. grids: (rows, columns) of its tokens. An image of h × w tokens takes
    max(h, w) positions of the text, not h·w.
    """
    table = np.tile(np.arange(length), (3, 1))
    for begin, (rows, columns) in zip(begins, grids, strict=True):
        end, at = begin + rows * columns, table[0, begin]
        row, column = np.divmod(np.arange(rows * columns), columns)
        table[:, begin:end] = at + np.stack([np.zeros_like(row), row, column])
        table[:, end:] -= rows * columns - max(rows, columns)
    return table


def freeze_tower(model: Any) -> None:
    """Excludes the tower, with the layers that join it to the language model, from gradients and updates."""
    model.base_model.visual.requires_grad_(False)


def hidden_states(base: Any, row: PackedRow) -> Tensor:
    """Returns [T, D] of all tokens of the row, flattened. base: transformers' model with the tower, without a head.

    It avoids the model's own forward, which finds image tokens by their id, as a completion may have sampled it.
    """
    vision = row.vision
    assert vision is not None, "the row was not prepared by with_vision"
    tower = base.get_image_features(vision.patches, vision.grid_thw, return_dict=True)
    embedded = base.get_input_embeddings()(row.input_ids)

    def placed(features: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(features)).to(embedded.dtype).index_select(0, vision.features)

    flat = embedded.flatten(0, 1).index_copy(0, vision.places, placed(tower.pooler_output))
    deep: dict[str, Any] = {}
    if layers := getattr(tower, "deepstack_features", None):  # Qwen3-VL adds features to its first layers' outputs
        is_image = torch.zeros(len(flat), dtype=torch.bool, device=flat.device).index_fill(0, vision.places, True)
        deep["visual_pos_masks"] = is_image.view_as(row.input_ids)
        deep["deepstack_visual_embeds"] = [placed(features) for features in layers]
    text = base.language_model
    output = text(inputs_embeds=flat.view_as(embedded), use_cache=False, **attention.options(text, row), **deep)
    return output.last_hidden_state.flatten(0, 1)


def _with_blank(row: PackedRow, layout: VisionLayout) -> PackedRow:
    """Appends one token of a blank image, in a span or sequence of its own after all others."""
    form, (_, width) = layout.form, row.input_ids.shape
    grid = (1, form.merge_size, form.merge_size)
    ids = torch.zeros((1, 1 if row.spans else width), dtype=torch.int64)
    ids[0, 0] = layout.image_token
    along = 1 if row.spans else 0
    positions = torch.cat([row.position_ids, torch.arange(ids.shape[1])[None]], along)
    vision = VisionInput(
        patches=torch.zeros(math.prod(grid), 3 * form.temporal_patch_size * form.patch_size**2),
        grid_thw=torch.tensor([grid]),
        places=torch.tensor([row.input_ids.numel()]),
        features=torch.zeros(1, dtype=torch.int64),
    )
    return replace(
        row,
        input_ids=torch.cat([row.input_ids, ids], along),
        position_ids=positions.expand(3, *positions.shape),
        spans=(*row.spans, Span(width, 1, ())) if row.spans else (),
        vision=vision,
    )


def _sequences(row: PackedRow) -> list[tuple[int, int]]:
    """Returns (begin, end) of each span, or each separate sequence, in the flattened row."""
    if not row.spans:
        count, length = row.input_ids.shape
        return [(i * length, (i + 1) * length) for i in range(count)]
    return [(span.start, span.start + span.prompt + sum(span.completions)) for span in row.spans]


def _image_begins(ids: Tensor, images: Sequence[EncodedImage], layout: VisionLayout) -> list[int]:
    """Returns the index of each image's first token, by the first tokens of its id: completions may sample more."""
    sizes = [layout.form.num_tokens(image) for image in images]
    found = (ids == layout.image_token).nonzero()[:, 0][: sum(sizes)].tolist()
    begins = [found[at] if at < len(found) else -1 for at in np.cumsum([0, *sizes])[:-1]]
    if found != [begin + i for begin, size in zip(begins, sizes, strict=True) for i in range(size)]:
        raise ValueError(f"images of {sizes} tokens, but the prompt has {len(found)} image tokens, or not side by side")
    return begins
