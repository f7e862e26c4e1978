"""Explains a key that no setting has: a setting was misspelt, or it is a key of another framework.

No suggestion is better than one that means something else.
"""

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import yaml

TABLES = Path(__file__).with_name("other_frameworks.yaml")
PAGE = "docs/coming_from.md"
_MOST = 3  # suggestions in a message

# One of these words may belong to anything, so it is not suggested from another section.
_GENERAL = {"alpha", "before", "dir", "loss", "name", "on", "path", "r", "score", "steps", "stop"}
# Keys of these sections do not concern the policy.
_NOT_THE_POLICY = {"critic", "eval", "reference"}
_ABBREVIATIONS = {"len": "length"}

# What to write here instead of a key, as in the tables, with the frameworks that have the key.
Counterparts = dict[str | None, list[str]]


def explanation(name: str, known: Sequence[str]) -> str:
    """Returns what to write instead of an unknown key, after a space; "" if nothing is near."""
    answer = _explanation(_plain(name), known)
    if not answer and name.startswith("--"):
        return f" TRL and OpenRLHF write keys with dashes; see {PAGE}."
    return answer


def _explanation(key: str, known: Sequence[str]) -> str:
    section, word = _section(key), _last_word(key)
    is_ours = key in known and key not in {_section(k) for k in known}
    if is_ours and key not in tables()["OpenRLHF"]:  # but for the dashes of OpenRLHF
        return _did_you_mean([key])
    counterparts = _all_counterparts(key)
    if counterparts:
        return _of_counterparts(key, counterparts)
    settings = _same_word(section, word, known)
    if framework_of(section):  # its keys mean other things than ours of the same name
        return _did_you_mean(_in_sections_like(section, settings, known))
    if framework_of(key):
        return f" It looks like a key of {framework_of(key)}; see {PAGE}."
    misspelt = _misspelt(section, word, known)
    if section.partition(".")[0] in _NOT_THE_POLICY:
        return _did_you_mean([k for k in settings or misspelt if _section(k) == section])
    if settings:
        return _did_you_mean(settings)
    if section and section not in known:
        return _did_you_mean(_in_sections_like(section, misspelt, known))
    counterparts = _short_counterparts(section, word)
    if counterparts:
        return _of_counterparts(key, counterparts)
    return _did_you_mean(misspelt)


def of_section(name: str, unexplained: Sequence[str], known: Sequence[str]) -> str:
    """Returns what to say of an unknown section, after a space, and of its unexplained keys."""
    framework = framework_of(name)
    if framework is None:
        return explanation(name, known)
    some = ", ".join(unexplained[:_MOST])
    if len(unexplained) > _MOST:
        some += f" and {len(unexplained) - _MOST} more"
    return f" It looks like a section of {framework}; {PAGE} has no counterpart of {some}."


def framework_of(section: str) -> str | None:
    """Returns the framework that has this section, or a section around it, else None."""
    names = _plain(section).split(".")
    for length in range(len(names), 0, -1):
        framework = _file()["sections"].get(".".join(names[:length]))
        if framework:
            return framework
    return None


def is_counterpart(name: str) -> bool:
    """Returns whether the tables have this key of another framework."""
    return bool(_exact_counterparts(_plain(name)))


def is_misspelt_section(name: str, known: Sequence[str]) -> bool:
    """Returns whether the name of a section is nearly that of one of ours."""
    key = _plain(name)
    if key in known or framework_of(key) is not None:
        return False
    return any(_is_misspelt(key, k, known) for k in known if "." not in k)


@cache
def tables() -> dict[str, dict[str, str | None]]:
    """Returns the keys of each framework and what to write here, as in other_frameworks.yaml."""
    return {name: keys for name, keys in _file().items() if name != "sections"}


@cache
def _file() -> dict[str, dict[str, str | None]]:
    content: dict[str, dict[str, str | None]] = yaml.safe_load(TABLES.read_text())
    return content


def _plain(name: str) -> str:
    """Returns the key without the dashes of a command line and the plus signs of Hydra."""
    return name.lstrip("-+").replace("-", "_")


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]


def _without_markdown(text: str) -> str:
    """Returns the plain text: "`data.eval` ([words](page.md))" becomes "data.eval (words)"."""
    before, *links = text.replace("`", "").replace("[", "").split("](")
    return before + "".join(link.partition(")")[2] for link in links)


def _exact_counterparts(key: str) -> Counterparts:
    found: Counterparts = {}
    for framework, keys in tables().items():
        if key in keys:
            found.setdefault(keys[key], []).append(framework)
    return found


def _all_counterparts(key: str) -> Counterparts:
    """Returns the counterparts of the key, and of longer keys if it has no section.

    For example train_batch_size is OpenRLHF's, and data.train_batch_size is verl's.
    """
    exact = _exact_counterparts(key)
    if not exact or "." in key or any(c and _last_word(c) == key for c in exact):
        return exact
    joined = dict(exact)
    for counterpart, frameworks in _short_counterparts("", key).items():
        if counterpart is not None:
            joined[counterpart] = [*dict.fromkeys([*joined.get(counterpart, []), *frameworks])]
    return joined if len(joined) <= _MOST else exact


