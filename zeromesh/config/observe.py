"""Sections on what a run shows of itself: monitors, traces, operations."""

from __future__ import annotations

from pydantic import Field

from zeromesh.config.section import CountFloat, Int, PositiveInt, Section


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    enabled: bool = Field(False, description="Write metrics for TensorBoard, after every update.")
    output_path: str = Field("", description="Folder of the jobs; relative to where the run is started.")
    job_name: str = Field("DeepSpeedJobName", description="Folder of this job inside output_path.")


class Wandb(Section):
    """Metrics for Weights & Biases."""

    enabled: bool = Field(False, description="Send metrics to Weights & Biases, after every update.")
    group: str | None = Field(None, description="Group of runs.")
    team: str | None = Field(None, description="Team that owns the run.")
    project: str = Field("deepspeed", description="Project of the run.")


class CsvMonitor(Section):
    """Metrics as CSV files."""

    enabled: bool = Field(False, description="Write metrics as CSV files, one for each, after every update.")
    output_path: str = Field("", description="Folder of the jobs; relative to where the run is started.")
    job_name: str = Field("DeepSpeedJobName", description="Folder of this job inside output_path.")


class FlopsProfiler(Section):
    """Operations of the model, counted in one update."""

    enabled: bool = Field(False, description="Count the operations of one update, and report them.")
    recompute_fwd_factor: CountFloat = Field(0.0, description="Forwards recomputed per forward.")
    profile_step: PositiveInt = Field(
        1, description="Updates before the one whose operations are counted; the one after that is timed."
    )
    module_depth: Int = Field(-1, ge=-1, description="Depth of modules to report; -1 means all.")
    top_modules: PositiveInt = Field(1, description="Modules to report per depth, those with the most operations.")
    detailed: bool = Field(True, description="Report every module down to module_depth, too.")
    output_file: str | None = Field(None, description="File of the report; an older one is kept. Null: the log.")


class TraceSettings(Section):
    """A trace of some updates."""

    enabled: bool = Field(False, description="Record some updates with torch's profiler.")
    start_step: PositiveInt = Field(5, description="The first update that is recorded, counted from 1 in this process.")
    steps: PositiveInt = Field(3, description="Updates that are recorded.")
    output: str = Field("profile", description="Folder of the files, one for each rank; older ones are kept.")
    memory: bool = Field(False, description="Record allocations, too.")


class ReplicaCheck(Section):
    """Comparisons of what several ranks hold copies of."""

    interval: PositiveInt | None = Field(
        None, description="Updates between two comparisons, to the bit. Null: none but those of at_saves."
    )
    at_saves: bool = Field(True, description="Compare before each checkpoint, too, which is then not written.")


class Debug(Section):
    """Checks that take time, to find out why a program hangs."""

    collectives: bool = Field(
        False,
        description="Before each collective of torch.distributed that the program calls itself, compare name, dtype, "
        "shape and line of code between ranks; where they differ, an error names the lines of all.",
    )
