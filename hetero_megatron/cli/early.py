"""What the first rank looks at in the first second: places that the run will write, packages that flags ask for, and
whether each split of the data has documents. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.cli.flags.parse import WHERE, Arguments, Collector, flag_name
from hetero_megatron.data import DataConfig
from hetero_megatron.data.indexed import open_indexed
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.training.config import EvaluationConfig
from hetero_megatron.utils.outputs import try_export, try_file, try_folder

if TYPE_CHECKING:
    from hetero_megatron.data.splits import SplitPaths

# Every flag that names a place to write.
OUTPUTS: dict[str, Callable[[str, str], None]] = {
    "save": try_folder, "save_hf": try_export, "save_adapter": try_export, "tensorboard_dir": try_folder,
    "wandb_save_dir": try_folder, "data_cache_path": try_folder, "dump_layers": try_folder,
    "capture_operators": try_folder, "routing_stats": try_file, "reference_logps": try_file,
    "memory_snapshot_path": try_file, "save_scores": try_file,
}  # fmt: skip
_EXPORTS = [key for key, attempt in OUTPUTS.items() if attempt is try_export]
# flag -> (module, what it is called, package)
PACKAGES = {
    "wandb_project": ("wandb", "Weights & Biases", "wandb"),
    "mlflow_experiment": ("mlflow", "MLflow", "mlflow"),
    "tensorboard_dir": ("tensorboard", "TensorBoard", "tensorboard"),
}
MOST_READ = 20_000  # documents that are counted; whoever has more, and a split that needs more, waits


def check_early(args: Arguments, parts: Collector) -> None:
    """Places and packages; of a run that is no dry run."""
    for key, attempt in OUTPUTS.items():
        parts.part(_try_output, args, key, attempt)
        parts.part(_apart, args, key)
    for key, (module, name, package) in PACKAGES.items():
        parts.part(_require_package, args, key, module, name, package)


def _try_output(args: Arguments, key: str, attempt: Callable[[str, str], None]) -> None:
    if args[key] is not None:
        attempt(args[key], flag_name(key))


def _apart(args: Arguments, key: str) -> None:
    """An export is written into an empty directory at the end: nothing else may be written there before."""
    export = args[key]
    for other_key in _EXPORTS if export is not None else ():
        other_export = args[other_key]
        if other_key == key or other_export is None:
            continue
        if Path(os.path.realpath(export)).is_relative_to(os.path.realpath(other_export)):
            problem = f"{flag_name(other_key)} {other_export} has to be empty at the end of training"
            accepted = f"a place outside {flag_name(other_key)}"
            raise UserError(problem, field=flag_name(key), value=export, accepted=accepted, where=WHERE)


def _require_package(args: Arguments, key: str, module: str, name: str, package: str) -> None:
    if args[key] is not None:
        require_package(module, name, flag_name(key), args[key], f"pip install {package}, or leave the flag out")


def require_package(module: str, name: str, field: str, value: object, accepted: str) -> None:
    """UserError if a module cannot be imported; it is not imported."""
    try:
        is_installed = find_spec(module) is not None
    except (ImportError, ValueError):  # the package that holds it is missing, or is None in sys.modules
        is_installed = False
    if not is_installed:
        raise UserError(f"{name} is not installed", field=field, value=value, accepted=accepted)


def check_offload(plan: Plan) -> None:
    """DeepSpeed, where a stage's optimizer is in host memory."""
    if any(stage.optimizer.offload for pipeline in plan.pipelines for stage in pipeline.stages):
        accepted = "pip install deepspeed, or offload: false"
        require_package("deepspeed", "DeepSpeed", "optimizer.offload", True, accepted)


def check_data(data: DataConfig | None, evaluation: EvaluationConfig, trains: bool, parts: Collector) -> None:
    """Files are there, of a kind that is read, and no split that is asked for is empty."""
    if data is None or data.mock_data:
        return
    for split, is_used in enumerate((trains, evaluation.iterations > 0, evaluation.iterations > 0)):
        if is_used:
            parts.part(_check_split, data, split)


def _check_split(data: DataConfig, which: int) -> None:
    from hetero_megatron.data.splits import check_stream, find_split

    split = find_split(data, which)
    if split is not None and data.reads_stream:
        check_stream(split, data.sft)
    for path in split.paths if split is not None else ():
        assert split is not None
        count = _count(data, split, path)
        if count is not None:
            split.documents(count, path, data.items if data.sft else "document")


def _count(data: DataConfig, split: SplitPaths, path: str) -> int | None:
    """Documents of a path; None: enough for the split, or too many to be counted here, or not known of a stream, of
    which the first is read."""
    from hetero_megatron.data.chat.records import HUB, find_records
    from hetero_megatron.data.corpus import find_corpus, indexed_prefix, is_indexed
    from hetero_megatron.data.sources.text import STDLIB

    share = split.shares[split.which]
    limit = min(MOST_READ, math.ceil(2 / share)) if share else MOST_READ
    if data.sft and path.startswith(HUB):
        require_package("datasets", "datasets", split.flag, path, "pip install 'hetero-megatron[data]'")
        return None
    if path != STDLIB and is_indexed(path):
        return None if data.sft else open_indexed(indexed_prefix(path), split.flag).num_documents
    if data.reads_stream:
        limit = 1
    if data.sft:
        documents = sum(1 for _ in islice(find_records(path, split.flag).read(), limit))
    else:
        documents = sum(1 for _ in islice(find_corpus(path, data.json_keys, split.flag).documents(), limit))
    return documents if documents < limit and not data.reads_stream else None
