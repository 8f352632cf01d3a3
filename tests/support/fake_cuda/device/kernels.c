/* Kernels do not run: a launch is refused, named on stderr, and counted. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "runtime.h"
#include "settings.h"

struct kernel {
  const void *handle;
  const char *name;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel *kernels;
static size_t count, room;
static long refused;

API long fake_cuda_refused_launches(void) { return refused; }

API void **__cudaRegisterFatBinary(void *binary) {
  void **handle = malloc(sizeof *handle);
  *handle = binary;
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}
API void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
API void __cudaRegisterManagedVar(void **h, void **v, char *a, const char *n, int e, size_t s, int c, int g) {}
API char __cudaInitModule(void **handle) { return 1; }
API void __cudaRegisterFunction(void **h, const char *function, char *device, const char *name, int limit, void *a,
                                void *b, void *c, void *d, int *warp) {
  pthread_mutex_lock(&lock);
  if (count == room) {
    room = room ? 2 * room : 1 << 16;
    kernels = realloc(kernels, room * sizeof *kernels);
  }
  kernels[count++] = (struct kernel){function, name};
  pthread_mutex_unlock(&lock);
}

static cudaError_t refuse(const void *handle) {
  const char *name = "a kernel that was not registered";
  for (size_t i = 0; i < count; i++)
    if (kernels[i].handle == handle) name = kernels[i].name;
  __sync_add_and_fetch(&refused, 1);
  fprintf(stderr, "[fake cuda] kernel launch refused: %.300s\n", name);
  return fail(cudaErrorInvalidDeviceFunction);
}

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configured;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configured.grid, *block = configured.block, *shared = configured.shared;
  *(void **)stream = configured.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *f) { return *out = (cudaKernel_t)f, cudaSuccess; }
API cudaError_t cudaGetKernel(cudaKernel_t *out, const void *f) { return *out = (cudaKernel_t)f, cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return refuse(k); }
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return refuse(k); }
API cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return refuse(k); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *k, void **a) { return refuse(k); }
API cudaError_t cudaLaunchCooperativeKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return refuse(k); }

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = THREADS_PER_BLOCK;
  out->numRegs = 64;
  out->binaryVersion = out->ptxVersion = capability();
  out->maxDynamicSharedSizeBytes = SHARED_MEMORY_OPT_IN;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int value) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int b, size_t s) {
  return *out = 1, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int b, size_t s,
                                                                       unsigned flags) {
  return *out = 1, cudaSuccess;
}

/* Libraries ask the runtime for functions of the driver, by name without the suffix of the newer form. */
static int unknown_driver_function(void) {
  fprintf(stderr, "[fake cuda] an unknown driver function was called\n");
  return 801; /* CUDA_ERROR_NOT_SUPPORTED */
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
  static void *driver;
  char newer[160];
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  snprintf(newer, sizeof newer, "%s_v2", name);
  *out = driver ? dlsym(driver, newer) : NULL;
  if (!*out && driver) *out = dlsym(driver, name);
  if (!*out && getenv("FAKE_CUDA_TRACE")) fprintf(stderr, "[fake cuda] driver function unknown: %s\n", name);
  if (!*out) *out = (void *)unknown_driver_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

/* DeepGEMM opens cuBLASLt when it is first used, for products that have stand-ins; the real one asks the driver what nobody
   documents. */
API int cublasLtCreate(void **out) { return *out = out, 0; }
API int cublasLtDestroy(void *handle) { return 0; }
