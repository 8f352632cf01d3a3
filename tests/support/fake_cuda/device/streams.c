/* Streams and events: everything is done before the call returns, so each of them is idle at once. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include "runtime.h"

static uintptr_t last_handle = 0x1000;
#define NEW_HANDLE(out) (*(out) = (void *)__sync_add_and_fetch(&last_handle, 16), cudaSuccess)

API cudaError_t cudaStreamCreate(cudaStream_t *out) { return NEW_HANDLE(out); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return NEW_HANDLE(out); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int p) { return NEW_HANDLE(out); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { return *out = 0, cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  call(data);
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t *out) { return NEW_HANDLE(out); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { return NEW_HANDLE(out); }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t event) {
  return *out = (cudaIpcEventHandle_t){0}, cudaSuccess;
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *out, cudaIpcEventHandle_t handle) { return NEW_HANDLE(out); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
API cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t start, cudaEvent_t end) { return *out = 0.01f, cudaSuccess; }
