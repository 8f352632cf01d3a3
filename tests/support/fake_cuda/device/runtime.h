/* What the files of the fake libcudart share. */
#ifndef FAKE_CUDA_RUNTIME_H
#define FAKE_CUDA_RUNTIME_H
#include <cuda_runtime_api.h>
#define API __attribute__((visibility("default")))

/* Remember an error for cudaGetLastError, and return it. */
cudaError_t fail(cudaError_t error);

/* The device of this thread. */
int fake_cuda_current_device(void);
#endif
