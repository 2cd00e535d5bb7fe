"""``unified slurm …``: jobs and clusters in allocations of SLURM."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace, _ActionsContainer
from pathlib import Path
from typing import Any

from unified.cli.options import NAME_HELP, add_ship, at_least, chosen_name
from unified.config import settings
from unified.config.addresses import MASTER_VARIABLE, find_master
from unified.config.ports import address_of
from unified.errors import UsageError
from unified.job.spec import ENDS_AT, JobSpec
from unified.security.keys import KEY_VARIABLE
from unified.slurm import Slurm, batch, commands
from unified.slurm import allocation as task
from unified.slurm.job import send

_OF_SLURM = (
    *("time", "partition", "account", "array", "spare_nodes", "requeues", "group", "sbatch", "is_printed"),
    *task.NodeOptions.__struct_fields__,
)
_GROUP_HELP = "Put roles on nodes of their own, in a heterogeneous job: --group 'env=-p cpu -N 2'."
_SBATCH_HELP = "Another option of sbatch: --sbatch=--qos=high."
_NODES_HELP = "Least number of nodes; nodes beyond the range are in reserve (all of the allocation)."
_REQUEUES_HELP = "Go back into SLURM's queue so often at most (no limit)."
_DEVICES_HELP = "Virtual devices of each node in the place of GPUs."
_INTERFACE_HELP = "Network interface whose address master and agents have (that towards the other nodes)."
_PYXIS_HELP = "Run the agents in this image, by Pyxis (an option of srun); Unified is in it, on the path."
_APPTAINER_HELP = "Run the agents in this image, by apptainer exec; Unified is in it, on the path."


def add_slurm(parser: _ActionsContainer, *, is_job: bool = True) -> None:
    add = parser.add_argument
    add("-t", "--time", default="", metavar="LIMIT", help="Time limit, such as 12:00:00; else the partition's.")
    add("-p", "--partition", default="", metavar="NAME", help="Partition; else SLURM's default.")
    add("-A", "--account", default="", metavar="NAME", help="Account that pays.")
    if is_job:
        add("--array", default="", metavar="0-9", help="An array of jobs: a cluster each.")
        add("--spare-nodes", type=at_least(0), default=0, metavar="N", help="Nodes in reserve for lost ones (0).")
        add("--requeues", type=at_least(0), metavar="N", help=_REQUEUES_HELP)
        add("--group", action="append", default=[], metavar="ROLE=OPTIONS", help=_GROUP_HELP)
        _add_agents(parser)
    else:
        add("--devices", type=at_least(1), metavar="N", help=_DEVICES_HELP)
    add("--sbatch", action="append", default=[], metavar="OPTION", help=_SBATCH_HELP)
    add("--print", dest="is_printed", action="store_true", help="Print the script for sbatch, and do nothing else.")


def _add_agents(parser: _ActionsContainer) -> None:
    parser.add_argument("--devices", type=at_least(1), metavar="N", help=_DEVICES_HELP)
    parser.add_argument("--interface", default="", metavar="NAME", help=_INTERFACE_HELP)
    parser.add_argument("--container-image", default="", metavar="IMAGE", help=_PYXIS_HELP)
    parser.add_argument("--apptainer", default="", metavar="IMAGE", help=_APPTAINER_HELP)


def submit_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.py[:NAME]", help="A file with a job, as for `unified submit`.")
    parser.add_argument("--name", help=NAME_HELP)
    add_slurm(parser)
    add_ship(parser)


def submit(file: str, name: str | None, ship: bool, exclude: list[str], is_printed: bool, **asked: Any) -> None:
    """Submit the job of a file to SLURM, and print the id that SLURM gave it.

    Nodes, GPUs, CPUs and memory come from the job. In the allocation a cluster of its own runs it; when the time is
    over, the workers save, and the job goes back into SLURM's queue until it has ended.
    """
    from unified.cli.submit import load_job
    from unified.job.options import submit_options
    from unified.job.to_spec import to_spec

    job = load_job(file)
    called = chosen_name(name, file.rpartition(".py")[0] or file, os.environ)
    description = job if hasattr(job, "model_fields_set") else job.build()
    spec = to_spec(submit_options(description, {"job_name": called}, os.environ))
    words = ["submit", file, "--no-wait", "--name", called]
    words += [*(["--ship"] if ship else []), *(f"--exclude={pattern}" for pattern in exclude)]
    _send(spec, _slurm(asked), words, is_printed)


run_arguments = add_slurm


def run(words: list[str]) -> int:
    """Run a script as torchrun would, on an allocation of its own: torchrun's options, these, the script, its words."""
    from unified.cli.run import OWN, described, run_parser

    parser = run_parser(os.environ, "unified slurm run")
    parser.conflict_handler = "resolve"  # -t is the time limit; the other spelling of torchrun's option is --tee
    add_slurm(parser.add_argument_group("what SLURM is asked for"))
    given = vars(parser.parse_args(words))
    of_slurm, own = {name: given.pop(name) for name in _OF_SLURM}, {name: given.pop(name) for name in OWN}
    script = [given["training_script"], *given["training_script_args"]]
    ours = ArgumentParser(allow_abbrev=False)
    add_slurm(ours)
    _, options = ours.parse_known_args(words[: len(words) - len(script)])
    called = chosen_name(own["name"], script[0], os.environ)
    spec = described(Namespace(**given), parser, own, called, master=None).spec
    is_printed = of_slurm.pop("is_printed")
    command = ["run", *([] if own["name"] else ["--name", called]), "--no-wait", *options, *script]
    _send(spec, _slurm(of_slurm), command, is_printed)
    return 0


