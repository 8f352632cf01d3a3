/* Kernels loaded through the driver: none loads, and a launch is refused. Arguments do not matter, so none is declared. */
#include <stdio.h>

enum { NOT_SUPPORTED = 801, INVALID_FUNCTION = 98 };

static int refuse(void) {
  fprintf(stderr, "[fake cuda] kernel launch refused: one that was loaded through the driver\n");
  return INVALID_FUNCTION;
}
int cuLaunchKernel() { return refuse(); }
int cuLaunchKernelEx() { return refuse(); }
int cuModuleLoadData() { return NOT_SUPPORTED; }
int cuModuleGetFunction() { return NOT_SUPPORTED; }
int cuModuleUnload() { return 0; }
int cuLinkCreate_v2() { return NOT_SUPPORTED; }
int cuTensorMapEncodeTiled() { return 0; }
int cuFuncGetAttribute(int *out) { return *out = 0; }
int cuFuncSetAttribute() { return 0; }
int cuFuncSetCacheConfig() { return 0; }
int cuOccupancyMaxActiveClusters() { return NOT_SUPPORTED; }
