/* Stands for libcuda and NVRTC on a machine with neither: one GPU of compute capability 9.0 whose
 * kernels do nothing. Counts calls, so that a test can say what a call of a program costs the host.
 * Compilation "succeeds" with any text. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define COUNTED(X)                                                                        \
  X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxPushCurrent) X(cuCtxPopCurrent)             \
  X(cuModuleLoadData) X(cuModuleGetFunction) X(cuFuncSetAttribute) X(cuLaunchKernelEx)    \
  X(cuTensorMapEncodeTiled) X(cuDeviceGetAttribute) X(cuOccupancyMaxActiveClusters)       \
  X(cuStreamIsCapturing) X(nvrtcCompileProgram) X(cuGraphLaunch)                          \
  X(cuGraphInstantiateWithFlags) X(cuGraphExecDestroy) X(cuStreamBeginCapture)

#define NUMBER(name) k_##name,
enum { COUNTED(NUMBER) kFunctions };
#define NAME(name) #name,
static const char* const names[] = {COUNTED(NAME)};
static long counts[kFunctions];
#define COUNT(name) __atomic_fetch_add(&counts[k_##name], 1, __ATOMIC_RELAXED)

/* For tests: calls so far; -1 for a function that is not counted. */
long fake_calls(const char* name) {
  for (int i = 0; i < kFunctions; ++i) {
    if (strcmp(names[i], name) == 0) return counts[i];
  }
  return -1;
}

/* The driver ------------------------------------------------------------------------------------*/

static char context_here, functions[4096], modules[1024];
static int modules_loaded, functions_found;

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int size, int device) {
  (void)device;
  strncpy(name, "a GPU that does nothing", (size_t)size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  COUNT(cuDeviceGetAttribute);
  switch (attribute) {
    case 16: *value = 132; break;          /* multiprocessors */
    case 36: *value = 3201000; break;      /* memory clock, kHz */
    case 37: *value = 6144; break;         /* memory bus, bits */
    case 38: *value = 62914560; break;     /* L2 bytes */
    case 97: *value = 232448; break;       /* shared memory of a block */
    case 75: *value = 9; break;            /* compute capability */
    default: *value = 0;
  }
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return (void)device, *bytes = 1u << 30, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return (void)device, *context = &context_here, 0;
}
int cuCtxGetCurrent(void** context) {
  COUNT(cuCtxGetCurrent);
  return *context = &context_here, 0;
}
int cuCtxPushCurrent_v2(void* context) { return (void)context, COUNT(cuCtxPushCurrent), 0; }
int cuCtxPopCurrent_v2(void** context) {
  COUNT(cuCtxPopCurrent);
  return *context = &context_here, 0;
}
int cuCtxGetDevice(int* device) {
  COUNT(cuCtxGetDevice);
  return *device = 0, 0;
}
int cuModuleLoadData(void** module, const void* image) {
  (void)image;
  COUNT(cuModuleLoadData);
  return *module = &modules[modules_loaded++ % 1024], 0;
}
int cuModuleUnload(void* module) { return (void)module, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module, (void)name;
  COUNT(cuModuleGetFunction);
  return *function = &functions[functions_found++ % 4096], 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return COUNT(cuFuncSetAttribute), 0;
}

/* A tensor map that only names what it describes. */
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* base,
                           const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                           const uint32_t* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  (void)type, (void)rank, (void)strides, (void)box, (void)steps;
  (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  COUNT(cuTensorMapEncodeTiled);
  memset(map, 0, 128);
  map[0] = (uint64_t)(uintptr_t)base;
  map[1] = extents[0];
  map[2] = extents[1];
  return 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* function, const void* config) {
  (void)function, (void)config;
  COUNT(cuOccupancyMaxActiveClusters);
  return *clusters = 66, 0;
}
int cuGetErrorName(int result, const char** name) { return (void)result, *name = "?", 0; }
int cuGetErrorString(int result, const char** text) { return (void)result, *text = "?", 0; }

/* Launches --------------------------------------------------------------------------------------*/

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const void* attributes;
  unsigned attribute_count;
} launch_config;

