/* What the fake device is told by variables, for the runtime, the driver and NVML alike. */
#ifndef FAKE_CUDA_SETTINGS_H
#define FAKE_CUDA_SETTINGS_H
#include <stddef.h>
#include <stdlib.h>

/* FAKE_CUDA_CAPABILITY=90: compute capability 9.0. */
static inline int capability(void) {
  const char *text = getenv("FAKE_CUDA_CAPABILITY");
  return text ? atoi(text) : 90;
}

/* FAKE_CUDA_DEVICES: how many there are, 1 if it is not said, 0 where all are hidden. Each process has memory of its own. */
static inline int device_count(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible && !*visible) return 0;
  const char *text = getenv("FAKE_CUDA_DEVICES");
  return text ? atoi(text) : 1;
}

/* FAKE_CUDA_MIB: memory of the device. */
static inline size_t device_bytes(void) {
  const char *text = getenv("FAKE_CUDA_MIB");
  return (size_t)(text ? atol(text) : 4096) << 20;
}

/* FAKE_CUDA_FILL: the byte that new memory is filled with, or -1 for none. 127 gives finite numbers, 255 NaN. */
static inline int fill_byte(void) {
  const char *text = getenv("FAKE_CUDA_FILL");
  return text ? atoi(text) & 255 : -1;
}

static inline const char *device_name(void) {
  switch (capability()) {
    case 80: return "NVIDIA A100-SXM4-80GB";
    case 89: return "NVIDIA L40S";
    case 90: return "NVIDIA H100 80GB HBM3";
    default: return "NVIDIA B200";
  }
}

static inline int multiprocessors(void) {
  switch (capability()) {
    case 80: return 108;
    case 89: return 142;
    case 90: return 132;
    default: return 148;
  }
}

enum { SHARED_MEMORY_OPT_IN = 232448, THREADS_PER_BLOCK = 1024, CUDA_VERSION_REPORTED = 13000 };
#endif
