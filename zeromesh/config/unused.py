"""Sections of DeepSpeed's JSON that are read and checked, and change nothing here."""

from __future__ import annotations

from typing import Literal

from zeromesh.config.section import CountInt, Names, PositiveInt, Section, Table, key


class Comet(Section):
    """Metrics for Comet."""

    enabled: bool = key(False, "Send metrics to Comet.")
    samples_log_interval: PositiveInt = key(100, "Samples between two reports.")
    project: str | None = key(None, "Project of the experiment.")
    workspace: str | None = key(None, "Workspace of the experiment.")
    api_key: str | None = key(None, "Key of the account.")
    experiment_name: str | None = key(None, "Name of the experiment.")
    experiment_key: str | None = key(None, "Key of the experiment, to continue it.")
    online: bool | None = key(None, "Send at once, instead of keeping the metrics in files.")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Continue or create.")


class CommsLogger(Section):
    """A log of collectives."""

    enabled: bool = key(False, "Log collectives.")
    prof_all: bool = key(True, "Log all of them.")
    prof_ops: Names = key((), "The ones to log.")
    verbose: bool = key(False, "Print each of them.")
    debug: bool = key(False, "Say where each was called.")


class ThroughputTimer(Section):
    """Timer of samples per second."""

    enabled: bool = key(True, "Measure samples per second.")
    synchronized: bool = key(True, "Wait for the device when measuring.")


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTimer = ThroughputTimer()


class HybridEngine(Section):
    """Generation between training steps."""

    enabled: bool = key(False, "Generate with inference kernels between training steps.")
    max_out_tokens: PositiveInt = key(512, "Most tokens generated.")
    inference_tp_size: PositiveInt = key(1, "Ranks that share a layer in generation.")
    release_inference_cache: bool = key(False, "Free the cache after generation.")
    pin_parameters: bool = key(True, "Use page-locked host memory.")
    tp_gather_partition_size: PositiveInt = key(8, "Layers gathered at a time.")
    enable_cuda_graph: bool = key(False, "Use CUDA graphs.")


class Compile(Section):
    """Compiler passes on the whole graph."""

    deepcompile: bool = key(False, "Compile the model with passes for sharding.")
    autoep_non_moe: bool = key(False, "Compile what is around experts.")
    free_activation: bool = key(False, "Free activations early.")
    free_activation_threshold: CountInt = key(10 * 1024**2, "Least size to free early, in bytes.")
    offload_activation: bool = key(False, "Keep activations in host memory.")
    offload_activation_pin_memory: bool = key(True, "Use page-locked host memory.")
    offload_opt_states: bool = key(False, "Keep the optimizer's state in host memory.")
    offload_parameters: bool = key(False, "Keep parameters in host memory.")
    double_buffer: bool = key(True, "Use two buffers for gradients.")
    symmetric_memory: bool = key(False, "Use symmetric memory.")
    debug_log: bool = key(False, "Write the graphs to files.")
    sync_before_reduce: bool = key(False, "Synchronise before reductions.")
    sync_after_reduce: bool = key(False, "Synchronise after reductions.")
    sync_before_allgather: bool = key(False, "Synchronise before gathering.")
    sync_after_allgather: bool = key(False, "Synchronise after gathering.")
    keep_int_input_tensors: bool = key(True, "Keep integer inputs of graphs.")
    keep_all_input_tensors: bool = key(False, "Keep all inputs of graphs.")
    passes: Names | None = key(None, "Names of the passes.")


class ModelInfo(Section):
    """Facts of the model for the autotuner."""

    profile: bool = key(False, "Profile the model.")
    num_params: CountInt | None = key(None, "Number of parameters.")
    hidden_size: PositiveInt | None = key(None, "Size of the hidden state.")
    num_layers: PositiveInt | None = key(None, "Number of layers.")