def _short_counterparts(section: str, word: str) -> Counterparts:
    """Returns the counterparts of keys that end with the word, which stands in one of our sections.

    `trainer.lr` is not the critic's. A name of three words, such as kl_loss_coef, has one meaning.
    """
    if "_" not in word and word not in ("lr", "n"):
        return {}
    found: Counterparts = {}
    for framework, keys in tables().items():
        for key, counterpart in keys.items():
            if _last_word(key) == word and framework not in found.get(counterpart, []):
                found.setdefault(counterpart, []).append(framework)
    if section:
        here: Counterparts = {}
        for counterpart, frameworks in found.items():
            if counterpart is not None and counterpart.lstrip("`").startswith(f"{section}."):
                here[counterpart] = frameworks
        is_specific = word.count("_") >= 2 and len(found) == 1
        if here or not is_specific:
            return here
    return found if len(found) <= _MOST else {}


def _of_counterparts(key: str, counterparts: Counterparts) -> str:
    sentences = []
    for counterpart, frameworks in counterparts.items():
        source = f" Coming from {' or '.join(frameworks)}: "
        if counterpart is None:
            sentences.append(f"{source}there is no counterpart.")
        elif _last_word(counterpart) == _last_word(key):
            sentences.append(f" Did you mean {counterpart}?")
        else:
            sentences.append(f"{source}{_without_markdown(counterpart)}.")
    return "".join(sentences) + f" See {PAGE}."


def _did_you_mean(settings: Sequence[str]) -> str:
    if not 0 < len(settings) <= _MOST:
        return ""
    return f" Did you mean {' or '.join(settings)}?"


def _same_word(section: str, word: str, known: Sequence[str]) -> list[str]:
    """Returns the settings whose name is the word, joined to their section or after other words.

    Those of another section are only suggested if the word is not a general one.
    """
    sections = {_section(k) for k in known}
    settings = [k for k in known if k not in sections]
    joined = [k for k in settings if "." in k and k.replace(".", "_") == word]
    if joined:
        return joined
    longer = [k for k in settings if _section(k) == section and _is_end(word, _last_word(k))]
    if longer or word in _GENERAL:
        return longer
    return _preferred(section, [k for k in settings if _last_word(k) == word], known)


def _is_end(word: str, setting: str) -> bool:
    """Returns whether words before it make it the setting: max_size is group_max_size."""
    return setting.endswith(f"_{word}") and ("_" in word or setting.count("_") == 1)


def _misspelt(section: str, word: str, known: Sequence[str]) -> list[str]:
    """Returns the settings that the word misspells, in its section or else in any section."""
    sections = {_section(k) for k in known}
    near = [k for k in known if _last_word(k) != word and _is_misspelt(word, _last_word(k), known)]
    if section:
        near = [k for k in near if k not in sections]
    inside = [k for k in near if _section(k) == section]
    return inside or _preferred(section, near, known)


def _preferred(section: str, settings: list[str], known: Sequence[str]) -> list[str]:
    """Returns the settings in a section that is spelt alike, or the setting that TRL means."""
    alike = _in_sections_like(section, settings, known)
    of_trl = [k for k in settings if tables()["TRL"].get(_last_word(k)) == k]
    return alike or of_trl or settings


def _in_sections_like(section: str, settings: list[str], known: Sequence[str]) -> list[str]:
    return [k for k in settings if _is_misspelt(section, _section(k), known)]


def _is_misspelt(given: str, meant: str, known: Iterable[str]) -> bool:
    """Returns whether each word of a name is nearly the same word of the other name."""
    if given.replace("_", "") == meant.replace("_", ""):
        return True
    words = given.split("_")
    meant_words = meant.split("_")
    if len(words) != len(meant_words):
        return False
    in_use = _words_in_use(tuple(known))
    pairs = zip(words, meant_words, strict=True)
    return all(_is_nearly(word, meant_word, in_use) for word, meant_word in pairs)


def _is_nearly(word: str, meant: str, in_use: frozenset[str]) -> bool:
    """Returns whether a word is another one but for an "s" or a slip.

    A word in use is no slip: num_samples does not mean num_samplers.
    """
    if meant in (word, f"{word}s", _ABBREVIATIONS.get(word)) or word == f"{meant}s":
        return True
    if word in in_use or len(word) < 3 or word[0] != meant[0]:
        return False
    return sorted(word) == sorted(meant) or _likeness(word, meant) >= 0.75


def _likeness(word: str, meant: str) -> float:
    return difflib.SequenceMatcher(None, word, meant).ratio()


@cache
def _words_in_use(known: tuple[str, ...]) -> frozenset[str]:
    names = [*known]
    for keys in tables().values():
        names += keys
    return frozenset(word for name in names for word in name.replace(".", "_").split("_"))
