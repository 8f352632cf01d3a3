/* Graphs: redirect.cpp keeps what was called while a capture was on, and runs it again when a graph is launched. */
#include <cuda_runtime_api.h>
#include "runtime.h"

typedef unsigned long long graph_id;
static graph_id last, capturing;
static long launches;
static void (*replay)(graph_id), (*forget)(graph_id);

API graph_id fake_cuda_capturing(void) { return capturing; }
API long fake_cuda_graph_launches(void) { return launches; }
API void fake_cuda_on_graph(void (*on_launch)(graph_id), void (*on_destroy)(graph_id)) { replay = on_launch, forget = on_destroy; }

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (capturing || !replay) return fail(cudaErrorStreamCaptureUnsupported);
  capturing = ++last;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  *out = (cudaGraph_t)capturing;
  capturing = 0;
  return *out ? cudaSuccess : fail(cudaErrorStreamCaptureUnmatched);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* One capture at a time, and every stream takes part: streams here have no order among each other to keep. */
static enum cudaStreamCaptureStatus status(void) {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  return *out = status(), cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *out, graph_id *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *count) {
  *out = status();
  if (id) *id = capturing;
  if (graph) *graph = (cudaGraph_t)capturing;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return *out = (cudaGraphExec_t)graph, cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return *out = (cudaGraphExec_t)graph, cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  return *count = 1, cudaSuccess;
}
API cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  __sync_add_and_fetch(&launches, 1);
  replay((graph_id)graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  forget((graph_id)graph);
  return cudaSuccess;
}
