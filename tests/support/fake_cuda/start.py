"""Redirect torch's CUDA operators, and replace vLLM's, in a process that was started with FAKE_CUDA=1.

The environment's `fake_cuda.pth` imports this at start, before torch is there."""

import functools

import wrapt

REDIRECTED: dict[str, object] = {}
"""After the import of torch: `operators`, how many run on the CPU, and `cuda_only`, the names of those that cannot."""


@wrapt.when_imported("torch")
def redirect(torch: object) -> None:
    import fake_cuda_redirect

    REDIRECTED["operators"], REDIRECTED["cuda_only"] = fake_cuda_redirect.install()


@wrapt.when_imported("vllm._custom_ops")
def replace_operators(custom_ops: object) -> None:
    from fake_cuda import standins

    standins.register()


@wrapt.when_imported("vllm.utils.deep_gemm")
def replace_deep_gemm(binding: object) -> None:
    from fake_cuda.standins import deep_gemm

    deep_gemm.use(binding)


@wrapt.when_imported("vllm.platforms.cuda")
def meet_over_gloo(cuda: object) -> None:
    """Ranks meet over gloo in NCCL's place; in a graph, the sum over ranks is one call that meets again."""
    cuda.CudaPlatformBase.dist_backend = "gloo"


@wrapt.when_imported("vllm.distributed.device_communicators.cuda_communicator")
def meet_in_graphs(communicators: object) -> None:
    from fake_cuda.graphs import whole

    communicator = communicators.CudaCommunicator
    communicator.all_reduce = whole(communicator.all_reduce)


@wrapt.when_imported("vllm.v1.attention.backends.mla.prefill.flash_attn")
@wrapt.when_imported("vllm.v1.attention.backends.flash_attn")
def replace_attention(flash_attn: object) -> None:
    from fake_cuda.standins import attention

    attention.use(flash_attn)


@wrapt.when_imported("vllm.v1.sample.ops.topk_topp_sampler")
def sample_in_torch(sampler) -> None:
    """Triton's kernel would run for minutes in its interpreter."""
    if hasattr(sampler, "apply_top_k_top_p_triton"):
        sampler.apply_top_k_top_p_triton = lambda logits, k, p, *_, **__: sampler.apply_top_k_top_p_pytorch(
            logits, k, p
        )


@wrapt.when_imported("vllm.v1.worker.gpu.sample.gumbel")
def draw_in_the_interpreter(gumbel) -> None:
    """vLLM 0.24 calls a function of CUDA's device library, which Triton's interpreter has not."""
    from types import SimpleNamespace

    if hasattr(gumbel, "tldevice"):
        gumbel.tldevice = SimpleNamespace(log1p=lambda x: gumbel.tl.log(1 + x))


@wrapt.when_imported("triton.runtime.interpreter")
def capture_kernels(interpreter) -> None:
    """Let a graph keep a kernel in Triton's interpreter as one call."""
    from fake_cuda.graphs import whole

    interpreter.GridExecutor.__call__ = whole(interpreter.GridExecutor.__call__)


@wrapt.when_imported("vllm.distributed.device_communicators.cuda_wrapper")
def find_our_runtime(wrapper) -> None:
    """vLLM takes the first mapped library called libcudart, which may be a copy inside another package."""
    import os

    wrapper.find_loaded_library = lambda name: os.environ["LD_PRELOAD"].partition(":")[0]


@wrapt.when_imported("sgl_kernel.gemm")
@wrapt.when_imported("sglang.jit_kernel.clamp_position")
@wrapt.when_imported("sglang.jit_kernel.gptq_marlin_repack")
@wrapt.when_imported("sglang.jit_kernel.per_tensor_quant_fp8")
@wrapt.when_imported("sglang.jit_kernel.per_token_group_quant_8bit")
def compile_nothing(kernels) -> None:
    from fake_cuda.standins import sglang

    for name, function in vars(sglang).items():
        if getattr(function, "__module__", "") == sglang.__name__ and hasattr(kernels, name):
            setattr(kernels, name, function)


@wrapt.when_imported("sglang.srt.layers.utils.multi_platform")
def forward_in_torch(layers) -> None:
    """Norms, activations and positions; their kernels are compiled at run time."""
    layers.MultiPlatformOp.dispatch_forward = lambda layer: layer.forward_native


@wrapt.when_imported("torch.backends.cuda")
def attend_in_plain_torch(backends) -> None:
    """torch's fused attention has kernels for CUDA alone."""
    for enable in (backends.enable_flash_sdp, backends.enable_mem_efficient_sdp, backends.enable_cudnn_sdp):
        enable(False)


@wrapt.when_imported("torch.distributed.distributed_c10d")
def group_over_gloo(groups) -> None:
    """A trainer's groups over NCCL are gloo's, which takes tensors of a device through the host."""
    original = groups._new_process_group_helper

    @functools.wraps(original)
    def helper(size, rank, ranks, backend, *arguments, **keywords):
        if "nccl" in str(backend):
            backend = groups.Backend(str(backend).replace("nccl", "gloo"))
            keywords["backend_options"] = None
        return original(size, rank, ranks, backend, *arguments, **keywords)

    groups._new_process_group_helper = helper
    groups.Backend.default_device_backend_map["cuda"] = groups.Backend.GLOO
