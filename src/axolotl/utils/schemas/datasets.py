"""Top-level options about the data."""

from __future__ import annotations

from typing import Annotated, Literal

from axolotl.utils.schemas.base import REQUIRED, Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Float, Int, Text, TextOrList


class DatasetConfig(Options):
    """One entry of `datasets:`."""

    path: Text = option(REQUIRED, "Data set of the hub, or a local file or directory.", min_length=1)
    name: Text | None = option(None, "Configuration of the data set, where it has several.")
    split: Text | None = option(None, "Split to use, slices such as `train[:1000]` included.", null_means="train")
    type: Text | None = option(
        None, "Import path of the transform that makes prompts; without one the rows already hold `prompt`."
    )
    data_files: TextOrList | None = option(None, "Files of the data set to read, where not all of them.")
    ds_type: Annotated[Literal["json", "csv", "parquet", "arrow"], AsWord] | None = option(
        None, "Format of local files; told from their names when unset."
    )
    revision: Text | None = option(None, "Branch, tag or commit of the data set on the hub.")


class DataOptions(Options):
    datasets: list[DatasetConfig] = option(list, "Where the prompts come from; several entries are put together.")
    dataset_prepared_path: Text | None = option(None, "Directory that caches the tokenised prompts between runs.")
    skip_prepare_dataset: Bool = option(
        False, "Tokenise the prompts in memory at every start, and keep no cache of them."
    )
    streaming: Bool = option(False, "Read the data set while training instead of beforehand.")
    val_set_size: Float = option(0.0, "Share of the rows (below 1) or number of rows set aside for evaluation.", ge=0.0)
    sequence_len: Int = option(512, "The most tokens a prompt may have.", ge=1)
    long_prompts: Annotated[Literal["drop", "error", "truncate_left"], AsWord] = option(
        "drop", "What happens to a prompt over the limit."
    )
