"""Uploads a trained model to the Hugging Face hub:  bash launch.sh push RUN owner/name [--checkpoint step_000040]

RUN is a run folder (its final/, or the checkpoint that is named) or one of its folders that hold a model. What goes up
is what transformers or peft load, and the model card: a checkpoint's optimizer state, the critic and commit.json stay
here. A README.md that is there already is taken as it is; otherwise it is made from the run (report/model_card.py).
All files become one commit on the hub, or none does. The token is where huggingface_hub looks for it: HF_TOKEN, or what
`hf auth login` has stored. Left out: pull requests, branches, data sets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import exits
from common.errors import Retryable, UserError
from common.run_folder import BEST, CHECKPOINTS, COMMIT, FINAL, checkpoints
from launcher.evaluation.target import is_run
from report.escape import strip_escapes
from report.model_card import ADAPTERS, FILE, model_card, trained

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_STAYS = {"trainer": "DeepSpeed's state", "critic": "the value model", COMMIT: "digests of the whole checkpoint"}


@dataclass(frozen=True)
class Upload:
    """What goes to the hub. A card is given where the folder has none."""

    folder: Path
    files: list[Path]  # relative to the folder
    card: str | None

    def sizes(self) -> list[tuple[str, int]]:
        """(name, bytes) of everything, in the order of names."""
        found = [(str(name), (self.folder / name).stat().st_size) for name in self.files]
        return sorted([*found, *([(FILE, len(self.card.encode()))] if self.card is not None else [])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises UserError or Retryable."""
    parser = argparse.ArgumentParser(prog="launch.sh push", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run folder such as runs/quickstart, or a folder in it that holds a model")
    parser.add_argument("name", metavar="owner/name", help="of the model on the hub; made if it is not there")
    parser.add_argument("--checkpoint", metavar="step_N", help="this checkpoint instead of final/")
    parser.add_argument("--private", action="store_true", help="only its owners see it")
    parser.add_argument("--dry-run", action="store_true", help="say what would go where, and send nothing")
    given = parser.parse_args(arguments)
    require_name(given.name)
    found = upload(model_folder(Path(given.run).expanduser(), given.checkpoint))
    print(listing(found, given.name, given.private), flush=True)
    if given.dry_run:
        print("tandem: nothing was sent (--dry-run)")
    else:
        print(push(found, given.name, given.private))


def require_name(name: str) -> None:
    """Raises UserError for anything but owner/name, with letters that the hub takes."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if name.count("/") != 1:
        last = name.rsplit("/", 1)[-1] or "model"
        raise UserError(f"{name!r} is not owner/name, as the hub's names are; write for example my-name/{last}")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is no name for the hub: {error}") from None


def model_folder(run: Path, checkpoint: str | None) -> Path:
    """The folder with the model. Raises UserError that says what there is instead."""
    if not run.is_dir():
        raise UserError(f"{run} is no folder; name a run folder such as runs/quickstart, or a folder in it")
    if checkpoint is not None:
        folder = run / CHECKPOINTS / checkpoint
        if not folder.is_dir():
            raise UserError(f"{run} has no checkpoint {checkpoint!r}; it has {_there(run)}")
        return folder
    if not is_run(run):
        if not any((run / name).is_file() for name in ("config.json", ADAPTERS)):
            raise UserError(f"{run} holds neither a run nor a model: it has no config.json and no {ADAPTERS}")
        return run
    if not (run / FINAL).is_dir():
        raise UserError(
            f"{run} has no final/ yet, which a run writes at its end; it has {_there(run)}. "
            "A checkpoint goes up with --checkpoint step_N"
        )
    return run / FINAL


def _there(run: Path) -> str:
    """ "step_000030, step_000060 and best/" """
    names = [folder.name for folder in checkpoints(run)]
    names += [f"{name}/" for name in (BEST, FINAL) if (run / name).is_dir()]
    return " and ".join(", ".join(names).rsplit(", ", 1)) or "none: nothing is saved yet (trainer.save_steps)"


def upload(folder: Path) -> Upload:
    """Everything in the folder that a user of the model needs. Raises UserError if no card can be made from the run."""
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [path for path in inside if path.parts[0] not in _STAYS and not path.name.startswith(".")]
    return Upload(folder, files, None if Path(FILE) in files else _card(folder))


def _card(folder: Path) -> str | None:
    """Made from the run that this folder lies in; None where that cannot be known."""
    run = next((parent for parent in folder.resolve().parents[:2] if is_run(parent)), None)
    try:
        version = json.loads((folder / COMMIT).read_text())["policy_version"]
        return model_card(trained(run, folder, version)) if run else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = strip_escapes(error)[:300]
        raise UserError(f"no model card can be made of {run}: {reason}. Write {folder / FILE} yourself") from error


def listing(found: Upload, name: str, private: bool) -> str:
    """Files, sizes and target, for a person."""
    sizes = found.sizes()
    lines = [f"  {_size(size):>9}  {strip_escapes(file)}" for file, size in sizes]
    stays = [f"{part} ({why})" for part, why in _STAYS.items() if (found.folder / part).exists()]
    card = " (made from the run)" if found.card is not None else ""
    has_card = any(file == FILE for file, _ in sizes)
    return "\n".join(
        [
            f"tandem: {found.folder} → {_endpoint()}/{name}, {'private' if private else 'public if it is new'}",
            *lines,
            f"  {_size(sum(size for _, size in sizes)):>9}  in {len(sizes)} files",
            f"tandem: model card: {FILE}{card}" if has_card else f"tandem: no model card; write {found.folder / FILE}",
            *([f"tandem: stays here: {', '.join(stays)}"] if stays else []),
        ]
    )


def _size(size: int) -> str:
    """3087467144 → "3.09 GB" """
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def push(found: Upload, name: str, private: bool) -> str:
    """Uploads and returns the address of the commit. Raises UserError, or Retryable where another try may do."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if constants.is_offline_mode():
        set_ones = [key for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(key)]
        raise UserError(f"{' and '.join(set_ones)} is set, so nothing is sent; write: unset {' '.join(set_ones)}")
    if get_token() is None:
        raise UserError(
            "no token for the hub; log in with .venv/bin/hf auth login, or set HF_TOKEN to a token that may write "
            "(https://huggingface.co/settings/tokens)"
        )
    try:
        return _send(HfApi(), found, name, private)
    except HfHubHTTPError as error:
        raise _explained(error, error.response.status_code, name) from None
    except ValueError as error:  # metadata that the hub does not take, a file that its storage refuses
        raise UserError(f"the hub refuses the upload: {strip_escapes(error)[:500]}") from None
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of hf_xet, and of a large file that failed
        cause = error.__cause__ or error
        if isinstance(cause, HfHubHTTPError):
            raise _explained(cause, cause.response.status_code, name) from None
        reason = strip_escapes(cause)[:300]
        raise Retryable(f"{_endpoint()} was not reached, or the connection broke: {reason}. Start again") from None


def _send(api: HfApi, found: Upload, name: str, private: bool) -> str:
    from huggingface_hub import CommitOperationAdd

    api.create_repo(name, private=private or None, exist_ok=True)
    if private and not api.model_info(name).private:
        raise UserError(f"{name} exists on the hub and is public; choose another name, or make it private there first")
    operations = [CommitOperationAdd(str(file), str(found.folder / file)) for file in found.files]
    if found.card is not None:
        operations.append(CommitOperationAdd(FILE, found.card.encode()))
    return str(api.create_commit(name, operations, commit_message="Upload a model trained with Tandem").commit_url)


def _explained(error: Exception, status: int, name: str) -> Exception:
    """What to raise instead of an answer of the hub that is an error."""
    said = strip_escapes(error)[:300]
    if status == 401:
        return UserError(f"the hub does not know this token (401): .venv/bin/hf auth login. The hub said: {said}")
    if status in (402, 403):
        return UserError(
            f"this token may not write to {name} ({status}); use a token with the role “write”, and a name whose owner "
            f"is you or your organization. The hub said: {said}"
        )
    if status == 429 or status >= 500:
        return Retryable(f"the hub is in trouble ({status}): {said}. Start again later")
    return UserError(f"the hub refuses the upload ({status}): {said}")


if __name__ == "__main__":
    sys.exit(exits.run("push", main))
