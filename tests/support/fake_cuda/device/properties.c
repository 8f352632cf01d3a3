/* What device there is, and which errors are open. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include "runtime.h"
#include "settings.h"

static __thread cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last = error; }

API cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError(void) { return last; }
API const char *cudaGetErrorString(cudaError_t error) {
  static __thread char text[64];
  snprintf(text, sizeof text, "fake CUDA error %d", (int)error);
  return text;
}
API const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

/* Every function of the real library that no file here defines: build.py generates a caller for each. */
API int fake_cuda_missing(const char *function) {
  if (getenv("FAKE_CUDA_TRACE")) fprintf(stderr, "[fake cuda] not implemented: %s\n", function);
  return fail(cudaErrorNotSupported);
}

static __thread int current;
API int fake_cuda_current_device(void) { return current; }
API cudaError_t cudaGetDeviceCount(int *out) { return *out = device_count(), cudaSuccess; }
API cudaError_t cudaGetDevice(int *out) { return *out = current, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  return current = device, cudaSuccess;
}
API cudaError_t cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
API cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *out) { return *out = CUDA_VERSION_REPORTED, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *out) { return *out = CUDA_VERSION_REPORTED, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *out, int a, int b) { return *out = 0, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
API cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
API cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device) {
  snprintf(out, room, "0000:00:%02x.0", 4 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "%s", device_name());
  memcpy(out->uuid.bytes, "fake-cuda-device", 16);
  out->uuid.bytes[15] += device; /* as NVML says it */
  out->major = capability() / 10;
  out->minor = capability() % 10;
  out->totalGlobalMem = device_bytes();
  out->multiProcessorCount = multiprocessors();
  out->warpSize = 32;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = THREADS_PER_BLOCK;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = 2048;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = SHARED_MEMORY_OPT_IN;
  out->sharedMemPerMultiprocessor = SHARED_MEMORY_OPT_IN + 1024;
  out->l2CacheSize = 50 << 20;
  out->memoryBusWidth = 5120;
  out->totalConstMem = 65536;
  out->memPitch = 2147483647;
  out->asyncEngineCount = 3;
  out->unifiedAddressing = out->managedMemory = out->concurrentKernels = 1;
  out->cooperativeLaunch = out->ECCEnabled = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *out = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *out = multiprocessors(); break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = SHARED_MEMORY_OPT_IN; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = SHARED_MEMORY_OPT_IN + 1024; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = THREADS_PER_BLOCK; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrL2CacheSize: *out = 50 << 20; break;
    case cudaDevAttrCooperativeLaunch: *out = 1; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    default: *out = 0;
  }
  return cudaSuccess;
}