def _slurm(asked: dict[str, Any]) -> Slurm:
    groups = {}
    for text in asked.pop("group", ()):
        roles, equals, options = text.partition("=")
        if not roles or not equals:
            raise UsageError(f"--group {text!r} is not ROLE=OPTIONS, such as 'env=-p cpu -N 2'.")
        groups[roles] = _words("--group", options)
    sbatch = [word for text in asked.pop("sbatch") for word in _words("--sbatch", text)]
    return Slurm(**asked, sbatch=sbatch, groups=groups)


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a list of words: {error}.") from None


def _send(spec: JobSpec, slurm: Slurm, words: list[str], is_printed: bool) -> None:
    command = settings.command_line()
    driver = [*command, *words]
    if is_printed:
        print(batch.script(spec.name, batch.demand(spec, slurm), slurm, command, driver), end="")
        return
    sent = send(spec, slurm, command, driver)
    print(sent.slurm_id)
    print(f"look at it with: unified --slurm {sent.slurm_id} status {spec.name}", file=sys.stderr)


def exec_arguments(parser: ArgumentParser) -> None:
    up_arguments(parser)
    parser.add_argument("--requeues", type=at_least(0), metavar="N", help=_REQUEUES_HELP)
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="The command, and its words.")


def exec(  # noqa: A001 - the name of the command
    nodes: str | None, requeues: int | None, command: list[str], **agents: Any
) -> int:
    """Run a command on a cluster of this allocation: ``unified slurm exec -- python train.py``.

    A master starts here and an agent on each node; the command finds them by itself. The exit code is the command's, or
    75 if the allocation ends before its jobs: they wait, and go on when SLURM starts the allocation again.
    """
    if not command:
        raise UsageError("a command is needed: unified slurm exec -- COMMAND. (`unified slurm up` does without one.)")
    return _execute(nodes, requeues, command, agents)


def up_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", metavar="N[-MOST]", help=_NODES_HELP)
    _add_agents(parser)


def up(nodes: str | None, **agents: Any) -> int:
    """Make this allocation, as of salloc, a cluster until Ctrl-C."""
    return _execute(nodes, 0, [], agents)


def _execute(nodes: str | None, requeues: int | None, command: list[str], agents: dict[str, Any]) -> int:
    from unified.slurm.execution import Execution

    allocation = task.SlurmAllocation.here(os.environ)
    if not (found := commands.jobs(allocation.slurm_id)):
        raise UsageError(f"SLURM does not know job {allocation.slurm_id}, which SLURM_JOB_ID of this process names.")
    least, _, most = (nodes or str(allocation.num_nodes)).partition("-")
    if not least.isdecimal() or not (most or "1").isdecimal():
        raise UsageError(f"--nodes {nodes!r} is neither a number of nodes, such as 4, nor a range, such as 2-5.")
    execution = Execution(
        allocation,
        found[0].folder,
        nodes=int(least),
        spare_from=int(most or least),
        agents=task.NodeOptions(**agents),
        requeues=requeues,
        command=command,
        unified=settings.command_line(),
    )
    return execution.run()