/* One launch, for tests: its stream, its blocks, and the first word of each of its first kWords
 * arguments (of a tensor map: the address that it describes). */
enum { kWords = 3 };
typedef struct {
  uint64_t stream, blocks, words[kWords];
} launch_record;
static launch_record recorded;
static long wanted = -1; /* how many launches come before it */

void fake_record(long launches_before) { wanted = launches_before; }
const launch_record* fake_recorded(void) { return &recorded; }

/* Of a graph: its launches, and what is recorded of the second. */
typedef struct {
  long launches;
  launch_record second;
} graph;
static graph graphs[1024], *capturing;
static long graphs_made;
static void* capturing_stream;
static int users_capture; /* whether a stream of the caller's is being captured */

void fake_user_captures(int yes) { users_capture = yes; }

static void record(const launch_config* config, void** arguments, launch_record* to) {
  to->stream = (uint64_t)(uintptr_t)config->stream;
  to->blocks = config->grid[0];
  for (int i = 0; i < kWords; ++i) memcpy(&to->words[i], arguments[i], 8);
}

int cuLaunchKernelEx(const launch_config* config, void* function, void** arguments, void** extra) {
  (void)function, (void)extra;
  if (capturing != NULL) {
    if (config->stream != capturing_stream) return 1;
    if (++capturing->launches == 2) record(config, arguments, &capturing->second);
    return 0;
  }
  if (COUNT(cuLaunchKernelEx) == wanted) record(config, arguments, &recorded);
  return 0;
}

/* Streams and graphs ----------------------------------------------------------------------------*/

int cuStreamCreate(void** stream, unsigned flags) { return *stream = (void*)77, flags != 1; }
int cuStreamDestroy_v2(void* stream) { return (void)stream, 0; }
int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  COUNT(cuStreamIsCapturing);
  return *status = users_capture, 0;
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  COUNT(cuStreamBeginCapture);
  capturing = &graphs[graphs_made++ % 1024];
  memset(capturing, 0, sizeof(graph));
  capturing_stream = stream;
  return mode != 2;
}
int cuStreamEndCapture(void* stream, void** made) {
  (void)stream;
  *made = capturing;
  capturing = NULL;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int now = 0;
  const int before = now;
  now = *mode;
  return *mode = before, 0;
}
int cuGraphInstantiateWithFlags(void** made, void* from, unsigned long long flags) {
  (void)flags;
  COUNT(cuGraphInstantiateWithFlags);
  return *made = from, 0;
}
int cuGraphDestroy(void* which) { return (void)which, 0; }
int cuGraphExecDestroy(void* which) { return (void)which, COUNT(cuGraphExecDestroy), 0; }
int cuGraphLaunch(void* which, void* stream) {
  const graph* launched = which;
  COUNT(cuGraphLaunch);
  if (wanted >= 0) {
    recorded = launched->second;
    recorded.stream = (uint64_t)(uintptr_t)stream;
  }
  return launched->launches == 0;
}

/* NVRTC -----------------------------------------------------------------------------------------*/

static const char code[] = "nothing";

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, 0; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, 0; }
int nvrtcCreateProgram(void** program, const char* source, const char* name, int headers,
                       const char* const* texts, const char* const* paths) {
  (void)source, (void)name, (void)headers, (void)texts, (void)paths;
  return *program = (void*)code, 0;
}
int nvrtcDestroyProgram(void** program) { return *program = NULL, 0; }
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  (void)program, (void)count, (void)options;
  return COUNT(nvrtcCompileProgram), 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) { return (void)program, *size = 0, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return (void)program, (void)log, 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) {
  return (void)program, *size = sizeof(code), 0;
}
int nvrtcGetCUBIN(void* program, char* text) {
  return (void)program, memcpy(text, code, sizeof(code)), 0;
}
int nvrtcGetPTXSize(void* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void* program, char* text) { return nvrtcGetCUBIN(program, text); }
const char* nvrtcGetErrorString(int result) { return (void)result, "?"; }
