// A CUDA driver without a device: it loads anything and writes launches down instead of running
// them, so that what Triton's launchers hand over can be compared byte by byte.

#include <string.h>

#include "cuda.h"

enum { MAX_KERNELS = 256, MAX_PARAMS = 64, LOG_BYTES = 1 << 20 };

static struct { CUfunction function; int count; int sizes[MAX_PARAMS]; } kernels[MAX_KERNELS];
static int num_kernels, log_length;
static unsigned char launch_log[LOG_BYTES];

static void put(const void *bytes, int count) {
  if (log_length + count <= LOG_BYTES) {
    memcpy(launch_log + log_length, bytes, count);
    log_length += count;
  }
}

// Says how many bytes each parameter of a kernel has; of others, none is written down.
void fake_sizes(unsigned long long function, int count, const int *sizes) {
  kernels[num_kernels].function = (CUfunction)function;
  kernels[num_kernels].count = count;
  memcpy(kernels[num_kernels++].sizes, sizes, count * sizeof(int));
}

// Gives the log since the last call, and begins a new one.
int fake_log(unsigned char *out) {
  int length = log_length;
  memcpy(out, launch_log, length);
  log_length = 0;
  return length;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  put(&c->gridDimX, 4);
  put(&c->gridDimY, 4);
  put(&c->gridDimZ, 4);
  put(&c->blockDimX, 4);
  put(&c->sharedMemBytes, 4);
  put(&c->hStream, 8);
  put(&f, 8);
  for (unsigned i = 0; i < c->numAttrs; i++) put(&c->attrs[i].id, 4);
  for (int k = 0; k < num_kernels; k++)
    if (kernels[k].function == f)
      for (int i = 0; i < kernels[k].count; i++) put(params[i], kernels[k].sizes[i]);
  return CUDA_SUCCESS;
}

// A map is all that it was made of.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long parts[16] = {type, (unsigned long long)address, swizzle, fill, promotion};
  int at = 5;
  for (unsigned i = 0; i < rank; i++) parts[at++] = dims[i] << 32 | box[i];
  for (unsigned i = 0; i + 1 < rank; i++) parts[at++] = strides[i];
  memcpy(map, parts, sizeof(parts));
  return CUDA_SUCCESS;
}

static unsigned long long next_function = 4096;
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  *f = (CUfunction)(next_function += 64);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute a, CUfunction f) {
  *value = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute a, CUdevice d) {
  *value = a == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)out = p;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult r, const char **text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit l) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)8; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *data) { *m = (CUmodule)16; return 0; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) { *c = 0; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  *n = 1;
  return CUDA_SUCCESS;
}
