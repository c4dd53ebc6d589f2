"""Run ZeroMesh under a real Slurm of three nodes on this machine, and show what happens to its jobs.

    python tools/slurm_scenarios.py                 all scenarios, as a table of Markdown
    python tools/slurm_scenarios.py preempt array   those whose name has one of these words

It needs root, and slurmctld, slurmd and munged (Debian: ``apt-get install slurm-wlm munge``). The nodes are network
namespaces with a host name, a ``slurmd`` and a spool each, below a temporary folder. Nothing of the machine's own Slurm
or munge is touched, and nothing is left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from namespaces import Namespaces  # noqa: E402

NODES = ("n1", "n2", "n3")
CONTROLLER = len(NODES)  # number of the host of slurmctld
BATCH_FILE = ROOT / "examples" / "slurm" / "train.sbatch"
PATIENCE = 240.0  # seconds for a state to be reached; ranks start slowly where many share few cores

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

CONFIGURATION = """
ClusterName=zeromesh
SlurmctldHost=control({controller})
SlurmUser=root
AuthType=auth/munge
# A job that is queued again must wait for its old credential to expire: 5 seconds in place of 120.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeAddr=10.0.0.[1-{nodes}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=abrupt Nodes=ALL PriorityTier=1 GraceTime=0 OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
"""


def missing() -> str:
    """Return what this machine lacks to run the scenarios; empty if nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]
    if absent:
        return f"{', '.join(absent)} are not installed: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "only root starts slurmd"


def until(what: str, holds: Callable[[], object], limit: float = PATIENCE) -> None:
    """Wait until something holds; raise TimeoutError if it does not within the limit."""
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {limit:.0f} s")
        time.sleep(0.2)


class Cluster:
    """A Slurm of three nodes below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Namespaces(len(NODES) + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        controller = self.network.address(CONTROLLER)
        hosts = [f"{self.network.address(host)} {name}" for host, name in enumerate((*NODES, "control"))]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        text = CONFIGURATION.format(controller=controller, folder=self.folder, nodes=len(NODES))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        places = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")}
        self._daemon(CONTROLLER, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket",
                     *places.values())  # fmt: skip
        until("munge", lambda: (self.folder / "munge.socket").exists(), 20)
        self._daemon(CONTROLLER, "slurmctld", "-D", "-f", self.folder / "slurm.conf")
        for name in NODES:
            self.start_node(name)
        self.await_nodes()

    def _daemon(self, host: int, program: str, *arguments: str | Path) -> None:
        name = (*NODES, "control")[host]
        path = shutil.which(program, path=_SEARCH)
        line = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        command = [*self.network.prefix(host), "unshare", "--mount", "--uts", "sh", "-c", line, "sh", path, *arguments]
        with (self.folder / f"{program}.{name}.out").open("ab") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._daemons[f"{program} {name}"] = process

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._daemon(NODES.index(name), "slurmd", "-D", "-N", name, "-f", self.folder / "slurm.conf")

    def end_node(self, name: str) -> None:
        """Kill everything on a node, as a loss of power does."""
        for process in self.network.processes(NODES.index(name)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._daemons.pop(f"slurmd {name}").wait()

    def connect(self, name: str, connected: bool) -> None:
        """Connect a node to the others, or cut it off."""
        self.network.set_link(NODES.index(name), connected)

    def await_nodes(self) -> None:
        """Wait until all nodes are idle."""
        idle = f"n[1-{len(NODES)}] idle"
        until("idle nodes", lambda: self.slurm("sinfo", "-h", "-p", "low", "-o", "%N %T") == idle, 120)

    def slurm(self, *command: str | Path, check: bool = True) -> str:
        """Run a command of Slurm on the controller's host, and return what it says."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(
            [*self.network.prefix(CONTROLLER), *map(str, command)], env=environment, cwd=self.folder,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def close(self) -> None:
        """End all processes of all hosts, and the hosts."""
        with suppress(IndexError, OSError):  # hosts that were never made
            for host in range(CONTROLLER + 1):
                for process in self.network.processes(host):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
        for process in self._daemons.values():
            process.wait()
        self.network.close()


