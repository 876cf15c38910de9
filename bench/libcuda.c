/* A CUDA driver without a GPU, for `gradwire bench host`: every call succeeds at once, and nothing runs. */
#include <stddef.h>

long driver_calls, launches; /* all calls, and the launches of kernels among them */

#define CALL(name, ...) int name(__VA_ARGS__) { driver_calls++;
#define END return 0; }

/* What Triton asks of a driver. Of a function with `...`, the caller ignores all but the success. */
CALL(cuLaunchKernelEx, const void *config, void *function, void **parameters, void **extra) launches++; END
CALL(cuPointerGetAttribute, void *value, int attribute, size_t pointer) END
CALL(cuCtxGetCurrent, void **context) *context = (void *)1; END
CALL(cuCtxGetDevice, int *device) *device = 0; END
CALL(cuStreamIsCapturing, void *stream, int *status) *status = 0; END
CALL(cuModuleUnload, void *module) END
CALL(cuDeviceGet, int *device, int ordinal) *device = ordinal; END
CALL(cuDeviceGetAttribute, int *value, int attribute, int device) *value = 232448; END /* shared memory (B) of sm_90 */
CALL(cuDevicePrimaryCtxRetain, void **context, int device) *context = (void *)1; END
CALL(cuDriverGetVersion, int *version) *version = 13000; END
CALL(cuModuleGetFunction, void **function, void *module, const char *name) *function = (void *)1; END
CALL(cuGetErrorString, int error, const char **text) *text = ""; END
CALL(cuFuncGetAttribute, int *value, int attribute, void *function)
    *value = attribute == 0 ? 1024 : 0; END /* threads in a block; no registers, no spills */
CALL(cuCtxGetLimit, size_t *value, int limit) *value = 0; END
CALL(cuCtxSetCurrent, void *context) END
CALL(cuCtxSetLimit, int limit, size_t value) END
CALL(cuFuncSetAttribute, void *function, int attribute, int value) END
CALL(cuFuncSetCacheConfig, void *function, int config) END
CALL(cuModuleLoadData, void **module, const void *image) *module = (void *)1; END
CALL(cuOccupancyMaxActiveClusters, int *clusters, void *function, const void *config) *clusters = 1; END
CALL(cuTensorMapEncodeIm2col, void *map) END
CALL(cuTensorMapEncodeTiled, void *map) END
