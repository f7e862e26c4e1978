"""Defines where a completion ends, and how its tokens become the text that rewards and tools read.

A completion ends at one of the model's own end tokens, or at one of sampler.stop. The own end
tokens are those of generation_config.json, that of the tokenizer, and the token that the chat
template writes after a turn, which may be neither if a base model has a chat template. The own end
tokens are not text. Other special tokens are kept if a function looks for them: a tag such as
<answer> may be a special token.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError
from common.processes.exits import say
from common.user_code import functions
from model.files.hub import model_json
from rewards.find import BUILT_IN, JUDGES
from rewards.mathematics.reading import behind_thoughts
from sampler.prompts.chat_template import TURN_MARK, render

# Special tokens with one of these roles begin, end and pad texts.
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
_TAG = re.compile(r"(<|\[)(/?)([A-Za-z_]\w*)(>|\])")


@dataclass(frozen=True)
class Ends:
    """The ends of a completion."""

    own: tuple[int, ...]  # ids of the model's own end tokens, which are not text
    ids: tuple[int, ...]  # ids of these and of the tokens in sampler.stop
    texts: tuple[str, ...] = ()  # entries of sampler.stop that are no tokens


@dataclass(frozen=True)
class Reader:
    """A decoder from token ids to texts. Called with lists of ids, it returns one text for each."""

    tokenizer: Any
    dropped: frozenset[int]  # ids of tokens that are not text
    kept: tuple[str, ...] = ()  # special tokens that are text because a function looks for them

    def __call__(self, ids: Sequence[Sequence[int]]) -> list[str]:
        with_text = []
        for sequence in ids:
            with_text.append([token_id for token_id in sequence if token_id not in self.dropped])
        return list(self.tokenizer.batch_decode(with_text, skip_special_tokens=False))


def stop_conditions(config: Config, tokenizer: Any) -> Ends:
    """Returns the ends of a completion.

    Raises UserError if there is none, or if sampler.stop has an id that is no token.
    """
    after_turn = _text_after_turn(config, tokenizer)
    candidates = _named_ends(config)
    candidates += [tokenizer.eos_token_id, _added_token(tokenizer, after_turn)]
    own: dict[int, None] = {}  # a set in order
    for token_id in candidates:
        if token_id is not None:
            own[int(token_id)] = None
    if not own and not config.sampler.stop:
        raise UserError(
            f"{config.model.path} names no end-of-sequence token; set eos_token_id in its config"
        )
    ids = dict(own)
    texts = []
    for stop in config.sampler.stop:
        if isinstance(stop, str):
            token_id = tokenizer.added_tokens_encoder.get(stop)
            if token_id is None:
                texts.append(stop)
            else:
                ids[token_id] = None
        elif 0 <= stop < len(tokenizer):
            ids[stop] = None
        else:
            raise UserError(
                f"sampler.stop: {stop} is no token, the tokenizer has {len(tokenizer)}; remove it"
            )
    return Ends(tuple(own), tuple(ids), tuple(texts))


def _named_ends(config: Config) -> list[int | None]:
    """Returns the end tokens of the model's generation_config.json."""
    path = config.model.path
    generation_config = model_json(path, "generation_config.json", config.model.revision) or {}
    named = generation_config.get("eos_token_id")
    if isinstance(named, list | tuple):
        return list(named)
    return [named]


def unwritten_end(config: Config, tokenizer: Any) -> str | None:
    """Returns advice if the mark with which the chat template ends a turn is not one token."""
    after_turn = _text_after_turn(config, tokenizer).lstrip()
    match = re.match(r"<\S+?>", after_turn)
    if match is None or _added_token(tokenizer, after_turn) is not None:
        return None
    mark = match.group()
    if mark in config.sampler.stop:
        return None
    return (
        f"the chat template ends a turn with {mark}, which is no token of this tokenizer: the "
        "model cannot end there. Take a template of the model's own, or set "
        f"sampler.stop=['{mark}']"
    )


def reader(config: Config, tokenizer: Any) -> Reader:
    """Returns the reader that rewards.special_tokens selects. Raises UserError."""
    own_ends = set(stop_conditions(config, tokenizer).own)
    if config.rewards.special_tokens == "keep":
        return Reader(tokenizer, frozenset(own_ends))
    special = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(token_id)
    kept: dict[int, str] = {}
    if config.rewards.special_tokens == "auto":
        with_roles = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
        tokens = {}
        for token_id in sorted(special - own_ends - with_roles):
            tokens[token_id] = str(tokenizer.convert_ids_to_tokens(token_id))
        kept = _looked_for(tokens, config)
    dropped = (special - kept.keys()) | own_ends
    return Reader(tokenizer, frozenset(dropped), tuple(kept.values()))