RANK_PROGRAM = '''
"""Leave a file of what this rank is, and of a sum over all ranks."""
import dataclasses, json, os, socket, sys, time
from pathlib import Path

import torch

import zeromesh

environment = zeromesh.init_distributed()
total = torch.tensor([float(environment.rank)])
if environment.world_size > 1:
    torch.distributed.all_reduce(total)
facts = dataclasses.asdict(environment) | {"host": socket.gethostname(), "sum": float(total)}
Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(facts))
if len(sys.argv) > 2 and environment.rank == int(sys.argv[2]):
    os.kill(os.getpid(), 9)
if len(sys.argv) > 2:
    torch.distributed.barrier()
'''

STEPS = 60  # many enough to be interrupted

TRAINING = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3},
    "model": {"architecture": "llama", "hidden_size": 32, "layers": 2, "heads": 2, "sequence_length": 64},
    "data": {"suffixes": [".py"], "vocabulary_size": 270},
    "run": {"steps": STEPS, "save_every": 5, "log_every": 1, "evaluate_every": 0, "evaluate_batches": 1, "threads": 1},
}

SMALL = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--gpus-per-node=0")
"""Options of sbatch in place of those of the batch file."""

END_OPTIONS = "--kill-on-bad-exit=0 --wait=60"
"""Options of srun in the batch file."""


class Wrong(AssertionError):
    """Something else has happened than must."""


