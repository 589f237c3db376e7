"""``hetero-megatron testbed run | status | clean | fault``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero_megatron.cli.arguments import read_number
from hetero_megatron.cli.output import print_json
from hetero_megatron.cluster import load_cluster, quantity
from hetero_megatron.errors import UserError
from hetero_megatron.testbed import faults, machine, process, state
from hetero_megatron.testbed.launch import Launcher, LaunchOptions, find_command
from hetero_megatron.testbed.settings import CHIPS, LINKS, decide
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import from_data

USAGE = """usage: hetero-megatron testbed COMMAND ...

  run --cluster C [--chips clock|soft|none] [--links namespaces|paced|none]
      [--memory-limit] [--output rank0|all] [--log-dir DIR] [--grace SECONDS] -- CMD ...
               run CMD once per rank of a heterogeneous cluster that is emulated on this machine
  status [--json]
               the testbeds that run, and what dead ones left
  clean [--json]
               remove what testbeds left that ended without cleaning up (those that run are not touched)
  fault [--testbed ID] FAULT
               kill RANK | freeze RANK | thaw RANK | slow-chip RANK SPEED
               cut NODE NODE | slow-link NODE NODE RATE | mend NODE NODE
"""
_RUN = {"--cluster": "", "--chips": "", "--links": "", "--output": "rank0", "--log-dir": "", "--grace": "10"}
_SWITCHES = ("--memory-limit",)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; for ``run``, the command's."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    commands = {"run": _run, "status": _status, "clean": _clean, "fault": _fault}
    if words[0] not in commands:
        raise UserError("no such command", field="testbed", value=words[0], accepted=", ".join(commands))
    return commands[words[0]](words[1:])


def _run(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    values, switches, command = _parse_run(words)
    if not values["--cluster"]:
        raise UserError("a cluster file is needed", field="--cluster", accepted="--cluster FILE")
    cluster = load_cluster(values["--cluster"])
    options = LaunchOptions(
        command=find_command(command),
        grace=_seconds(values["--grace"]),
        output=_choice("--output", values["--output"], ("rank0", "all")),
        log_dir=_folder("--log-dir", values["--log-dir"]) if values["--log-dir"] else None,
    )
    chips = _choice("--chips", values["--chips"], CHIPS) if values["--chips"] else None
    links = _choice("--links", values["--links"], LINKS) if values["--links"] else None
    settings = decide(cluster, machine.examine(), chips, links, "--memory-limit" in switches)
    return Launcher(settings, options).run()


def _parse_run(words: list[str]) -> tuple[dict[str, str], set[str], list[str]]:
    """Flags up to ``--``, and the command after it."""
    values = dict(_RUN)
    switches: set[str] = set()
    while words:
        word = words.pop(0)
        if word == "--":
            return values, switches, words
        name, equals, value = word.partition("=")
        if name in _SWITCHES and not equals:
            switches.add(name)
        elif name in values:
            if not equals and (not words or words[0] == "--"):
                raise UserError("a value is missing", field=name)
            values[name] = value if equals else words.pop(0)
        else:
            accepted = ", ".join([*_RUN, *_SWITCHES]) + ", and the command after --"
            raise UserError("unknown flag", field="testbed run", value=word, accepted=accepted)
    return values, switches, []


def _folder(field: str, name: str) -> Path:
    path = Path(name).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
        raise UserError(problem, field=field, value=name, accepted="a folder with write permission") from None
    return path


def _choice(field: str, value: str, accepted: Sequence[str]) -> str:
    if value not in accepted:
        raise UserError("unknown choice", field=field, value=value, accepted=", ".join(accepted))
    return value


def _seconds(text: str) -> float:
    return _number("--grace", text, "seconds, 0 or more", 0.0)


def _number(field: str, text: str, accepted: str, least: float) -> float:
    try:
        value = read_number(float, text)
    except ValueError as error:
        raise UserError(str(error), field=field, value=text, accepted=accepted) from None
    if not least <= value < 1e9:
        raise UserError("out of range", field=field, value=text, accepted=accepted)
    return value


def _json_only(words: list[str]) -> bool:
    for word in words:
        if word != "--json":
            raise UserError("unknown flag", field="testbed", value=word, accepted="--json")
    return bool(words)


def _status(words: list[str]) -> int:
    as_json = _json_only(words)
    testbeds = [{"id": t.id, "alive": t.alive, **t.record()} for t in state.all_testbeds()]
    live_ids = {entry["id"] for entry in testbeds if entry["alive"]}
    stray = sorted(pid for pid, directory in process.marked().items() if Path(directory).name not in live_ids)
    if as_json:
        print_json({"testbeds": testbeds, "processes_of_dead_testbeds": stray})
        return 0
    for entry in testbeds:
        if not entry["alive"]:
            print(f"{entry['id']}: dead; remove what it left: hetero-megatron testbed clean")
            continue
        print(f"{entry['id']}: chips {entry.get('chips')}, links {entry.get('links')}, {entry.get('cluster')}")
        for rank in entry.get("ranks", []):
            process_status = process.status(rank["pid"]) if rank["pid"] else None
            state_text = f"pid {rank['pid']} ({process_status.state})" if process_status else "not running"
            print(f"  rank {rank['rank']}: {rank['node']}, {rank['chip']}, core {rank['core']}, {state_text}")
        for node in entry.get("nodes", []):
            if node["namespace"]:
                look = f"nsenter --net={node['namespace']} ip addr"
                print(f"  node {node['name']}: {node['address']}, to look inside: {look}")
    if stray:
        print(f"processes of dead testbeds: {', '.join(map(str, stray))}")
    if not testbeds and not stray:
        print("no testbed is running, and none left anything")
    return 0


def _clean(words: list[str]) -> int:
    as_json = _json_only(words)
    removed = state.clean_dead()
    if as_json:
        print_json({"removed": removed})
        return 0
    for entry in removed:
        processes = plural(len(entry["processes"]), "process", "processes")
        print(f"{entry['testbed']}: removed; {processes}, {plural(len(entry['cgroups']), 'cgroup')}")
    if not removed:
        print("nothing was left")
    return 0


def _fault(words: list[str]) -> int:
    name = None
    if words[:1] == ["--testbed"]:
        if len(words) < 2:
            raise UserError("a value is missing", field="--testbed")
        name, words = words[1], words[2:]
    counts = {"kill": 1, "freeze": 1, "thaw": 1, "slow-chip": 2, "cut": 2, "slow-link": 3, "mend": 2}
    if not words or words[0] not in counts:
        value = words[0] if words else "none"
        raise UserError("no such fault", field="fault", value=value, accepted=", ".join(counts))
    kind, values = words[0], words[1:]
    if len(values) != counts[kind]:
        parts = [part.strip() for line in USAGE.splitlines() for part in line.split("|")]
        usage = next(part for part in parts if part.startswith(f"{kind} "))
        raise UserError("wrong number of arguments", field=f"fault {kind}", value=" ".join(values), accepted=usage)
    testbed = state.live_testbed(name)
    if kind in ("kill", "freeze", "thaw", "slow-chip"):
        if not values[0].isdecimal():
            raise UserError("not a rank", field="rank", value=values[0], accepted="a whole number, counted from 0")
        rank = int(values[0])
        if kind == "slow-chip":
            message = faults.slow_chip(testbed, rank, _number("speed", values[1], "above 0, at most 1.0", 0))
        else:
            simple = {"kill": faults.kill_rank, "freeze": faults.freeze_rank, "thaw": faults.thaw_rank}
            message = simple[kind](testbed, rank)
    elif kind == "slow-link":
        message = faults.slow_link(testbed, values[0], values[1], quantity(from_data(values[2], "rate"), "bytes/s"))
    else:
        message = {"cut": faults.cut_link, "mend": faults.mend_link}[kind](testbed, values[0], values[1])
    print(message)
    return 0
