/* Stands for libcuda and NVRTC on a machine with neither: one GPU of compute capability 9.0 whose
 * kernels do nothing. Counts calls, so that a test can say what a call of a program costs the host,
 * and writes down launches, so that two builds of the library can be compared. Compilation
 * "succeeds" with any text: a kernel's code is its text. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static char context_here;

/* A kernel: its name, the text that it is in, and how many bytes each argument has. */
enum { kMostArguments = 8 };
typedef struct {
  char* name;
  const char* text;
  int arguments, sizes[kMostArguments];
} function;

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
  COUNT(cuModuleLoadData);
  return *module = strdup(image), 0; /* functions keep it, after it was unloaded */
}
int cuModuleUnload(void* module) { return (void)module, 0; }

/* Tensors of a kernel's operands: fields of the struct in its text, but for one that nobody reads. */
static int tensors_in(const char* text) {
  int count = 0;
  const char* at = strstr(text, "struct Operands {");
  const char* end = at == NULL ? NULL : strstr(at, "};");
  for (; end != NULL && (at = strstr(at, "    Tensor ")) != NULL && at < end; ++at) {
    count += strncmp(at, "    Tensor none;", 16) != 0;
  }
  return count;
}

/* By the type that an argument is declared with. The sizes of structs are given to the compiler. */
static int size_of(const char* argument, const char* text) {
  if (strstr(argument, "TensorMap")) return 128;
  if (strstr(argument, "ProductArgs")) return PRODUCT_ARGS;
  if (strstr(argument, "PackedOperands")) return PACKED_OPERANDS;
  if (strstr(argument, "SplitArgs")) return SPLIT_ARGS;
  if (strstr(argument, "CopyExtents")) return 32;
  if (strstr(argument, "MatrixArray")) return 48;
  if (strstr(argument, "MatrixScale")) return 24;
  if (strstr(argument, "::Tensor ")) return TENSOR;
  if (strstr(argument, "::Params") || strstr(argument, "::Operands"))
    return TENSOR * tensors_in(text);
  if (strchr(argument, '*') || strstr(argument, "i64")) return 8;
  fprintf(stderr, "fake_cuda: an argument of unknown type: %s\n", argument);
  abort();
}

int cuModuleGetFunction(void** found, void* module, const char* name) {
  COUNT(cuModuleGetFunction);
  function* made = calloc(1, sizeof(function));
  made->name = strdup(name);
  made->text = module;
  char head[300];
  snprintf(head, sizeof(head), " %s(", name);
  const char* at = strstr(made->text, head);
  if (at == NULL) return 500; /* not found */
  at += strlen(head);
  for (int last = 0; !last; ++made->arguments) {
    const size_t length = strcspn(at, ",)");
    char* argument = strndup(at, length);
    made->sizes[made->arguments] = size_of(argument, made->text);
    free(argument);
    last = at[length] == ')';
    at += length + 1;
  }
  return *found = made, 0;
}
int cuFuncSetAttribute(void* of, int attribute, int value) {
  (void)of, (void)attribute, (void)value;
  return COUNT(cuFuncSetAttribute), 0;
}

/* A tensor map that only names what it describes. */
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* base,
                           const uint64_t* extents, const uint64_t* strides, const uint32_t* box,
                           const uint32_t* steps, int interleave, int swizzle, int promotion,
                           int fill) {
  (void)steps, (void)interleave, (void)fill;
  COUNT(cuTensorMapEncodeTiled);
  memset(map, 0, 128);
  map[0] = (uint64_t)(uintptr_t)base;
  map[1] = extents[0];
  map[2] = extents[1];
  map[3] = strides[0];
  map[4] = (uint64_t)box[0] << 32 | box[1];
  map[5] = (uint64_t)type << 32 | (uint64_t)swizzle << 16 | (uint64_t)promotion;
  for (uint32_t i = 2; i < rank; ++i) {
    map[3 * i] = extents[i];
    map[3 * i + 1] = strides[i - 1];
    map[3 * i + 2] = box[i];
  }
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
  unsigned id, padding, value[16];
} launch_attribute;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const launch_attribute* attributes;
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

/* The log of launches: a text, a line for each. */
static FILE* log_file;
static char* log_text;
static size_t log_bytes;

void fake_log_start(void) { log_file = open_memstream(&log_text, &log_bytes); }
const char* fake_log_end(void) { /* valid until the next one ends */
  static char* last = NULL;
  free(last);
  fclose(log_file);
  log_file = NULL;
  return last = log_text;
}

static unsigned long hash_of(const char* text) {
  unsigned long hash = 5381;
  while (*text) hash = hash * 33 + (unsigned char)*text++;
  return hash;
}

