/* libnvidia-ml.so.1: vLLM asks it for name and capability before CUDA is initialised. */
#include <stdio.h>
#include <string.h>
#include "settings.h"

enum { OK, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { FIRST_DEVICE = 0x20 }; /* a handle is this number and the index */
struct memory {
  unsigned long long total, free, used;
};

int nvmlInit(void) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return "fake NVML error"; }
int nvmlDeviceGetCount_v2(unsigned *out) { return *out = device_count(), OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  *out = (void *)(FIRST_DEVICE + (size_t)index);
  return index < device_count() ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  unsigned last = 0; /* the last byte of the first device's is 'e' */
  sscanf(uuid + strlen(uuid) - 2, "%2x", &last);
  return nvmlDeviceGetHandleByIndex_v2(last - 'e', out);
}
int nvmlDeviceGetName(void *device, char *out, unsigned room) { return snprintf(out, room, "%s", device_name()), OK; }
int nvmlDeviceGetUUID(void *device, char *out, unsigned room) {
  return snprintf(out, room, "GPU-66616b65-2d63-7564-612d-6465766963%02x", (int)('e' + (size_t)device - FIRST_DEVICE)), OK;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = capability() / 10;
  *minor = capability() % 10;
  return OK;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
  out->total = out->free = device_bytes();
  out->used = 0;
  return OK;
}
int nvmlDeviceGetIndex(void *device, unsigned *out) { return *out = (size_t)device - FIRST_DEVICE, OK; }
int nvmlDeviceGetNumaNodeId(void *device, unsigned *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int which, int *out) { return *out = 1, OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned room) { return snprintf(out, room, "580.00"), OK; }
int nvmlSystemGetCudaDriverVersion(int *out) { return *out = CUDA_VERSION_REPORTED, OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = CUDA_VERSION_REPORTED, OK; }
/* torch looks these up before it asks for any, which expandable segments do. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
  unsigned slot = 4; /* as cudaDeviceGetPCIBusId names the first */
  sscanf(bus, "%*x:%*x:%x", &slot);
  return nvmlDeviceGetHandleByIndex_v2(slot < 4 ? slot : slot - 4, out); /* torch 2.14 asks by properties, where all are 0 */
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *out) { return *count = 0, OK; }