@dataclass
class Trial:
    """A scenario that runs: its folder, its jobs, and what each must leave."""

    cluster: Cluster
    folder: Path
    jobs: list[str] = field(default_factory=list)

    def submit(
        self, *options: str | Path, script: Path | None = None, shell: str = "", arguments: Sequence[str] = ()
    ) -> str:
        """Submit a batch file, or a line of a shell, and return the number of the job."""
        program = [script, *arguments] if script else ["--wrap", shell]
        command = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, *program]
        self.jobs.append(self.cluster.slurm(*command))
        return self.jobs[-1]

    def srun(self, shell: str, *options: str | Path, srun: str = "") -> str:
        """Submit a job whose ranks run a command; return its number."""
        return self.submit(*options, shell=f"srun {srun} {shell}")

    def fact(self, job: str, name: str) -> str:
        """Return a fact of a job, in the words of ``scontrol show job``."""
        return re.findall(rf"\b{name}=(\S*)", self.cluster.slurm("scontrol", "show", "job", "-o", job))[0]

    def said(self, job: str) -> str:
        """Return what a job has written so far."""
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self, job: str, *states: str) -> str:
        """Wait until a job has ended, and return its exit status; raise Wrong unless it ended in one of the states."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
        until(f"the end of job {job}", lambda: self.fact(job, "JobState") in over)
        state = self.fact(job, "JobState")
        if state not in (states or ("COMPLETED",)):
            raise Wrong(f"job {job} is {state}:\n{self.said(job)[-3000:]}")
        return self.fact(job, "ExitCode").partition(":")[0]

    def ranks(self, world: int, per_node: dict[str, int], name: str = "ranks", launcher: str = "slurm") -> str:
        """Return what the ranks of a job have found; raise Wrong unless each is right."""
        found = sorted(
            (json.loads(path.read_text()) for path in (self.folder / name).glob("*.json")), key=itemgetter("rank")
        )
        if [facts["rank"] for facts in found] != list(range(world)):
            raise Wrong(f"ranks are {[facts['rank'] for facts in found]}, not 0 to {world - 1}")
        for facts in found:
            here = [other for other in found if other["host"] == facts["host"]]
            expected = {
                "world_size": world, "sum": world * (world - 1) / 2, "node_count": len(per_node),
                "local_world_size": per_node[facts["host"]], "launcher": launcher,
                "local_rank": here.index(facts), "node_rank": list(per_node).index(facts["host"]),
            }  # fmt: skip
            wrong = {key: (facts[key], value) for key, value in expected.items() if facts[key] != value}
            if wrong:
                raise Wrong(f"rank {facts['rank']} on {facts['host']} has (found, right): {wrong}")
        nodes = ", ".join(f"{name} {count}" for name, count in per_node.items())
        return f"{world} of {world} ranks right ({nodes})"

    def program(self, name: str = "ranks", more: str = "") -> str:
        """Return a command that runs the program of ranks, whose files come into a folder of this name."""
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "rank.py").write_text(RANK_PROGRAM)
        return f"{sys.executable} {self.folder}/rank.py {self.folder}/{name} {more}".strip()

    def train(self, *options: str | Path, srun: str = "") -> str:
        """Submit the batch file of the examples with a small model, a rank on each of two nodes.

        ``srun`` replaces the options by which it says what becomes of the other ranks when one ends.
        """
        script = BATCH_FILE
        if srun:
            script = self.folder / "train.sbatch"
            script.write_text(BATCH_FILE.read_text().replace(END_OPTIONS, srun))
        text = self.folder / "text"
        text.mkdir()
        for number in range(3):
            shutil.copy(ROOT / "zeromesh" / "comm" / "trust.py", text / f"{number}.py")
        config = TRAINING | {"data": {**TRAINING["data"], "train": str(text)}}
        config["run"] = {**TRAINING["run"], "output": str(self.folder / "run")}
        (self.folder / "train.json").write_text(json.dumps(config))
        return self.submit(*SMALL, *options, script=script, arguments=[str(self.folder / "train.json")])

    def steps(self) -> list[int]:
        """Return the steps of the run in its log."""
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if '"train"' in line and line.endswith("}")]

    def minutes(self, job: str) -> int:
        """Return for how many whole minutes a job has run."""
        hours, minutes, _ = self.fact(job, "RunTime").split(":")
        return 60 * int(hours) + int(minutes)

    def under_way(self, steps: int = 5) -> None:
        """Wait until the run has taken some steps."""
        until(f"step {steps}", lambda: len(self.steps()) >= steps or self.over())
        if self.over():
            raise Wrong(f"the job has ended:\n{self.said(self.jobs[0])[-3000:]}")

    def over(self) -> bool:
        """Return whether the first job has ended."""
        return self.fact(self.jobs[0], "JobState") not in ("RUNNING", "PENDING", "CONFIGURING", "COMPLETING")

    def whole(self, job: str, starts: int, saved: bool = False) -> str:
        """Wait for the end of a training job; raise Wrong unless it took every step, in so many starts.

        ``saved`` says that each start but the last has saved its last step, so that none was taken twice.
        """
        self.ended(job)
        report = json.loads((self.folder / "run" / "report.json").read_text())
        if self.steps() != list(range(1, STEPS + 1)) or report["attempts"] != starts:
            raise Wrong(f"{report['attempts']} starts, steps {self.steps()[:1]} to {self.steps()[-1:]}")
        restarts = int(self.fact(job, "Restarts"))
        redone = report["time"]["redone"]
        if saved and redone > 0:
            raise Wrong(f"{redone} s of steps were taken twice")
        return f"{restarts} restarts, {STEPS} of {STEPS} steps, {redone:.1f} s of them taken twice"


TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


def _two_nodes(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), *TWO_BY_TWO))
    return trial.ranks(4, {"n1": 2, "n2": 2})


def _one_node(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), "--nodes=1", "--ntasks=3"))
    return trial.ranks(3, {"n1": 3})


def _uneven(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), "--nodes=3", "--ntasks=5"))
    return trial.ranks(5, {"n1": 3, "n2": 1, "n3": 1})


def _cyclic(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), *TWO_BY_TWO, srun="--distribution=cyclic"))
    return trial.ranks(4, {"n1": 2, "n2": 2})


def _fewer(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), "--nodes=3", "--ntasks=6", srun="--nodes=2 --ntasks=3"))
    return trial.ranks(3, {"n1": 2, "n2": 1})


def _two_steps(trial: Trial) -> str:
    lines = [f"srun --exact --nodes=2 --ntasks=2 {trial.program(name)} &" for name in ("first", "second")]
    trial.ended(trial.submit(*TWO_BY_TWO, shell=" ".join([*lines, "wait"])))
    return "; ".join(trial.ranks(2, {"n1": 1, "n2": 1}, name) for name in ("first", "second"))


def _two_jobs(trial: Trial) -> str:
    jobs = [trial.srun(trial.program(name), "--nodes=2", "--ntasks=2") for name in ("first", "second")]
    for job in jobs:
        trial.ended(job)
    return "; ".join(trial.ranks(2, {"n1": 1, "n2": 1}, name) for name in ("first", "second"))


def _array(trial: Trial) -> str:
    for number in range(3):
        trial.program(str(number))
    line = f"srun {sys.executable} {trial.folder}/rank.py {trial.folder}/$SLURM_ARRAY_TASK_ID"
    job = trial.submit("--nodes=2", "--ntasks=2", "--array=0-2", shell=line)
    for number in range(3):
        trial.ended(f"{job}_{number}")
    return "; ".join(trial.ranks(2, {"n1": 1, "n2": 1}, str(number)) for number in range(3))


def _alone(trial: Trial) -> str:
    trial.ended(trial.submit(*TWO_BY_TWO, shell=trial.program()))
    return trial.ranks(1, {"n1": 1}, launcher="single")


def _pmi(trial: Trial) -> str:
    trial.ended(trial.srun(trial.program(), *TWO_BY_TWO, srun="--mpi=pmi2"))
    return trial.ranks(4, {"n1": 2, "n2": 2})


def _own_master(trial: Trial) -> str:
    master = "ALL,MASTER_ADDR=n1,MASTER_PORT=29777"
    trial.ended(trial.srun(trial.program(), *TWO_BY_TWO, f"--export={master}"))
    if {json.loads(path.read_text())["master_port"] for path in (trial.folder / "ranks").iterdir()} != {29777}:
        raise Wrong("MASTER_PORT was not taken")
    return trial.ranks(4, {"n1": 2, "n2": 2})


def _torchrun(trial: Trial) -> str:
    options = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n1:29600"
    command = trial.program().replace(sys.executable, f"{sys.executable} -m torch.distributed.run {options}")
    trial.ended(trial.srun(command, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"))
    found = [json.loads(path.read_text()) for path in (trial.folder / "ranks").iterdir()]
    # torchrun numbers nodes as they come.
    nodes = [name for _, name in sorted({(facts["node_rank"], facts["host"]) for facts in found})]
    return trial.ranks(4, dict.fromkeys(nodes, 2), launcher="torchrun")


def _launch(trial: Trial) -> str:
    secret = trial.folder / "secret"
    secret.write_text("of all nodes, and of no one else")
    secret.chmod(0o600)
    options = f"--nnodes 2 --nproc 2 --master n1:29601 --secret-file {secret}"
    command = trial.program().replace(sys.executable, f"{sys.executable} -m zeromesh launch {options}")
    trial.ended(trial.srun(command, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"))
    return trial.ranks(4, {"n1": 2, "n2": 2}, launcher="torchrun")


def _wrong_world(trial: Trial) -> str:
    job = trial.srun(trial.program(), *TWO_BY_TWO, "--export=ALL,WORLD_SIZE=8")
    status = trial.ended(job, "FAILED")
    return _named(trial, job, f"status {status}", "WORLD_SIZE is '8', but srun started this process with world size 4")


def _wrong_tasks(trial: Trial) -> str:
    command = f"sh -c 'SLURM_STEP_TASKS_PER_NODE=1 {trial.program()}'"
    job = trial.srun(command, *TWO_BY_TWO)
    status = trial.ended(job, "FAILED")
    return _named(trial, job, f"status {status}", "SLURM_STEP_TASKS_PER_NODE = 1 is 1 tasks")


def _named(trial: Trial, job: str, happened: str, text: str) -> str:
    """Return what happened; raise Wrong unless the job's output has the text."""
    if text not in trial.said(job):
        raise Wrong(f"{happened}, and {text!r} is not in\n{trial.said(job)[-3000:]}")
    return f"{happened}, `{text}`"


