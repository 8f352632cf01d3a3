"""Name every function of an engine that can write weights after they were loaded, and what becomes of it.

`verify.doors` finds the functions in an engine's source; one that is not named here fails its test. A door is

- ``rpc NAME``: a public method of vLLM's workers, which anyone may call by ``collective_rpc``;
- ``backend NAME``: a backend of ``weight_transfer_config``;
- ``module:function``: a function in which a parameter is written, or a model's ``load_weights`` is called.
"""

from __future__ import annotations

from typing import NamedTuple


class Door(NamedTuple):
    """One door.

    Attributes:
        doors: names as above; more than one for the same reason.
        fate: ``followed``, ``refused``, ``cannot`` (it cannot write the weights of an engine that serves), or ``unseen``.
        why: how, by which patch, or for which reason.
    """

    doors: tuple[str, ...]
    fate: str
    why: str


_LOADER = "model_executor.model_loader."
_TRANSFER = "distributed.weight_transfer."

VLLM: tuple[Door, ...] = (
    Door(
        (
            "rpc reload_weights",
            f"{_LOADER}reload.inplace:reload_weights",
            "v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
        ),
        "followed",
        "an update by `fp8.vllm.initialize_layerwise_reload`; `is_checkpoint_format=False` is refused by "
        "`fp8.vllm.worker_reload_weights`",
    ),
    Door(
        (
            "rpc init_weight_transfer_engine",
            "rpc start_weight_update",
            "rpc start_draft_weight_update",
            "rpc update_weights",
            "rpc finish_weight_update",
            "rpc shutdown_weight_transfer_engine",
            "backend nccl",
            "backend ipc",
            "v1.worker.gpu_worker:Worker.update_weights",
            f"{_TRANSFER}ipc_engine:IPCWeightTransferEngine.receive_weights",
            f"{_TRANSFER}nccl_engine:NCCLWeightTransferEngine.receive_weights",
        ),
        "followed",
        "these backends load by `load_weights` between the two reload functions, which open and commit an update; "
        "`start_weight_update(is_checkpoint_format=False)` of old versions is refused",
    ),
    Door(
        (
            "backend nccl_m2n",
            "backend sparse_nccl",
            "backend sharded_rdt",
            "backend modelexpress",
            f"{_TRANSFER}m2n_engine:M2NWeightTransferEngine.receive_weights",
            f"{_TRANSFER}sharded_rdt_engine:ShardedRDTWeightTransferEngine._bake",
            f"{_TRANSFER}sharded_rdt_engine:ShardedRDTWeightTransferEngine._run_quant",
            f"{_TRANSFER}sharded_rdt_trainer:_RDTProducerServer._pack_shared",
            f"{_LOADER}checkpoint_weight_patch:_load_nan_masked_weights",
            f"{_LOADER}checkpoint_weight_patch:_load_weight_chunk",
        ),
        "refused",
        "when the engine is configured (`fp8.vllm.create_engine_config`): they write into the parameters in use, as may "
        "any backend that a user registers",
    ),
    Door(
        ("rpc get_model", "rpc get_draft_model", "rpc apply_model"),
        "followed",
        "`load_weights` of the model, and of each of its parts, is a bucket of an update; what writes into a parameter by "
        "itself is not seen, but by `flashpatch.checksum`",
    ),
    Door(
        ("rpc reset_weights", f"{_LOADER}weight_checksum:zero_weights"),
        "followed",
        "parameters set to zero are no policy: requests are refused until a complete update",
    ),
    Door(
        ("rpc sleep", "rpc wake_up", "v1.worker.gpu_worker:Worker.wake_up"),
        "followed",
        "level 2 discards the weights: requests are refused until a complete update (`fp8.vllm.worker_sleep`)",
    ),
    Door(
        ("v1.worker.gpu_model_runner:GPUModelRunner.init_fp8_kv_scales",),
        "unseen",
        "up to vLLM 0.28 waking up the KV cache sets the scales of an fp8 KV cache to 1, also those that a checkpoint brought; "
        "vLLM's own behaviour, which FlashPatch leaves as it is",
    ),
    Door(
        ("rpc discard",),
        "refused",
        "with the tag `weights`: what no update brings back would be lost; vLLM itself discards the KV cache alone",
    ),
    Door(
        ("rpc checkpoint_prepare", "rpc checkpoint_restore", "rpc handle_ft_command"),
        "cannot",
        "they close and open communicators; a process that is restored has the weights that it had",
    ),
    Door(
        ("rpc add_lora", "rpc remove_lora", "rpc pin_lora"),
        "followed",
        "an adapter is staged, checked and put in place on all ranks or on none (`fp8.vllm_lora.add_adapter`); an engine that has "
        "what is not tested beside adapters refuses updates of its base",
    ),
    Door(
        ("lora.layers.vocal_parallel_embedding:VocabParallelEmbeddingWithLoRA.create_lora_weights",),
        "cannot",
        "while a model with adapters is opened: the layer gets room for them",
    ),
    Door(
        ("lora.layers.base:BaseLayerWithLoRA.load_weights",),
        "followed",
        "within `load_weights` of the whole model: a base is updated beside its adapters",
    ),
    Door(
        (
            "rpc elastic_ep_execute",
            "distributed.elastic_ep.elastic_execute:batch_transfer_weights",
            "distributed.eplb.eplb_state:EplbState.rearrange",
        ),
        "refused",
        "updates of an engine with `enable_eplb` are, which scaling of experts needs: they move experts between ranks",
    ),
    Door(
        (
            "rpc load_model",
            "rpc init_worker",
            f"{_LOADER}base_loader:BaseModelLoader.load_model",
            f"{_LOADER}bitsandbytes_loader:BitsAndBytesModelLoader.load_weights",
            f"{_LOADER}default_loader:DefaultModelLoader.load_weights",
            f"{_LOADER}dummy_loader:DummyModelLoader._process_online_quant_layer",
            f"{_LOADER}modelexpress_loader:ModelExpressModelLoader.load_weights",
            f"{_LOADER}runai_streamer_loader:RunaiModelStreamerLoader.load_weights",
            f"{_LOADER}sharded_state_loader:ShardedStateLoader.load_weights",
            f"{_LOADER}tensorizer:_resize_lora_embeddings",
            f"{_LOADER}tensorizer_loader:TensorizerLoader._load_model_serialized_cpu",
            f"{_LOADER}tensorizer_loader:TensorizerLoader.load_model",
            f"{_LOADER}tensorizer_loader:TensorizerLoader.load_weights",
            f"{_LOADER}weight_utils:initialize_single_dummy_weight",
        ),
        "cannot",
        "first loads, of a model that does not serve yet; a model loaded anew is registered anew, with version 0, which the "
        "engine core's number contradicts",
    ),
    Door(
        (
            f"{_LOADER}weight_cache.daemon:WeightCacheDaemon.get_model",
            f"{_LOADER}weight_cache.daemon:get_daemon_model",
            f"{_LOADER}weight_cache.ipc_loader:IpcModelLoader._build_model",
            f"{_LOADER}weight_cache.ipc_loader:IpcModelLoader.load_weights",
        ),
        "refused",
        '`load_format="ipc_cache"`, when the engine is configured: it shares the memory of weights with other engines',
    ),
    Door(
        (
            f"{_LOADER}reload.layerwise:_copy_and_restore_kernel_tensors",
            f"{_LOADER}reload.layerwise:_finalize_attention_layer",
            f"{_LOADER}reload.layerwise:_layerwise_process",
            f"{_LOADER}reload.layerwise:_reload_attention_scales",
            f"{_LOADER}reload.meta:get_numel_loaded",
        ),
        "cannot",
        "vLLM's own layerwise reload, which an update takes the place of: it is never begun for a model that is followed",
    ),
    Door(
        (
            f"{_LOADER}utils:process_weights_after_loading",
            f"{_LOADER}utils:device_loading_context",
        ),
        "followed",
        "after the first load it is the end of an update (`fp8.vllm.process_weights_after_loading`)",
    ),
    Door(
        (
            f"{_LOADER}weight_utils:composed_weight_loader.composed_loader",
            f"{_LOADER}weight_utils:default_weight_loader",
            f"{_LOADER}weight_utils:load_attention_sink",
        ),
        "followed",
        "loaders of single parameters, which `load_weights` calls; within an update they write into staged tensors",
    ),
)

#: Public methods of vLLM's workers that write no weight.
VLLM_HARMLESS = frozenset(
    "annotate_profile check_health compile_or_warm_up_model compute_weight_checksums determine_available_memory "
    "execute_dummy_batch execute_model get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats "
    "get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection get_simple_cpu_offload_num_cpu_blocks "
    "get_supported_kv_cache_layouts get_supported_tasks init_device initialize_from_config list_loras profile "
    "randomize_dummy_inputs release_late_interaction_query_cache reset_encoder_cache reset_mm_cache sample_tokens "
    "save_sharded_state save_tensorized_model set_kv_cache_layout shutdown sleep_mode_backend "
    "supports_draft_weight_updates synchronize_device take_draft_token_ids update_config update_environment_variables "
    "update_max_model_len vocab_size".split()
)
