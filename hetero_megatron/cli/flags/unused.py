"""Flags without effect: checks each flag's ``needs`` against the command line.

Defaults that depend on other flags (dtype, tokenizer) are already resolved. Conditions that are not flags are facts
about the data, determined here.
"""

from __future__ import annotations

from hetero_megatron.cli.flags.flag import Flag, Need
from hetero_megatron.cli.flags.parse import WHERE, Arguments, together
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.data import DataConfig
from hetero_megatron.data.config import SPLITS
from hetero_megatron.errors import UserError

FILES, KEYED = "data files", "a *.jsonl, *.parquet or *.arrow corpus"


def check_use(args: Arguments, data: DataConfig | None) -> None:
    """Refuse flags that have no effect; harmless ones get a notice.

    Args:
        data: None: a dry run without data; any kind of data is assumed.

    Raises:
        UserError: lists all such flags.
    """
    args.facts |= _facts(args) | ({FILES, KEYED} if data is None else _data_facts(data))
    errors: list[UserError] = []
    for flag in ALL:
        if flag.key not in args.given or flag.key in args.failed or args[flag.key] is False:
            continue
        for need in flag.needs:
            if any(_holds(condition, args) for condition in need.any_of):
                continue
            without = " or ".join(need.any_of)
            if need.harmless:
                args.idle.append((flag.name, f"without {without} there is nothing for it to change"))
            else:
                errors.append(_error(flag, args, without, need))
            break
    if errors:
        raise together(errors)


def _error(flag: Flag, args: Arguments, without: str, need: Need) -> UserError:
    value = args[flag.key]
    shown = "given" if value is True else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    accepted = f"{without} beside it, or leave the flag out"
    return UserError(f"has no effect without {without}", field=flag.name, value=shown, accepted=accepted, where=WHERE)


def _holds(condition: str, args: Arguments) -> bool:
    name, _, wanted = condition.partition(" ")
    if not name.startswith("--"):
        return condition in args.facts
    key = name[2:].replace("-", "_")
    if key in args.failed:
        return True
    value = args[key]
    return str(value) == wanted if wanted else bool(value)


def _facts(args: Arguments) -> set[str]:
    """Facts that follow from several flags, or from values other than off and 0."""
    meshes = args["hetero_process_meshes"] or ()
    holds = {
        "a learning rate that decays": args["lr_decay_style"] != "constant",
        "a dynamic loss scale": args["loss_scale"] is None,
        "context parallelism": args["context_parallel_size"] > 1 or any(size > 1 for size in meshes[1::5]),
        "pipeline parallelism": args["pipeline_model_parallel_size"] > 1 or bool(meshes),
    }
    return {fact for fact, true in holds.items() if true}


def _data_facts(data: DataConfig) -> set[str]:
    from hetero_megatron.data.corpus import may_have_keys

    if data.mock_data:
        return set()
    words = [word for group in (data.data_path, *map(data.paths_of, SPLITS)) for word in group or ()]
    return {FILES} | ({KEYED} if any(map(may_have_keys, words)) else set())