def _killed_rank(trial: Trial) -> str:
    job = trial.srun(trial.program(more="2"), *TWO_BY_TWO, srun=END_OPTIONS)
    began = time.monotonic()
    status = trial.ended(job, "FAILED")
    if time.monotonic() - began > 100:
        raise Wrong(f"the others ended only after {time.monotonic() - began:.0f} s")
    return f"status {status}, all ranks ended"


def _batch_file(trial: Trial) -> str:
    return trial.whole(trial.train(), 1)


def _await_restart(trial: Trial, job: str, limit: str = "") -> None:
    """Wait until a job runs again, with another time limit in minutes if one is given."""
    until("the restart", lambda: int(trial.fact(job, "Restarts")) > 0 or trial.over())
    if limit:
        trial.cluster.slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    until("the start after it", lambda: trial.fact(job, "JobState") == "RUNNING" or trial.over())


def _preempted(trial: Trial) -> str:
    job = trial.train()
    trial.under_way()
    urgent = trial.submit("--nodes=3", "--exclusive", "--partition=high", shell="sleep 1")
    trial.ended(urgent)
    _await_restart(trial, job)
    happened = trial.whole(job, 2, saved=True)
    return _named(trial, job, happened, "ended with status 75")


def _preempted_abruptly(trial: Trial) -> str:
    job = trial.train("--partition=abrupt")
    trial.under_way(8)
    urgent = trial.submit("--nodes=3", "--exclusive", "--partition=high", shell="sleep 1")
    trial.ended(urgent)
    _await_restart(trial, job)
    return trial.whole(job, 2)