static void write_down(const launch_config* config, const function* kernel, void** arguments) {
  fprintf(log_file, "%s of %016lx, %u x %u threads, %u bytes", kernel->name, hash_of(kernel->text),
          config->grid[0], config->block[0], config->shared_bytes);
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const launch_attribute* attribute = &config->attributes[i];
    fprintf(log_file, ", attribute %u: %u", attribute->id, attribute->value[0]);
  }
  for (int i = 0; i < kernel->arguments; ++i) {
    fprintf(log_file, " |");
    for (int byte = 0; byte < kernel->sizes[i]; byte += 4) {
      uint32_t word;
      memcpy(&word, (char*)arguments[i] + byte, 4);
      fprintf(log_file, " %x", word);
    }
  }
  fprintf(log_file, "\n");
}

int cuLaunchKernelEx(const launch_config* config, void* kernel, void** arguments, void** extra) {
  (void)extra;
  if (log_file != NULL) write_down(config, kernel, arguments);
  if (capturing != NULL) {
    if (config->stream != capturing_stream) return 1;
    if (++capturing->launches == 2) record(config, arguments, &capturing->second);
    return 0;
  }
  if (COUNT(cuLaunchKernelEx) == wanted) record(config, arguments, &recorded);
  return 0;
}

/* cuBLASLt ----------------------------------------------------------------------------------------
 * Descriptions are what was said of them: the words that made them, then those of attributes. */

enum { kWordsOfIt = 16 };
typedef struct {
  uint64_t words[kWordsOfIt];
} description;
static int make(void** made, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  description* it = *made = calloc(1, sizeof(description));
  it->words[0] = a, it->words[1] = b, it->words[2] = c, it->words[3] = d;
  return 0;
}
static int set(void* of, int attribute, const void* value, size_t bytes) {
  return memcpy(&((description*)of)->words[4 + attribute], value, bytes), 0;
}
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void** handle) { return make(handle, 0, 0, 0, 0); }
int cublasLtDestroy(void* handle) { return free(handle), 0; }
int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
  return make(made, (uint64_t)compute, (uint64_t)scale, 0, 0);
}
int cublasLtMatmulDescDestroy(void* it) { return free(it), 0; }
int cublasLtMatmulDescSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return set(of, attribute, value, bytes);
}
int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  return make(made, (uint64_t)type, rows, columns, (uint64_t)ld);
}
int cublasLtMatrixLayoutDestroy(void* it) { return free(it), 0; }
int cublasLtMatrixLayoutSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return set(of, attribute, value, bytes);
}
int cublasLtMatmulPreferenceCreate(void** made) { return make(made, 0, 0, 0, 0); }
int cublasLtMatmulPreferenceDestroy(void* it) { return free(it), 0; }
int cublasLtMatmulPreferenceSetAttribute(void* of, int attribute, const void* value, size_t bytes) {
  return set(of, attribute, value, bytes);
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* how, void* a, void* b, void* c, void* d,
                                   void* preference, int wanted, void* results, int* count) {
  (void)handle, (void)how, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
  /* Behind the algorithm's eight words: the workspace that it uses. */
  const char* used = getenv("FAKE_LIBRARY_WORKSPACE");
  ((size_t*)results)[8] = used != NULL ? strtoul(used, NULL, 10) : 0;
  return *count = 1, 0;
}
static void write_description(const description* it) {
  for (int i = 0; i < kWordsOfIt; ++i) fprintf(log_file, " %llx", (unsigned long long)it->words[i]);
}
int cublasLtMatmul(void* handle, void* how, const void* alpha, const void* a, void* a_layout,
                   const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                   void* d, void* d_layout, const void* algorithm, void* workspace, size_t bytes,
                   void* stream) {
  (void)handle, (void)alpha, (void)beta, (void)c, (void)c_layout, (void)algorithm, (void)stream;
  if (log_file == NULL) return 0;
  fprintf(log_file, "cublasLtMatmul of %p and %p to %p with %p, %zu bytes |", a, b, d, workspace,
          bytes);
  write_description(how);
  write_description(a_layout);
  write_description(b_layout);
  write_description(d_layout);
  fprintf(log_file, "\n");
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

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, 0; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, 0; }
int nvrtcCreateProgram(void** program, const char* source, const char* name, int headers,
                       const char* const* texts, const char* const* paths) {
  (void)name, (void)headers, (void)texts, (void)paths;
  return *program = strdup(source), 0;
}
int nvrtcDestroyProgram(void** program) { return free(*program), *program = NULL, 0; }
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  (void)program, (void)count, (void)options;
  const char* milliseconds = getenv("FAKE_NVRTC_MS");
  if (milliseconds) usleep(1000 * (unsigned)atoi(milliseconds));
  return COUNT(nvrtcCompileProgram), 0;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) { return (void)program, *size = 0, 0; }
int nvrtcGetProgramLog(void* program, char* log) { return (void)program, (void)log, 0; }
int nvrtcGetCUBINSize(void* program, size_t* size) { return *size = strlen(program) + 1, 0; }
int nvrtcGetCUBIN(void* program, char* text) { return strcpy(text, program), 0; }
int nvrtcGetPTXSize(void* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void* program, char* text) { return nvrtcGetCUBIN(program, text); }
const char* nvrtcGetErrorString(int result) { return (void)result, "?"; }