def logged_reader(config: Config, tokenizer: Any) -> Reader:
    """Returns `reader`, and logs which special tokens it keeps and which end tokens are missing."""
    text_reader = reader(config, tokenizer)
    if text_reader.kept:
        kept = ", ".join(text_reader.kept)
        say(f"texts keep the special tokens {kept} (rewards.special_tokens)")
    advice = unwritten_end(config, tokenizer)
    if advice is not None:
        say(advice)
    ends = stop_conditions(config, tokenizer).own
    known = [*_named_ends(config), tokenizer.eos_token_id]
    unknown = [token_id for token_id in ends if token_id not in known]
    if unknown:
        token = tokenizer.convert_ids_to_tokens(unknown[0])
        say(
            f"completions also end at {token}, which the model's own generation_config.json lacks, "
            "and so that of final/: before you serve it, write there "
            f'"eos_token_id": {json.dumps(list(ends))}'
        )
    return text_reader


def _looked_for(tokens: Mapping[int, str], config: Config) -> dict[int, str]:
    """Returns the special tokens that a function may look for, with their ids.

    These are tags whose opening and closing halves are both tokens, and tokens that stand in the
    source text of a reward, a tool, an environment or an agent.
    """
    names = set(tokens.values())
    source_texts = _source_texts(config)
    looked_for = {}
    for token_id, token in tokens.items():
        if _other_half(token) in names or any(token in text for text in source_texts):
            looked_for[token_id] = token
    return looked_for


def _other_half(token: str) -> str | None:
    """Returns </answer> for <answer>, <answer> for </answer>, and None for other tokens."""
    match = _TAG.fullmatch(token)
    if match is None:
        return None
    opening, slash, name, closing = match.groups()
    other_slash = "" if slash else "/"
    return f"{opening}{other_slash}{name}{closing}"


def _source_texts(config: Config) -> list[str]:
    """Returns the source texts of the run's rewards, tools, environments and agents.

    They are not imported here, because only their own process imports them.
    """
    names = list(map(functions.unnamed, config.rewards.reward_funcs))
    specs = [BUILT_IN.get(name, name) for name in names]
    if not JUDGES.keys().isdisjoint(names):  # these look for the marks of thoughts
        specs.append(f"{behind_thoughts.__module__}.{behind_thoughts.__name__}")
    for settings in config.of_sources.values():
        rollout = settings.rollout
        for spec in [*rollout.tools, rollout.environment, rollout.agent]:
            if isinstance(spec, str):
                specs.append(spec)
    texts = []
    for spec in specs:
        location, _ = functions.parse(spec, spec)
        path = location if isinstance(location, Path) else _file_of_module(location)
        if path is None:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # the process that imports the file reports the error
    return texts


def _file_of_module(module: str) -> Path | None:
    """Returns the file of a module. Only its first package is searched for, so none is imported."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin else None
    folder = next(iter(spec.submodule_search_locations))
    path = Path(folder, *rest)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _text_after_turn(config: Config, tokenizer: Any) -> str:
    """Returns the text that the chat template writes after the assistant's last turn.

    If there is none, it is the text after an assistant's turn that a user's follows. The last turn
    comes first because gpt-oss ends it in <|return|>, and others in <|end|>. Returns "" if there is
    no template, or if it refuses such a conversation.
    """
    user = {"role": "user", "content": TURN_MARK}
    assistant = {"role": "assistant", "content": TURN_MARK}
    for messages in ([user, assistant], [user, assistant, user]):
        try:
            text = render(tokenizer, messages, prompt=config.prompt, is_over=True)
        except (UserError, ValueError):
            return ""
        around_turns = text.split(TURN_MARK)
        if len(around_turns) > 2 and around_turns[2].strip():
            return around_turns[2]
    return ""


def _added_token(tokenizer: Any, text: str) -> int | None:
    """Returns the id of the added token with which a text begins, apart from spaces.

    Returns None if the text begins with a piece of a word.
    """
    ids: list[int] = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"]
    if ids and ids[0] in tokenizer.added_tokens_decoder:
        return ids[0]
    return None