def _time_limit(trial: Trial) -> str:
    job = trial.train("--time=30", "--signal=B:USR1@120")
    trial.under_way()
    trial.cluster.slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={trial.minutes(job) + 2}")
    _await_restart(trial, job, limit="30")
    happened = trial.whole(job, 2, saved=True)
    return _named(trial, job, happened, "the time limit is near: saving")


def _requeued(trial: Trial) -> str:
    job = trial.train()
    trial.under_way(8)
    trial.cluster.slurm("scontrol", "requeue", job)
    _await_restart(trial, job)
    return trial.whole(job, 2)


def _node_death(trial: Trial) -> str:
    job = trial.train()
    trial.under_way(8)
    trial.cluster.end_node("n2")
    _await_restart(trial, job)
    happened = trial.whole(job, 2)
    trial.cluster.start_node("n2")
    trial.cluster.await_nodes()
    return f"{happened}, on {trial.fact(job, 'NodeList')}"


def _first_node_death(trial: Trial) -> str:
    job = trial.train()
    trial.under_way(8)
    trial.cluster.end_node("n1")
    _await_restart(trial, job)
    happened = trial.whole(job, 2)
    trial.cluster.start_node("n1")
    trial.cluster.await_nodes()
    return f"{happened}, on {trial.fact(job, 'NodeList')}"


def _cut_off(trial: Trial) -> str:
    job = trial.train()
    trial.under_way(8)
    trial.cluster.connect("n2", False)
    _await_restart(trial, job)
    happened = trial.whole(job, 2)
    trial.cluster.connect("n2", True)
    trial.cluster.await_nodes()
    until("the end of the ranks that were cut off", lambda: len(trial.cluster.network.processes(1)) <= 1, 60)
    return f"{happened}, on {trial.fact(job, 'NodeList')}; nothing is left on n2"


def _bad_exit(trial: Trial) -> str:
    job = trial.train(srun="--kill-on-bad-exit=1")
    trial.under_way()
    trial.cluster.slurm("scancel", "--signal=TERM", job)
    _await_restart(trial, job)
    happened = trial.whole(job, 2, saved=True)
    return _named(trial, job, happened, "ended with status 75")


def _cancelled(trial: Trial) -> str:
    job = trial.train()
    trial.under_way()
    trial.cluster.slurm("scancel", job)
    trial.ended(job, "CANCELLED")
    trial.cluster.await_nodes()
    left = sum(len(trial.cluster.network.processes(host)) for host in range(len(NODES)))
    if left != len(NODES):
        raise Wrong(f"{left} processes are on the nodes, not {len(NODES)}")
    return "cancelled, nothing is left on the nodes"


def _mistake(trial: Trial) -> str:
    job = trial.submit(*SMALL, script=BATCH_FILE, arguments=["no-such-file.json"])
    status = trial.ended(job, "FAILED")
    if trial.fact(job, "Restarts") != "0":
        raise Wrong("the job was queued again")
    return _named(trial, job, f"status {status}, not queued again", "there is no such file")


@dataclass(frozen=True)
class Scenario:
    """One row: what is done, what must happen, and the function that does it and returns what has happened."""

    name: str
    must: str
    run: Callable[[Trial], str]