def agent_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--master", required=True, metavar="tcp://HOST:PORT", help="The master's address.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="Folder for state and logs.")
    parser.add_argument("--devices", type=at_least(1), metavar="N", help=_DEVICES_HELP)
    parser.add_argument("--interface", metavar="NAME", help="Network interface whose address this node has.")
    parser.add_argument("--spare-from", type=at_least(0), metavar="N", help="Nodes from this number on are in reserve.")
    parser.add_argument("--group", type=at_least(0), metavar="N", help="Component of a heterogeneous job.")
    parser.add_argument("--until-eof", action="store_true", help="Leave at the end of stdin.")


def agent(folder: Path | None, interface: str | None, **asked: Any) -> None:
    """Be the agent of this node, with what SLURM gave it. The cluster's key comes through stdin."""
    address = address_of(interface) if interface else None
    words = task.agent_arguments(os.environ, folder=folder, address=address, **asked)
    environment = task.agent_environment(os.environ)
    if not asked["until_eof"]:  # an added node, whose allocation has its own end
        environment[ENDS_AT] = str(commands.ends_at(os.environ["SLURM_JOB_ID"]) or "")
    if folder is not None:  # one file for each node
        file = folder / f"{words[words.index('--node-id') + 1]}.log"
        log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.execve(settings.python(), [settings.python(), "-P", "-m", "unified_agent", *words], environment)


def grow_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("number", type=at_least(1), metavar="N", help="How many nodes.")
    parser.add_argument("--master", metavar="tcp://HOST:PORT", help=f"The master's address; else ${MASTER_VARIABLE}.")
    add_slurm(parser, is_job=False)


def grow(number: int, master: str | None, is_printed: bool, **asked: Any) -> None:
    """Add nodes to a cluster that runs: an array of jobs of one node each, which leave when their time is over."""
    address = find_master(master)
    if address is None:
        raise UsageError(
            f"no master: give --master or set {MASTER_VARIABLE}, or say which: unified --slurm ID slurm grow."
        )
    key_file = os.environ.get(KEY_VARIABLE, "")
    devices = [f"--devices={asked['devices']}"] if asked["devices"] is not None else []
    words = ["--master", address, *devices]
    text = batch.grow_script(
        number, _slurm(asked), settings.command_line(), words, os.path.abspath(key_file) if key_file else ""
    )
    if is_printed:
        print(text, end="")
    else:
        print(commands.submit(text))


def attach_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("slurm_id", metavar="ID", help="A job of SLURM that runs a cluster of ours.")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="The command, and its words.")


def attach(slurm_id: str, command: list[str]) -> int:
    """Run a command on the first node of a job: ``unified slurm attach 4711 -- unified status -w``.

    It is for sites where compute nodes cannot be reached from here. Without a command it is a shell.
    """
    folder, found = commands.folder_of(slurm_id), commands.jobs(slurm_id)
    if not found or found[0].state != "RUNNING":
        raise UsageError(f"job {slurm_id} of SLURM does not run{f': it is {found[0].state}' if found else ''}.")
    environment = {**os.environ, **variables(folder)}
    words = ["srun", "--overlap", f"--jobid={found[0].slurm_id}", "--nodes=1", "--ntasks=1", "--relative=0"]
    words += ["--pty"] if sys.stdin.isatty() else []
    os.execvpe("srun", [*words, *(command or [os.environ.get("SHELL", "bash")])], environment)


def variables(folder: Path) -> dict[str, str]:
    """Return the variables by which commands find the cluster of a SLURM job, from the cluster's folder."""
    try:
        address = (folder / commands.ADDRESS_NAME).read_text().strip()
    except OSError:
        if not folder.exists():
            raise UsageError(f"the cluster of {folder} has not started yet: `squeue` says why.") from None
        stories = ", ".join(str(path) for path in folder.glob("explain-*.txt")) or "none was written"
        raise UsageError(
            f"the cluster of {folder} is not up now. The output of its job is beside that folder, logs are in it; the "
            f"reasons of what was decided: {stories}."
        ) from None
    return {MASTER_VARIABLE: address, KEY_VARIABLE: str(folder / commands.KEY_NAME)}
