/* Stands for libcuda where host memory is the GPU's. FAKE_CAPTURING, FAKE_FULL and FAKE_OLD in the
 * environment make it a stream under capture, a full GPU, a GPU of compute capability 7.0;
 * FAKE_NO_OBJECTS, a driver whose graphs hold no user objects. */
#include <stdint.h>
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

/* Captures: what two streams capture belongs to one graph. A graph is the objects that it holds.
 * As a driver does, this one refuses to go on with a capture beside which it was asked what it must
 * not be asked then. */
typedef struct {
  void* held;
  void (*destroy)(void*);
} object;
typedef struct {
  object* objects[64];
  int count;
  unsigned long long id;
  int invalid;
} graph;
static graph* capturing;
static void* captured[2];

graph* fake_begin_capture(void* stream, void* other) {
  static unsigned long long captures;
  captured[0] = stream, captured[1] = other;
  capturing = calloc(1, sizeof(graph));
  return capturing->id = ++captures, capturing;
}
void fake_end_capture(void) { capturing = NULL; }
void fake_destroy_graph(graph* which) {
  for (int i = 0; i < which->count; ++i) {
    which->objects[i]->destroy(which->objects[i]->held);
    free(which->objects[i]);
  }
  free(which);
}
static int is_captured(void* stream) {
  return capturing != NULL && (stream == captured[0] || stream == captured[1]);
}
int cuStreamIsCapturing(void* stream, int* status) {
  return *status = getenv("FAKE_CAPTURING") != NULL || is_captured(stream), 0;
}
static __thread int capture_mode;
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  return capture_mode = *mode, *mode = before, 0;
}
static int unsupported(int in_any_mode) {
  if (capturing == NULL || (capture_mode == 2 && !in_any_mode)) return 0;
  return capturing->invalid = 1, 900;
}
int cuStreamGetId(void* stream, unsigned long long* id) {
  return *id = (unsigned long long)(uintptr_t)stream, is_captured(stream) ? unsupported(1) : 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, graph** of,
                              const void** nodes, size_t* count) {
  (void)nodes, (void)count;
  *status = is_captured(stream);
  if (*status && capturing->invalid) *status = 2;
  if (*status == 1) *id = capturing->id, *of = capturing;
  return 0;
}
int cuUserObjectCreate(object** made, void* held, void (*destroy)(void*), unsigned references,
                       unsigned flags) {
  *made = malloc(sizeof(object));
  (*made)->held = held, (*made)->destroy = destroy;
  return references != 1 || flags != 1;
}
int cuUserObjectRelease(object* which, unsigned references) {
  which->destroy(which->held);
  return free(which), references != 1;
}
int cuGraphRetainUserObject(graph* of, object* held, unsigned references, unsigned flags) {
  if (getenv("FAKE_NO_OBJECTS") || of->count == 64 || references != 1 || flags != 1) return 1;
  return of->objects[of->count++] = held, 0;
}
static int full_to; /* percent */
void fake_fill(int percent) { full_to = percent; }
int cuMemGetInfo_v2(size_t* left, size_t* total) {
  *total = (size_t)1 << 36;
  *left = *total - *total / 100 * (size_t)full_to;
  if (getenv("FAKE_FULL")) *left = *total / 20;
  return 0;
}
int cuMemsetD32Async(uint32_t* to, unsigned value, size_t count, void* stream) {
  (void)stream;
  for (size_t i = 0; i < count; ++i) to[i] = value;
  return 0;
}
int cuMemAlloc_v2(void** memory, size_t bytes) {
  if (unsupported(0)) return 900;
  __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
  return *memory = aligned_alloc(256, bytes), *memory == NULL;
}
static long freed;
long fake_freed(void) { return freed; }
int cuMemFree_v2(void* memory) {
  if (unsupported(0)) return 900;
  __atomic_add_fetch(&freed, 1, __ATOMIC_SEQ_CST);
  return free(memory), 0;
}