SCENARIOS = (
    Scenario("start: two nodes, two tasks each", "all ranks right", _two_nodes),
    Scenario("start: one node, three tasks", "all ranks right", _one_node),
    Scenario("uneven: five tasks on three nodes", "all ranks right", _uneven),
    Scenario("tasks in turn over the nodes (`--distribution=cyclic`)", "all ranks right", _cyclic),
    Scenario("a step with fewer nodes and tasks than its job", "all ranks right", _fewer),
    Scenario("two steps of a job at once", "two runs, apart", _two_steps),
    Scenario("two jobs at once on the same nodes", "two runs, apart", _two_jobs),
    Scenario("an array of three jobs", "three runs, apart", _array),
    Scenario("the batch script without `srun`", "a single process", _alone),
    Scenario("`srun --mpi=pmi2`", "all ranks right", _pmi),
    Scenario("exported `MASTER_ADDR` and `MASTER_PORT`", "all ranks right, at that port", _own_master),
    Scenario("torchrun on each node", "all ranks right", _torchrun),
    Scenario("`zeromesh launch` on each node", "all ranks right", _launch),
    Scenario("wrong variable: exported `WORLD_SIZE=8`", "an error names it", _wrong_world),
    Scenario("wrong variable: tasks of the nodes", "an error names it", _wrong_tasks),
    Scenario("a rank is killed", "the job fails, and all ranks end", _killed_rank),
    Scenario("batch file", "all steps", _batch_file),
    Scenario("batch file: preempted with a grace time", "saved, queued again, all steps, none twice", _preempted),
    Scenario("batch file: preempted at once", "queued again, all steps", _preempted_abruptly),
    Scenario("batch file: time limit", "saved, queued again, all steps, none twice", _time_limit),
    Scenario("batch file: `scontrol requeue`", "all steps", _requeued),
    Scenario("batch file: death of the second node", "queued again, all steps on other nodes", _node_death),
    Scenario("batch file: death of the first node", "queued again, all steps on other nodes", _first_node_death),
    Scenario("batch file: a node is cut off", "queued again, all steps on other nodes", _cut_off),
    Scenario("the same with `--kill-on-bad-exit=1`: SIGTERM", "saved, queued again, all steps", _bad_exit),
    Scenario("batch file: `scancel`", "nothing is left on the nodes", _cancelled),
    Scenario("batch file: a mistake in the arguments", "status 2, not queued again", _mistake),
)


@dataclass(frozen=True)
class Outcome:
    """What has happened in a scenario."""

    scenario: Scenario
    right: bool
    happened: str
    seconds: float


def run_scenarios(words: Sequence[str] = (), tell: Callable[[Outcome], object] = lambda outcome: None) -> list[Outcome]:
    """Run the scenarios whose name has one of the words, or all; return what has happened."""
    os.environ["VENV"] = sys.prefix  # the batch file activates it
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="zeromesh-slurm-") as name:
        cluster = Cluster(Path(name))
        try:
            for number, scenario in enumerate(SCENARIOS):
                if words and not any(word in scenario.name for word in words):
                    continue
                trial = Trial(cluster, Path(name) / str(number))
                trial.folder.mkdir()
                began = time.monotonic()
                try:
                    happened, right = scenario.run(trial), True
                except (Wrong, TimeoutError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                    said = "".join(f"\n{trial.said(job)[-3000:]}" for job in trial.jobs)
                    happened, right = f"{type(error).__name__}: {error}{said}", False
                outcomes.append(Outcome(scenario, right, happened, time.monotonic() - began))
                tell(outcomes[-1])
                if not right:  # the next scenario begins on nodes that are as at first
                    cluster.close()
                    shutil.rmtree(cluster.folder / "state")
                    cluster = Cluster(Path(name))
        finally:
            cluster.close()
    return outcomes


def main() -> int:
    """Print the table; return 1 unless all that must happen has happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of the names of scenarios; all if left out")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with the cluster's end

    def tell(outcome: Outcome) -> None:
        happened = outcome.happened if outcome.right else f"**WRONG** {outcome.happened}"
        print(f"| {outcome.scenario.name} | {outcome.scenario.must} | {happened} | {outcome.seconds:.0f} |", flush=True)

    print("| scenario | what must happen | what happened | seconds |\n|---|---|---|---|", flush=True)
    return 0 if all(outcome.right for outcome in run_scenarios(arguments.words, tell)) else 1


if __name__ == "__main__":
    sys.exit(main())
