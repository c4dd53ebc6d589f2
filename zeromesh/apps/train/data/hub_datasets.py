"""Data sets of the Hugging Face Hub: a name becomes a local folder, which is kept."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from zeromesh.apps.train.data import file_kinds
from zeromesh.base.requirements import imported
from zeromesh.checkpoint.weights.pretrained import MAIN, reason_of

# A configuration and a split may follow, as in "org/name:config:split".
DATASET_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+){0,2}")
# A name that ends so is one of a file that is not there.
FILE_ENDS = (*file_kinds.ENDINGS, *file_kinds.READ_ENDINGS)


def is_dataset_id(name: str) -> bool:
    """Return whether a name is one of a data set of the Hub, and no local file."""
    return bool(DATASET_ID.fullmatch(name)) and not name.lower().endswith(FILE_ENDS) and not Path(name).exists()


@functools.cache
def dataset_folder(name: str, revision: str = MAIN) -> Path:
    """Return the folder of a split of a data set of the Hub, which is written beside the cache of ``datasets``.

    Raises:
        ValueError: it is not there yet and cannot be fetched.
    """
    needs = "is no local file, and a data set of the Hub needs the package datasets"
    datasets = imported("datasets", f"data source {name!r} {needs}")
    source, config, split = (*name.split(":"), "", "")[:3]
    cache_name = name if revision == MAIN else f"{name}@{revision}"
    folder = Path(datasets.config.HF_DATASETS_CACHE, "zeromesh", re.sub(r"[/:]", "--", cache_name))
    if folder.is_dir():
        return folder
    try:
        dataset: Any = datasets.load_dataset(source, config or None, split=split or "train", revision=revision)
    except Exception as error:  # many types, of several packages
        raise ValueError(
            f"data source {name!r} does not exist here, and the Hugging Face Hub did not give a data set of this name "
            f"({reason_of(error)}); name a file, a folder or a pattern, or, of a data set, its configuration and its "
            f"split, as in {source}:CONFIG:SPLIT; without a network only data sets are there that were used before, in "
            "the folder that HF_HOME names"
        ) from None
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    dataset.save_to_disk(str(draft))
    # Another rank or run may have been as quick.
    if not folder.is_dir():
        draft.rename(folder)
        return folder
    return draft
