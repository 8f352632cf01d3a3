/* libcuda.so.1: answers about the device, and virtual memory by mmap, which vLLM's sleep mode allocates from. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "settings.h"

enum { DEVICE_MEMORY = 2, GRANULARITY = 2 << 20 };
static const CUcontext the_context = (CUcontext)0x10;

/* The runtime library keeps the ranges; without it (a process that loads the driver alone) nobody asks for them. */
static void note_range(void *start, size_t bytes) {
  void (*add)(void *, size_t, int) = dlsym(RTLD_DEFAULT, "fake_cuda_add_range");
  if (add) add(start, bytes, DEVICE_MEMORY);
}
static void forget_range(void *start) {
  void (*drop)(void *) = dlsym(RTLD_DEFAULT, "fake_cuda_drop_range");
  if (drop) drop(start);
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *out) { return *out = CUDA_VERSION_REPORTED, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *out) { return *out = device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int index) { return *out = index, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *out, int room, CUdevice device) { return snprintf(out, room, "%s", device_name()), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device) { return *out = device_bytes(), CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = multiprocessors(); break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = SHARED_MEMORY_OPT_IN; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = THREADS_PER_BLOCK; break;
    default: *out = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) { return *out = the_context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *out) {
  int (*current)(void) = dlsym(RTLD_DEFAULT, "fake_cuda_current_device");
  return *out = current ? current() : 0, CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *out) { return *out = the_context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) { return *out = the_context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
  static char text[64];
  snprintf(text, sizeof text, "fake driver error %d", error);
  return *out = text, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **out) { return cuGetErrorString(error, out); }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
  memset(out, 0, 8);
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
  char newer[160];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out) *out = dlsym(RTLD_DEFAULT, newer);
  if (result) *result = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Virtual memory: a reservation is a mapping without access, an allocation a memory file, mapped over it. */
CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
  return *out = GRANULARITY, CUDA_SUCCESS;
}
static void *no_access(void *at, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  return mmap(at, bytes, PROT_NONE, flags, -1, 0);
}
CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr at, unsigned long long flags) {
  void *start = no_access(NULL, bytes);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  return *out = (CUdeviceptr)start, CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) { return munmap((void *)start, bytes), CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *p, unsigned long long f) {
  int file = memfd_create("fake_cuda", 0);
  if (file < 0 || ftruncate(file, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  /* Memory that comes back after sleep holds what others left there, never zeros. */
  void *view = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  memset(view, fill_byte() < 0 ? 0x7f : fill_byte(), bytes);
  munmap(view, bytes);
  return *out = file, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle file) { return close((int)file), CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle file, unsigned long long f) {
  void *view = mmap((void *)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)file, offset);
  if (view == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  note_range(view, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  forget_range((void *)at);
  no_access((void *)at, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *d, size_t n) { return CUDA_SUCCESS; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  *total = device_bytes();
  *free_bytes = *total * 3 / 4;
  return CUDA_SUCCESS;
}
