"""Defines where a completion ends, and how its tokens become the text that rewards, tools and people read.

A completion ends at the model's own end tokens (of generation_config.json, of the tokenizer, and the one that the chat
template writes after a turn, which may be neither if a base model has a chat template) and at sampler.stop. The own end
tokens are not text. Other special tokens are kept if a function looks for them: a tag such as <answer> may be one.
"""

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
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

_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")  # roles of special tokens that pad, begin and end texts
_TAG = re.compile(r"(<|\[)/?([A-Za-z_]\w*)(>|\])")


@dataclass(frozen=True)
class Ends:
    """The ends of a completion. own: the model's end tokens, which are not text; ids: these and sampler.stop's."""

    own: tuple[int, ...]
    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """A decoder from token ids to texts, without the dropped tokens."""

    tokenizer: Any
    dropped: frozenset[int]
    kept: tuple[str, ...] = ()  # special tokens that are kept, for messages

    def __call__(self, ids: Sequence[Sequence[int]]) -> list[str]:
        left = [[i for i in one if i not in self.dropped] for one in ids]
        return list(self.tokenizer.batch_decode(left, skip_special_tokens=False))


def stop_conditions(config: Config, tokenizer: Any) -> Ends:
    """Returns the ends of a completion. Raises UserError if there is none, or for a sampler.stop that is no token."""
    behind = _behind_a_turn(config, tokenizer)
    own = [*_named_ends(config), tokenizer.eos_token_id, _added(tokenizer, behind)]
    own = list(dict.fromkeys(int(i) for i in own if i is not None))
    if not own and not config.sampler.stop:
        raise UserError(f"{config.model.path} names no end-of-sequence token; set eos_token_id in its config")
    more, texts = list[int](), list[str]()
    for stop in config.sampler.stop:
        if isinstance(stop, int) and not 0 <= stop < len(tokenizer):
            raise UserError(f"sampler.stop: {stop} is no token, the tokenizer has {len(tokenizer)}; remove it")
        token = stop if isinstance(stop, int) else tokenizer.added_tokens_encoder.get(stop)
        more += [] if token is None else [token]
        texts += [stop] if token is None and isinstance(stop, str) else []
    return Ends(tuple(own), tuple(dict.fromkeys([*own, *more])), tuple(texts))


def _named_ends(config: Config) -> list[int | None]:
    """Returns the end tokens of the model's generation_config.json."""
    given = (model_json(config.model.path, "generation_config.json", config.model.revision) or {}).get("eos_token_id")
    return list(given) if isinstance(given, list | tuple) else [given]


def unwritten_end(config: Config, tokenizer: Any) -> str | None:
    """Returns advice if the tokenizer cannot write the chat template's end of a turn as one token, else None."""
    behind = _behind_a_turn(config, tokenizer).lstrip()
    mark = re.match(r"<\S+?>", behind)
    if mark is None or _added(tokenizer, behind) is not None or mark.group() in config.sampler.stop:
        return None
    return (
        f"the chat template ends a turn with {mark.group()}, which is no token of this tokenizer: the model cannot end "
        f"there. Take a template of the model's own, or set sampler.stop=['{mark.group()}']"
    )


def reader(config: Config, tokenizer: Any) -> Reader:
    """Returns the reader that rewards.special_tokens selects."""
    own = set(stop_conditions(config, tokenizer).own)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    if config.rewards.special_tokens == "keep":
        return Reader(tokenizer, frozenset(own))
    kept = dict[int, str]()
    if config.rewards.special_tokens == "auto":
        others = special - own - {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
        kept = _looked_for({i: str(tokenizer.convert_ids_to_tokens(i)) for i in others}, config)
    return Reader(tokenizer, frozenset((special - set(kept)) | own), tuple(kept.values()))


def logged_reader(config: Config, tokenizer: Any) -> Reader:
    """Returns the reader, and logs the kept special tokens and a missing end token."""
    made = reader(config, tokenizer)
    if made.kept:
        say(f"texts keep the special tokens {', '.join(made.kept)} (rewards.special_tokens)")
    if advice := unwritten_end(config, tokenizer):
        say(advice)
    ends, named = stop_conditions(config, tokenizer).own, _named_ends(config)
    if lacking := [i for i in ends if i not in (*named, tokenizer.eos_token_id)]:
        say(
            f"completions also end at {tokenizer.convert_ids_to_tokens(lacking[0])}, which the model's own "
            f"generation_config.json lacks, and so that of final/: before you serve it, write there "
            f'"eos_token_id": {json.dumps(list(ends))}'
        )
    return made


def _looked_for(tokens: dict[int, str], config: Config) -> dict[int, str]:
    """Returns tags whose other half is a token, too, and tokens in the file of a reward, a tool or an environment."""
    halves = {t: m for t in tokens.values() if (m := _TAG.fullmatch(t))}
    others = {t: f"{m[1]}{'' if '/' in t[:2] else '/'}{m[2]}{m[3]}" for t, m in halves.items()}
    sources = list(_sources(config))
    return {
        i: token
        for i, token in sorted(tokens.items())
        if others.get(token) in others or any(token in source for source in sources)
    }


def _sources(config: Config) -> Iterator[str]:
    """Yields the source texts of the user's functions, without importing them: their own process does that."""
    names = [*map(functions.unnamed, config.rewards.reward_funcs)]
    specs: Iterable[str] = [BUILT_IN.get(name, name) for name in names]
    if not JUDGES.keys().isdisjoint(names):  # they look for the marks of thoughts
        specs = [*specs, f"{behind_thoughts.__module__}.{behind_thoughts.__name__}"]
    given = [one.rollout for one in config.of_sources.values()]
    of_rollouts = [s for r in given for s in [*r.tools, r.environment, r.agent] if isinstance(s, str)]
    for spec in [*specs, *of_rollouts]:
        place, _ = functions.parse(spec, spec)
        try:
            path = place if isinstance(place, Path) else _file_of(place)
            yield path.read_text(encoding="utf-8", errors="replace") if path else ""
        except OSError:
            continue  # the process that imports the file reports the error


def _file_of(module: str) -> Path | None:
    first, *rest = module.split(".")
    found = importlib.util.find_spec(first)
    if found is None or not found.submodule_search_locations:
        return Path(found.origin) if found and found.origin else None
    inside = Path(next(iter(found.submodule_search_locations)), *rest)
    return next((p for p in (inside.with_suffix(".py"), inside / "__init__.py") if p.is_file()), None)


def _behind_a_turn(config: Config, tokenizer: Any) -> str:
    """Returns the text that the chat template writes after the assistant's last turn; "" if it cannot be seen.
    If that is empty: the text before the user's next. (gpt-oss ends its last in <|return|>, others in <|end|>.)"""
    conversation = [{"role": role, "content": TURN_MARK} for role in ("user", "assistant", "user")]
    for messages in (conversation[:2], conversation):
        try:
            text = render(tokenizer, messages, prompt=config.prompt, is_over=True)
        except (UserError, ValueError):
            return ""  # no template, or one that refuses such a conversation
        behind = "".join(text.split(TURN_MARK)[2:3])
        if behind.strip():
            return behind
    return ""


def _added(tokenizer: Any, text: str) -> int | None:
    """Returns the token at the beginning of a text if it is an added token (not a piece of a word), else None."""
    ids = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1]
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
