"""Name every function of SGLang that can write weights after they were loaded, and what becomes of it; see `door_table`.

A door is ``request NAME``, which a scheduler takes from whoever may send it requests, or ``module:function`` below
``sglang.srt``.
"""

from __future__ import annotations

from flashpatch.verify.door_table import Door

_RUNNER = "model_executor.model_runner:ModelRunner."
_UPDATER = "model_executor.model_runner_components.weight_updater:WeightUpdater."
_MANAGER = "managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager."
_MIXIN = "managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin."
_LOADER = "model_loader.loader:"

SGLANG: tuple[Door, ...] = (
    Door(
        (
            "request UpdateWeightsFromTensorReqInput",
            f"{_UPDATER}update_weights_from_tensor",
            f"{_UPDATER}_update_weights_from_flattened_bucket",
            f"{_RUNNER}update_weights_from_tensor",
            f"{_RUNNER}_update_weights_from_flattened_bucket",
        ),
        "followed",
        "each is a bucket of an update (`fp8.sglang.update_weights_from_tensor`); `load_format=direct`, and loaders named by "
        "`custom_weight_loader`, write past `load_weights` and are refused",
    ),
    Door(
        (
            "request UpdateWeightsFromDistributedReqInput",
            f"{_UPDATER}load_weights_from_distributed",
            f"{_UPDATER}update_weights_from_distributed",
            f"{_UPDATER}_update_bucketed_weights_from_distributed",
            f"{_RUNNER}update_weights_from_distributed",
            f"{_RUNNER}_update_bucketed_weights_from_distributed",
        ),
        "followed",
        "each is a bucket of an update (`fp8.sglang.load_weights_from_distributed`)",
    ),
    Door(
        (
            "request UpdateWeightFromDiskReqInput",
            f"{_UPDATER}update_weights_from_disk",
            f"{_RUNNER}update_weights_from_disk",
            f"{_LOADER}DefaultModelLoader.load_weights_and_postprocess",
            f"{_LOADER}DefaultModelLoader.load_weights_only",
            f"{_LOADER}DefaultModelLoader.postprocess_weights",
            f"{_LOADER}DefaultModelLoader.restore_weights_before_loading",
        ),
        "followed",
        "a whole update (`fp8.sglang.runner_update_weights_from_disk`)",
    ),
    Door(
        (
            "request BeginWeightUpdateReqInput",
            "request EndWeightUpdateReqInput",
            f"{_UPDATER}begin_weight_update",
            f"{_UPDATER}end_weight_update",
        ),
        "followed",
        "they open and commit an update; one that brought nothing through `load_weights` (P2P, RDMA) is refused",
    ),
    Door(
        (
            "request UpdateWeightsFromIPCReqInput",
            f"{_UPDATER}update_weights_from_ipc",
            f"{_RUNNER}update_weights_from_ipc",
            f"{_MANAGER}update_weights_from_ipc",
            f"{_MIXIN}update_weights_from_ipc",
            "managers.tp_worker:BaseTpWorker.update_weights_from_ipc",
            "speculative.base_spec_worker:BaseSpecWorker.update_weights_from_ipc",
            "speculative.eagle_worker_v2:EAGLEWorkerV2.update_weights_from_ipc",
            "speculative.multi_layer_eagle_worker_v2:MultiLayerEagleWorkerV2.update_weights_from_ipc",
            "entrypoints.engine:Engine.update_weights_from_ipc",
            "entrypoints.http_server:update_weights_from_ipc",
            "checkpoint_engine.checkpoint_engine_worker:SGLangCheckpointEngineWorkerExtension.update_weights_from_ipc",
            "checkpoint_engine.checkpoint_engine_worker:SGLangCheckpointEngineWorkerExtensionImpl.get_model_loader",
            "checkpoint_engine.checkpoint_engine_worker:SGLangCheckpointEngineWorkerExtensionImpl.get_post_hook",
        ),
        "refused",
        "in each call (`fp8.sglang.update_weights_from_ipc`): the checkpoint engine processes layers a second time",
    ),
    Door(
        (
            "request ReleaseMemoryOccupationReqInput",
            "request ResumeMemoryOccupationReqInput",
            f"{_MANAGER}resume_memory_occupation",
            f"{_MIXIN}resume_memory_occupation",
        ),
        "followed",
        "weights that SGLang does not keep are gone: requests are refused until a complete update "
        "(`fp8.sglang.release_memory_occupation`)",
    ),
    Door(
        ("request CheckWeightsReqInput", "utils.weight_checker:WeightChecker._reset_tensors"),
        "followed",
        "random values are no policy: requests are refused until a complete update (`fp8.sglang.check_weights`)",
    ),
    Door(
        ("request RpcReqInput",),
        "followed",
        "it calls a method of the scheduler by name; those that write weights are the other doors",
    ),
    Door(
        (
            "model_loader.auto_loader:StackedParamsDispatch.try_load",
            "model_loader.weight_utils:composed_weight_loader.composed_loader",
            "model_loader.weight_utils:default_weight_loader",
        ),
        "followed",
        "loaders of single parameters, which `load_weights` calls; within an update they write into staged tensors",
    ),
    Door(
        (
            "request LoadLoRAAdapterReqInput",
            "request LoadLoRAAdapterFromTensorsReqInput",
            "request UnloadLoRAAdapterReqInput",
            "entrypoints.engine:Engine.async_load_lora_adapter",
            "entrypoints.engine:Engine.load_lora_adapter",
            "entrypoints.http_server:load_lora_adapter",
            "managers.scheduler:Scheduler.load_lora_adapter",
            "managers.tokenizer_manager:TokenizerManager._resolve_lora_path",
            "managers.tp_worker:BaseTpWorker.load_lora_adapter",
            f"{_RUNNER}load_lora_adapter",
        ),
        "followed",
        "an adapter is staged, checked and put in place on all ranks or on none (`fp8.sglang_lora.load_lora_adapter`)",
    ),
    Door(
        ("lora.lora_manager:LoRAManager.init_lora_adapters",),
        "cannot",
        "while an engine with adapters is opened",
    ),
    Door(
        (
            "request ScaleElasticEPReqInput",
            "eplb.expert_location_updater:ExpertLocationUpdater.update",
            "eplb.expert_location_updater:_update_expert_weights_raw",
        ),
        "refused",
        "updates of an engine with `enable_eplb` are: experts move between ranks",
    ),
    Door(
        (
            "utils.offloader:OffloaderV1.maybe_offload_to_cpu",
            "utils.offloader:_ShmCpuParamOffloader.__init__",
            "utils.offloader:_move_param_to_cpu",
            "utils.offloader:update_param",
        ),
        "refused",
        "updates of an engine with `cpu_offload_gb` or `offload_group_size` are: the weights in use are copies",
    ),
    Door(
        (
            f"{_LOADER}_post_load_weights",
            f"{_LOADER}post_load_weights",
            "model_executor.model_runner:_gather_block_fp8_linear",
        ),
        "refused",
        "updates of a model that has `post_load_weights` are: it derives weights of its own, and replicas of them",
    ),
    Door(
        (
            f"{_LOADER}QuantizedRLModelLoader._apply_scale_update",
            f"{_LOADER}QuantizedRLModelLoader.load_weights_and_postprocess",
            f"{_LOADER}QuantizedRLModelLoader.rebinding_and_load_weights",
        ),
        "unseen",
        "`load_format=flash_rl` is SGLang's own loader for changing weights: FlashPatch stands aside for its models, and says so "
        "(`superseded`)",
    ),
    Door(
        (
            f"{_LOADER}BitsAndBytesModelLoader._load_weights",
            f"{_LOADER}DefaultModelLoader.commit_model_weights",
            f"{_LOADER}DefaultModelLoader.load_model",
            f"{_LOADER}DefaultModelLoader.prepare_model_for_capture",
            f"{_LOADER}DummyModelLoader.load_model",
            f"{_LOADER}GGUFModelLoader.load_model",
            f"{_LOADER}IncModelLoader.load_model",
            f"{_LOADER}PreshardedModelLoader._first_time_load_and_dump",
            f"{_LOADER}PreshardedModelLoader._load_from_presharded",
            f"{_LOADER}RemoteInstanceModelLoader.load_model_from_modelexpress",
            f"{_LOADER}RemoteInstanceModelLoader.load_model_from_remote_instance_by_nccl",
            f"{_LOADER}RemoteInstanceModelLoader.load_model_from_remote_instance_by_transfer_engine",
            f"{_LOADER}RemoteModelLoader._load_model_from_remote_fs",
            f"{_LOADER}RemoteModelLoader._load_model_from_remote_kv",
            f"{_LOADER}RunaiModelStreamerLoader.load_model",
            f"{_LOADER}ShardedStateLoader.load_model",
            f"{_LOADER}device_loading_context",
            f"{_LOADER}load_model_with_cpu_quantization",
            "model_loader.expert_pack_loader:ExpertPackModelLoader.load_model",
            "model_loader.post_load:_restore_tensor",
            "model_loader.post_load:stage_module_for_post_load",
            "model_loader.weight_utils:initialize_capture_safe_weights",
            "model_loader.weight_utils:initialize_dummy_weights",
        ),
        "cannot",
        "first loads, of a model that does not serve yet",
    ),
    Door(
        (
            "speculative.eagle_worker:EAGLEWorker.__init__",
            "speculative.eagle_worker_v2:EagleDraftWorker.init_lm_head",
            "speculative.frozen_kv_mtp_worker:FrozenKVMTPWorker.__init__",
            "speculative.frozen_kv_mtp_worker_v2:FrozenKVMTPDraftWorker.__init__",
            "speculative.multi_layer_eagle_worker:MultiLayerEagleWorker.__init__",
            "speculative.multi_layer_eagle_worker_v2:MultiLayerEagleDraftWorker.init_lm_head",
            "speculative.pp_draft_embedding:load_draft_embedding_from_checkpoint",
        ),
        "cannot",
        "while a drafter is constructed: it takes the target's embeddings and head, or loads its own",
    ),
    Door(
        ("managers.cache_controller:CacheOperation.__init__",),
        "cannot",
        "`data` is an attribute of an operation on the KV cache there",
    ),
    Door(
        (
            "model_executor.cuda_graph_buffer_registry:_grouped_foreach_copy_",
            "model_executor.cuda_graph_buffer_registry:_grouped_foreach_copy_._foreach_copy",
            "model_executor.cuda_graph_runner:_grouped_foreach_copy_.foreach_copy",
            "model_executor.runner_utils.buffers:_grouped_foreach_copy_.foreach_copy",
        ),
        "cannot",
        "they fill the inputs of captured graphs",
    ),
)

#: Requests of SGLang's scheduler that write no weight.
HARMLESS = frozenset(
    "AbortReq AddExternalCorpusReqInput AttachHiCacheStorageReqInput BatchTokenizedEmbeddingReqInput "
    "BatchTokenizedGenerateReqInput ClearHiCacheReqInput CloseSessionReqInput ConfigureLoggingReq "
    "ContinueGenerationReqInput DestroyWeightsUpdateGroupReqInput DetachHiCacheStorageReqInput DumperControlReqInput "
    "ExpertDistributionReq FlushCacheReqInput FreezeGCReq GetHiCacheL3LayoutReq GetInternalStateReq GetLoadsReqInput "
    "GetWeightsByNameReqInput InitWeightsSendGroupForRemoteInstanceReqInput InitWeightsUpdateGroupReqInput "
    "ListExternalCorporaReqInput OpenSessionReqInput PauseGenerationReqInput PdRoleSwitchReqInput ProfileReq "
    "RemoveExternalCorpusReqInput SendWeightsToRemoteInstanceReqInput SetInternalStateReq ShutdownReq SlowDownReqInput "
    "TokenizedEmbeddingReqInput TokenizedGenerateReqInput UpdateWeightVersionReqInput".split()
)
