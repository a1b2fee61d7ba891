/* Stands for libcuda where host memory is the GPU's. FAKE_CAPTURING, FAKE_FULL and FAKE_OLD in the
 * environment make it a stream under capture, a full GPU, a GPU of compute capability 7.0. */
#include <stdlib.h>

static long allocations;
long fake_allocations(void) { return allocations; }
int cuCtxGetCurrent(void** context) { return *context = &allocations, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)attribute, (void)device;
  return *value = getenv("FAKE_OLD") ? 7 : 9, 0;
}
int cuStreamGetCtx(void* stream, void** context) {
  return *context = stream == (void*)0xbad ? stream : &allocations, 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  return *status = getenv("FAKE_CAPTURING") != NULL, 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, 0; }
int cuMemGetInfo_v2(size_t* left, size_t* total) {
  *total = (size_t)1 << 36;
  return *left = getenv("FAKE_FULL") ? *total / 20 : *total, 0;
}
int cuMemAlloc_v2(void** memory, size_t bytes) {
  __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
  return *memory = aligned_alloc(256, bytes), *memory == NULL;
}
int cuMemFree_v2(void* memory) { return free(memory), 0; }
