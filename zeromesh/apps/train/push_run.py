"""An exported run on the Hugging Face Hub, with a card that has the run's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeromesh import __version__
from zeromesh.apps.train.model import Transformer, language_model
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.base.files import read_text, write_text
from zeromesh.base.requirements import imported
from zeromesh.base.words import scaled_text

CARD = "README.md"


def require_hub(name: str) -> Any:
    """Return the API of the Hub; raise ValueError if its package, a valid name or a token is missing."""
    purpose = "--hub needs the package huggingface_hub"
    huggingface_hub, utilities = (imported(module, purpose) for module in ("huggingface_hub", "huggingface_hub.utils"))
    try:
        utilities.validate_repo_id(name)
    except utilities.HFValidationError as error:
        raise ValueError(f"--hub = {name!r} is no name of a repository, such as org/model: {error}") from None
    api = huggingface_hub.HfApi()
    if (api.token or huggingface_hub.get_token()) is None:
        raise ValueError("--hub: no token of the Hugging Face Hub is stored; hf auth login, or set HF_TOKEN")
    return api


def push(api: Any, folder: Path, name: str, public: bool) -> str:
    """Upload a folder, and return the address of the repository; raise ValueError if the Hub refuses it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        address = str(api.create_repo(name, private=not public, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload a run of ZeroMesh")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"--hub: {name} could not be written ({error}); the export is whole in {str(folder)!r}: "
            f"hf upload {name} {folder} tries again"
        ) from None
    return address


def write_card(run: RunFolder, folder: Path, name: str) -> None:
    """Write the card of the model: where it comes from, and what the run's report measured."""
    settings, report = run.settings(), {}
    if run.report.is_file():
        report = json.loads(read_text(run.report))
    language = language_model(settings)
    head = ["library_name: peft" if settings.lora else "library_name: transformers", "pipeline_tag: text-generation"]
    if isinstance(language, Transformer):
        head.append(f"base_model: {settings.huggingface.path if settings.huggingface else ''}")
    rows = [("steps", report.get("steps")), ("tokens", report.get("tokens")), ("parameters", report.get("parameters"))]
    lines = [f"| {what} | {scaled_text(value)} |" for what, value in rows if value is not None]
    for what, key in (
        ("training loss, nats per token", "training_loss"),
        ("held-out loss, nats per token", "validation_loss"),
        ("held-out bits per byte", "bits_per_byte"),
    ):
        if report.get(key) is not None:
            lines.append(f"| {what} | {report[key]:.4f} |")
    table = ["| figure | value |", "|---|---|", *lines] if lines else ["The run has not ended, and has no figures yet."]
    text = ["---", *head, "---", "", f"# {name}", "", f"Trained with ZeroMesh {__version__} (`zeromesh train`).", ""]
    write_text(folder / CARD, "\n".join([*text, *table]) + "\n")
