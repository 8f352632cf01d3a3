/* Device memory is host memory: allocation, copies, and what kind of memory an address is in. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "runtime.h"
#include "settings.h"

enum kind { UNKNOWN, PINNED, DEVICE };
struct range {
  char *start;
  size_t bytes;
  enum kind kind;
  int device;
  int file; /* behind memory that other processes may open; 0 if none may */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static size_t count, room, in_use;

static void add(void *start, size_t bytes, enum kind kind, int file) {
  pthread_mutex_lock(&lock);
  if (count == room) {
    room = room ? 2 * room : 1024;
    ranges = realloc(ranges, room * sizeof *ranges);
  }
  ranges[count++] = (struct range){start, bytes, kind, fake_cuda_current_device(), file};
  if (kind == DEVICE) in_use += bytes;
  pthread_mutex_unlock(&lock);
}

/* Also called by the driver's virtual memory, which maps device memory by itself. */
API void fake_cuda_add_range(void *start, size_t bytes, int kind) { add(start, bytes, kind, 0); }

static struct range drop(void *start) {
  struct range found = {0};
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++) {
    if (ranges[i].start != start) continue;
    found = ranges[i];
    ranges[i] = ranges[--count];
    if (found.kind == DEVICE) in_use -= found.bytes;
    break;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

API void fake_cuda_drop_range(void *start) { drop(start); }

static struct range around(const char *address) {
  struct range found = {0};
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count && !found.start; i++)
    if (address >= ranges[i].start && address < ranges[i].start + ranges[i].bytes) found = ranges[i];
  pthread_mutex_unlock(&lock);
  return found;
}

static cudaError_t mapped(void **out, int file, size_t bytes) {
  void *start = file < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) return close(file), fail(cudaErrorMemoryAllocation);
  add(start, bytes, DEVICE, file);
  return *out = start, cudaSuccess;
}

API cudaError_t cudaMalloc(void **out, size_t bytes) {
  *out = NULL;
  if (!bytes) return cudaSuccess;
  size_t whole = (bytes + 4095) & ~(size_t)4095;
  if (in_use + whole > device_bytes()) return fail(cudaErrorMemoryAllocation);
  int file = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file >= 0) ftruncate(file, whole);
  cudaError_t error = mapped(out, file, whole);
  if (!error && fill_byte() >= 0) memset(*out, fill_byte(), whole);
  return error;
}

API cudaError_t cudaFree(void *start) {
  struct range found = start ? drop(start) : (struct range){0};
  if (found.start) munmap(found.start, found.bytes);
  if (found.file) close(found.file);
  return cudaSuccess;
}

/* An IPC handle says whose file the memory is; as on a GPU, it must be there until all have opened it. */
struct shared {
  int pid, file;
  size_t bytes;
};
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *start) {
  struct range found = around(start);
  if (!found.file) return fail(cudaErrorInvalidValue);
  struct shared whose = {getpid(), found.file, found.bytes};
  memset(out, 0, sizeof *out);
  memcpy(out, &whose, sizeof whose);
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
  struct shared whose;
  char path[64];
  memcpy(&whose, &handle, sizeof whose);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", whose.pid, whose.file);
  return mapped(out, open(path, O_RDWR | O_CLOEXEC), whose.bytes);
}
API cudaError_t cudaIpcCloseMemHandle(void *start) { return cudaFree(start); }

API cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
API cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

API cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return fail(cudaErrorMemoryAllocation);
  fake_cuda_add_range(*out, bytes, PINNED);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaError_t cudaFreeHost(void *start) {
  drop(start);
  free(start);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
  fake_cuda_add_range(start, bytes, PINNED);
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *start) {
  drop(start);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
  *out = host;
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = device_bytes();
  *free_bytes = *total > in_use ? *total - in_use : 0;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  struct range found = around(address);
  memset(out, 0, sizeof *out);
  out->type = found.kind == DEVICE   ? cudaMemoryTypeDevice
              : found.kind == PINNED ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
  out->device = found.kind ? found.device : -2;
  out->devicePointer = found.kind ? (void *)address : NULL;
  out->hostPointer = found.kind == PINNED ? (void *)address : NULL;
  return cudaSuccess;
}

static cudaError_t copied(void *to, const void *from, size_t bytes) {
  memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return copied(to, from, bytes);
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  return copied(to, from, bytes);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t stream) {
  return copied(to, from, bytes);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemset(to, value, bytes);
}
/* Constants of kernels, which never run. */
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t at, enum cudaMemcpyKind kind) {
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  *out = (void *)symbol;
  return cudaSuccess;
}
