/* A plugin that passes everything on to OpenVINO's, and calls every processor Intel's: the library lists the devices of
   that vendor alone, while its kernels run on any x86 processor. PLUGIN is its path; the index is that of the function
   HardwareDevice_VendorId in the C API of onnxruntime 1.22 and later. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define INTEL 0x8086
#define VENDOR_ID 308
#define FUNCTIONS 480

typedef struct {
  const void *(*get_api)(uint32_t);
  const char *(*get_version)(void);
} Base;
typedef void *(*Create)(const char *, const Base *, const void *, void **, size_t, size_t *);
typedef void *(*Release)(void *);

static const Base *given;
static Base changed;
static void *functions[FUNCTIONS];

static uint32_t vendor_id(const void *device) {
  (void)device;
  return INTEL;
}

static const void *get_api(uint32_t version) {
  const void *api = given->get_api(version);
  if (api == NULL) return NULL;
  memcpy(functions, api, sizeof functions);
  functions[VENDOR_ID] = (void *)vendor_id;
  return functions;
}

static void *function(const char *name) {
  static void *library;
  if (library == NULL) library = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
  return library == NULL ? NULL : dlsym(library, name);
}

void *CreateEpFactories(const char *name, const Base *base, const void *logger, void **factories, size_t most,
                        size_t *count) {
  given = base;
  changed.get_api = get_api;
  changed.get_version = base->get_version;
  return ((Create)function("CreateEpFactories"))(name, &changed, logger, factories, most, count);
}

void *ReleaseEpFactory(void *factory) { return ((Release)function("ReleaseEpFactory"))(factory); }
