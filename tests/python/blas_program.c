/* A program that multiplies by cuBLAS: linked against it or, with OPENS defined, opening it. Says
 * whether the product was right, and how often the library computed it.
 *
 *   idle      multiplies nothing; says what of Ingot and CUDA is mapped
 *   lookup    whether dlsym(RTLD_NEXT) means what it means without this library in between
 *   threads   eight threads, twenty products each, two handles
 *   (none)    one product
 *
 * With LIBRARY defined, a library whose function multiplies once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M = 512, N = 384, K = 1216 };

typedef int Create(void**);
typedef int Sgemm(void*, int, int, int, int, int, const float*, const float*, int, const float*, int,
                  const float*, float*, int);
typedef long Calls(const char*);

#ifdef OPENS
static Create* create;
static Sgemm* sgemm;
static Calls* calls;
static void find(void) {
  void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
  create = (Create*)dlsym(library, "cublasCreate_v2");
  sgemm = (Sgemm*)dlsym(library, "cublasSgemm_v2");
  calls = (Calls*)dlsym(library, "fake_calls");
}
#else
Create cublasCreate_v2;
Sgemm cublasSgemm_v2;
Calls fake_calls;
#define create cublasCreate_v2
#define sgemm cublasSgemm_v2
#define calls fake_calls
static void find(void) {}
#endif

static float a[M * K], b[K * N];

static int multiply(void* handle) {
  const float alpha = 1, beta = 0;
  float* c = malloc(sizeof(float) * M * N);
  int wrong = sgemm(handle, 0, 0, M, N, K, &alpha, a, M, b, K, &beta, c, M) != 0;
  for (int at = 0; at < M * N; at += 977) {
    double sum = 0;
    for (int p = 0; p < K; ++p) sum += (double)a[at % M + p * M] * b[p + at / M * K];
    if (!(c[at] - sum < 1e-3 && sum - c[at] < 1e-3)) wrong = 1;
  }
  free(c);
  return wrong;
}

#ifdef LIBRARY
/* 1: wrong, 2: computed by the library. */
int user_multiplies(void) {
  static void* handle;
  if (handle == NULL) {
    find();
    for (int i = 0; i < M * K; ++i) a[i] = (float)(i % 101) / 101 - 0.5f;
    for (int i = 0; i < K * N; ++i) b[i] = (float)(i % 103) / 103 - 0.5f;
    create(&handle);
  }
  const long before = calls("cublasSgemm_v2");
  const int wrong = multiply(handle);
  return wrong + 2 * (calls("cublasSgemm_v2") != before);
}
#else
static void* handles[2];
static void* many(void* which) {
  long wrong = 0;
  for (int i = 0; i < 20; ++i) wrong += multiply(which);
  return (void*)wrong;
}

static void show_maps(void) {
  char line[1024];
  FILE* maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof(line), maps)) {
    if (strstr(line, "libcu") || strstr(line, "libingot.so") || strstr(line, "libnv")) {
      fputs(line, stdout);
    }
  }
  fclose(maps);
}

int main(int count, char** words) {
  const char* what = count > 1 ? words[1] : "";
  if (strcmp(what, "idle") == 0) return show_maps(), 0;
  if (strcmp(what, "lookup") == 0) {
    /* The program comes first, so what follows it defines "exit", and nothing "main". */
    printf("%d %d %d\n", dlsym(RTLD_NEXT, "exit") != NULL, dlsym(RTLD_NEXT, "main") == NULL,
           dlsym(RTLD_DEFAULT, "no such symbol") == NULL && dlerror() != NULL);
    return 0;
  }
  find();
  for (int i = 0; i < M * K; ++i) a[i] = (float)(i % 101) / 101 - 0.5f;
  for (int i = 0; i < K * N; ++i) b[i] = (float)(i % 103) / 103 - 0.5f;
  create(&handles[0]);
  create(&handles[1]);
  long wrong = 0;
  if (strcmp(what, "threads") == 0) {
    pthread_t threads[8];
    for (int i = 0; i < 8; ++i) pthread_create(&threads[i], NULL, many, handles[i % 2]);
    for (int i = 0; i < 8; ++i) {
      void* found;
      pthread_join(threads[i], &found);
      wrong += (long)found;
    }
  } else {
    wrong = multiply(handles[0]);
  }
  printf("wrong %ld, by the library %ld\n", wrong, calls("cublasSgemm_v2"));
  return 0;
}
#endif
