"""Sections of DeepSpeed's JSON that are read and checked, and change nothing here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zeromesh.config.section import CountInt, Names, PositiveInt, Section, Table


class Comet(Section):
    """Metrics for Comet."""

    enabled: bool = Field(False, description="Send metrics to Comet.")
    samples_log_interval: PositiveInt = Field(100, description="Samples between two reports.")
    project: str | None = Field(None, description="Project of the experiment.")
    workspace: str | None = Field(None, description="Workspace of the experiment.")
    api_key: str | None = Field(None, description="Key of the account.")
    experiment_name: str | None = Field(None, description="Name of the experiment.")
    experiment_key: str | None = Field(None, description="Key of the experiment, to continue it.")
    online: bool | None = Field(None, description="Send at once, instead of keeping the metrics in files.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(None, description="Continue or create.")


class CommsLogger(Section):
    """A log of collectives."""

    enabled: bool = Field(False, description="Log collectives.")
    prof_all: bool = Field(True, description="Log all of them.")
    prof_ops: Names = Field((), description="The ones to log.")
    verbose: bool = Field(False, description="Print each of them.")
    debug: bool = Field(False, description="Say where each was called.")


class ThroughputTimer(Section):
    """Timer of samples per second."""

    enabled: bool = Field(True, description="Measure samples per second.")
    synchronized: bool = Field(True, description="Wait for the device when measuring.")


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTimer = Field(ThroughputTimer(), description="Timer of samples per second.")


class HybridEngine(Section):
    """Generation between training steps."""

    enabled: bool = Field(False, description="Generate with inference kernels between training steps.")
    max_out_tokens: PositiveInt = Field(512, description="Most tokens generated.")
    inference_tp_size: PositiveInt = Field(1, description="Ranks that share a layer in generation.")
    release_inference_cache: bool = Field(False, description="Free the cache after generation.")
    pin_parameters: bool = Field(True, description="Use page-locked host memory.")
    tp_gather_partition_size: PositiveInt = Field(8, description="Layers gathered at a time.")
    enable_cuda_graph: bool = Field(False, description="Use CUDA graphs.")


class Compile(Section):
    """Compiler passes on the whole graph."""

    deepcompile: bool = Field(False, description="Compile the model with passes for sharding.")
    autoep_non_moe: bool = Field(False, description="Compile what is around experts.")
    free_activation: bool = Field(False, description="Free activations early.")
    free_activation_threshold: CountInt = Field(10 * 1024**2, description="Least size to free early, in bytes.")
    offload_activation: bool = Field(False, description="Keep activations in host memory.")
    offload_activation_pin_memory: bool = Field(True, description="Use page-locked host memory.")
    offload_opt_states: bool = Field(False, description="Keep the optimizer's state in host memory.")
    offload_parameters: bool = Field(False, description="Keep parameters in host memory.")
    double_buffer: bool = Field(True, description="Use two buffers for gradients.")
    symmetric_memory: bool = Field(False, description="Use symmetric memory.")
    debug_log: bool = Field(False, description="Write the graphs to files.")
    sync_before_reduce: bool = Field(False, description="Synchronise before reductions.")
    sync_after_reduce: bool = Field(False, description="Synchronise after reductions.")
    sync_before_allgather: bool = Field(False, description="Synchronise before gathering.")
    sync_after_allgather: bool = Field(False, description="Synchronise after gathering.")
    keep_int_input_tensors: bool = Field(True, description="Keep integer inputs of graphs.")
    keep_all_input_tensors: bool = Field(False, description="Keep all inputs of graphs.")
    passes: Names | None = Field(None, description="Names of the passes.")


class ModelInfo(Section):
    """What the autotuner knows of the model."""

    profile: bool = Field(False, description="Profile the model.")
    num_params: CountInt | None = Field(None, description="Number of parameters.")
    hidden_size: PositiveInt | None = Field(None, description="Size of the hidden state.")
    num_layers: PositiveInt | None = Field(None, description="Number of layers.")


class Autotuning(Section):
    """A search for the fastest settings."""

    enabled: bool = Field(False, description="Search for the fastest settings.")
    fast: bool = Field(True, description="Search micro-batch sizes and stages only.")
    results_dir: str = Field("autotuning_results", description="Folder of the results.")
    exps_dir: str = Field("autotuning_exps", description="Folder of the experiments.")
    overwrite: bool = Field(True, description="Replace results that are there.")
    start_profile_step: CountInt = Field(3, description="First step that is measured.")
    end_profile_step: CountInt = Field(5, description="Last step that is measured.")
    metric: str = Field("throughput", description="What is to be best.")
    metric_path: str | None = Field(None, description="File of the metric.")
    tuner_type: str = Field("gridsearch", description="How settings are tried.")
    tuner_early_stopping: CountInt = Field(5, description="Trials without improvement until the end.")
    tuner_num_trials: PositiveInt = Field(50, description="Most trials.")
    arg_mappings: Table | None = Field(None, description="Command-line options of the user's script.")
    model_info: ModelInfo | None = Field(None, description="What is known of the model.")
    model_info_path: str | None = Field(None, description="File of what is known of the model.")
    mp_size: PositiveInt = Field(1, description="Ranks that share one model.")
    max_train_batch_size: PositiveInt | None = Field(None, description="Largest batch to try.")
    min_train_batch_size: PositiveInt = Field(1, description="Smallest batch to try.")
    max_train_micro_batch_size_per_gpu: PositiveInt = Field(1024, description="Largest micro-batch to try.")
    min_train_micro_batch_size_per_gpu: PositiveInt = Field(1, description="Smallest micro-batch to try.")
    num_tuning_micro_batch_sizes: PositiveInt = Field(3, description="Number of micro-batch sizes to try.")


class DataEfficiency(Section):
    """Samples and tokens chosen by difficulty."""

    enabled: bool = Field(False, description="Choose samples and tokens by difficulty.")
    seed: CountInt = Field(1234, description="Seed of the choice.")
    data_sampling: Table = Field({}, description="How samples are chosen.")
    data_routing: Table = Field({}, description="How tokens are dropped inside the model.")


class ExpertParallel(Section):
    """Experts of a mixture spread over ranks."""

    enabled: bool = Field(False, description="Spread experts over ranks.")
    autoep_size: PositiveInt = Field(1, description="Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: PositiveInt = Field(1, description="Ranks that share one expert.")
    validate_folding_routing: bool = Field(False, description="Check the routing.")
    async_split_plan: bool = Field(False, description="Exchange sizes while computing.")
    preset_model: str | None = Field(None, description="Name of a ready-made set of patterns.")
    moe_layer_pattern: str | None = Field(None, description="Pattern of the mixture layers.")
    expert_pattern: str | None = Field(None, description="Pattern of the experts.")
    router_pattern: str | None = Field(None, description="Pattern of the routers.")
    use_grouped_mm: bool = Field(True, description="Multiply all experts at once.")
    disable_triton_grouped_mm: bool = Field(False, description="Do not use Triton for that.")
    route_norm: bool | None = Field(None, description="Normalise the routers' weights.")
    route_scale: float = Field(1.0, description="Factor on the routers' weights.")
    score_apply: str | None = Field(None, description="Where the routers' weights are applied.")
    combine_impl: str | None = Field(None, description="Code that combines the experts' outputs.")
    row_weighting_impl: str | None = Field(None, description="Code that weights the outputs.")
    gate_up_impl: str = Field("separate", description="Code of gated experts.")
    comm_backend: str = Field("comm", description="Code of the exchange of tokens.")
    comm_num_sm: PositiveInt = Field(12, description="Multiprocessors that exchange tokens.")
    comm_qp_margin: CountInt = Field(4, description="Spare queues of the exchange.")
    comm_max_tokens_per_rank: CountInt = Field(0, description="Most tokens per rank; 0 means no limit.")
    num_expert_groups: PositiveInt | None = Field(None, description="Groups of experts.")
    num_limited_groups: PositiveInt | None = Field(None, description="Groups that a token may use.")
    score_func: str | None = Field(None, description="Function of the router.")
    top_k: PositiveInt | None = Field(None, description="Experts per token.")
    load_balance_coeff: float | None = Field(None, description="Weight of the balancing loss.")
    routed_scaling_factor: float | None = Field(None, description="Factor on the experts' outputs.")
    expert_w1: str | None = Field(None, description="Name of an expert's first weight.")
    expert_w2: str | None = Field(None, description="Name of an expert's second weight.")
    expert_w3: str | None = Field(None, description="Name of an expert's third weight.")
    num_experts_attr: str | None = Field(None, description="Attribute with the number of experts.")
    top_k_attr: str | None = Field(None, description="Attribute with the experts per token.")
    has_shared_experts: bool | None = Field(None, description="Whether some experts see every token.")
    shared_experts_pattern: str | None = Field(None, description="Pattern of the shared experts.")
    shared_experts_gate_pattern: str | None = Field(None, description="Pattern of their gates.")
    expert_activation: str | None = Field(None, description="Activation of the experts.")


class WeightQuantization(Section):
    """Weights as numbers of few bits."""

    enabled: bool = Field(True, description="Quantise weights.")
    num_bits: PositiveInt = Field(8, description="Bits per weight.")
    q_type: Literal["symmetric", "asymmetric"] = Field("symmetric", description="Kind of range.")
    q_groups: PositiveInt = Field(1, description="Groups with a range of their own.")
    quantized_initialization: Table = Field({}, description="How weights are quantised as the model is built.")
    post_init_quant: Table = Field({}, description="How weights are quantised after it is built.")
