"""The tokenizer both processes use: the sampler to make prompts and texts, the trainer to save it with models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, first_line
from common.hub import work_offline_without_hub
from model.files.folder import require_model
from model.files.hub import not_available_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from common.config import Model


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a hub id or folder. Raises UserError if it cannot be found or loaded."""
    require_model(path, revision)  # both processes load the tokenizer before the model
    if not Path(path).is_dir():
        work_offline_without_hub()
    from transformers import AutoTokenizer  # the import takes seconds

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if Path(path).is_dir():
            raise UserError(f"model {path!r}: the folder holds no tokenizer that loads: {first_line(error)}") from error
        raise not_available_error(path, error) from error


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that the section `model` of the settings names, as `load_tokenizer`."""
    return load_tokenizer(model.path, model.revision, model.trust_remote_code)


def check_vocabulary(model: Any, tokenizer_size: int, section: str) -> None:
    """Raises UserError if a model has fewer embeddings than the policy's tokenizer has tokens, so they do not match.

    section: the section of the settings that names the model, reference or critic.
    """
    rows = model.get_input_embeddings().num_embeddings  # ZeRO-3 leaves the weight itself empty
    if rows < tokenizer_size:
        raise UserError(
            f"the {section} model knows {rows} tokens, the policy's tokenizer {tokenizer_size}: {section}.path must "
            "name a model with the policy's tokenizer"
        )