class Autotuning(Section):
    """A search for the fastest settings."""

    enabled: bool = key(False, "Search for the fastest settings.")
    fast: bool = key(True, "Search micro-batch sizes and stages only.")
    results_dir: str = key("autotuning_results", "Folder of the results.")
    exps_dir: str = key("autotuning_exps", "Folder of the experiments.")
    overwrite: bool = key(True, "Replace results that are there.")
    start_profile_step: CountInt = key(3, "First step that is measured.")
    end_profile_step: CountInt = key(5, "Last step that is measured.")
    metric: str = key("throughput", "What is to be best.")
    metric_path: str | None = key(None, "File of the metric.")
    tuner_type: str = key("gridsearch", "How settings are tried.")
    tuner_early_stopping: CountInt = key(5, "Trials without improvement until the end.")
    tuner_num_trials: PositiveInt = key(50, "Most trials.")
    arg_mappings: Table | None = key(None, "Command-line options of the user's script.")
    model_info: ModelInfo | None = key(None, "What is known of the model.")
    model_info_path: str | None = key(None, "File of what is known of the model.")
    mp_size: PositiveInt = key(1, "Ranks that share one model.")
    max_train_batch_size: PositiveInt | None = key(None, "Largest batch to try.")
    min_train_batch_size: PositiveInt = key(1, "Smallest batch to try.")
    max_train_micro_batch_size_per_gpu: PositiveInt = key(1024, "Largest micro-batch to try.")
    min_train_micro_batch_size_per_gpu: PositiveInt = key(1, "Smallest micro-batch to try.")
    num_tuning_micro_batch_sizes: PositiveInt = key(3, "Number of micro-batch sizes to try.")


class DataEfficiency(Section):
    """Samples and tokens chosen by difficulty."""

    enabled: bool = key(False, "Choose samples and tokens by difficulty.")
    seed: CountInt = key(1234, "Seed of the choice.")
    data_sampling: Table = key({}, "How samples are chosen.")
    data_routing: Table = key({}, "How tokens are dropped inside the model.")


class ExpertParallel(Section):
    """Experts of a mixture spread over ranks."""

    enabled: bool = key(False, "Spread experts over ranks.")
    autoep_size: PositiveInt = key(1, "Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: PositiveInt = key(1, "Ranks that share one expert.")
    validate_folding_routing: bool = key(False, "Check the routing.")
    async_split_plan: bool = key(False, "Exchange sizes while computing.")
    preset_model: str | None = key(None, "Name of a ready-made set of patterns.")
    moe_layer_pattern: str | None = key(None, "Pattern of the mixture layers.")
    expert_pattern: str | None = key(None, "Pattern of the experts.")
    router_pattern: str | None = key(None, "Pattern of the routers.")
    use_grouped_mm: bool = key(True, "Multiply all experts at once.")
    disable_triton_grouped_mm: bool = key(False, "Do not use Triton for that.")
    route_norm: bool | None = key(None, "Normalise the routers' weights.")
    route_scale: float = key(1.0, "Factor on the routers' weights.")
    score_apply: str | None = key(None, "Where the routers' weights are applied.")
    combine_impl: str | None = key(None, "Code that combines the experts' outputs.")
    row_weighting_impl: str | None = key(None, "Code that weights the outputs.")
    gate_up_impl: str = key("separate", "Code of gated experts.")
    comm_backend: str = key("comm", "Code of the exchange of tokens.")
    comm_num_sm: PositiveInt = key(12, "Multiprocessors that exchange tokens.")
    comm_qp_margin: CountInt = key(4, "Spare queues of the exchange.")
    comm_max_tokens_per_rank: CountInt = key(0, "Most tokens per rank; 0 means no limit.")
    num_expert_groups: PositiveInt | None = key(None, "Groups of experts.")
    num_limited_groups: PositiveInt | None = key(None, "Groups that a token may use.")
    score_func: str | None = key(None, "Function of the router.")
    top_k: PositiveInt | None = key(None, "Experts per token.")
    load_balance_coeff: float | None = key(None, "Weight of the balancing loss.")
    routed_scaling_factor: float | None = key(None, "Factor on the experts' outputs.")
    expert_w1: str | None = key(None, "Name of an expert's first weight.")
    expert_w2: str | None = key(None, "Name of an expert's second weight.")
    expert_w3: str | None = key(None, "Name of an expert's third weight.")
    num_experts_attr: str | None = key(None, "Attribute with the number of experts.")
    top_k_attr: str | None = key(None, "Attribute with the experts per token.")
    has_shared_experts: bool | None = key(None, "Whether some experts see every token.")
    shared_experts_pattern: str | None = key(None, "Pattern of the shared experts.")
    shared_experts_gate_pattern: str | None = key(None, "Pattern of their gates.")
    expert_activation: str | None = key(None, "Activation of the experts.")


class WeightQuantization(Section):
    """Weights as numbers of few bits."""

    enabled: bool = key(True, "Quantise weights.")
    num_bits: PositiveInt = key(8, "Bits per weight.")
    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Kind of range.")
    q_groups: PositiveInt = key(1, "Groups with a range of their own.")
    quantized_initialization: Table = key({}, "How weights are quantised as the model is built.")
    post_init_quant: Table = key({}, "How weights are quantised after it is built.")
